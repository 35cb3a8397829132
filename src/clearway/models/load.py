"""Any source -> Model: the embedded model, a folder, a checkpoint file, a model's name, a hub id."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from clearway import device as machine
from clearway.device import Device
from clearway.errors import RequestError, UnavailableError
from clearway.home import expanded
from clearway.models import chosen, hub, library
from clearway.models.escape import escaped, escaped_errors
from clearway.models.folder import INDEX, load_folder
from clearway.models.model import Model
from clearway.models.single_file import load_file
from clearway.types import Precision


def load(
    source: str | Path = library.EMBEDDED,
    *,
    device: Device | str | None = None,
    precision: Precision | None = None,
    local_files_only: bool = False,
    allow_pickle: bool = False,
    memory_limit_bytes: int | None = None,
) -> Model:
    """The model at `source`, ready to draw.

    `source` is "embedded", a path (Diffusers folder or checkpoint file; an existing path always wins), the
    name of a model in a CLEARWAY_MODELS folder, or a hub id "owner/name". `device` and `precision` are chosen
    for the machine where they are None. Pickles are refused unless `allow_pickle`, and then only tensors are
    taken out of them. On CUDA the model is loaded and drawn with as if the device had `memory_limit_bytes`;
    what does not fit at once stays in host memory; elsewhere a note says that nothing is limited. Raises
    RequestError for what is not there or is no usable model, UnavailableError where memory does not suffice
    or the hub cannot be reached.
    """
    if not isinstance(source, str | os.PathLike):
        raise RequestError(
            f"a model is a path, a name or a hub id, and {type(source).__name__} was given; "
            "clearway.accelerate takes a Diffusers pipeline"
        )
    text = os.fsdecode(source)
    where = device if isinstance(device, Device) else machine.pick(device)
    dtypes = _canonical(precision or machine.default_precision(where))
    notes: tuple[str, ...] = ()
    with escaped_errors():
        if text == library.EMBEDDED:
            path, name = library.embedded_folder(), library.EMBEDDED
            if not os.path.isfile(path / INDEX):
                raise UnavailableError(
                    "this installation of Clearway holds no embedded model; give --model a path"
                )
        else:
            path, name, notes = _locate(text, dtypes, local_files_only)
        if precision is None and (kept := chosen.adopted(path, where.kind).precision):
            dtypes = _canonical(kept)
        if where.kind != "cpu":
            from clearway.models import _checks

            _checks.begin_loading(where, dtypes, memory_limit_bytes)
        read = load_folder if os.path.isfile(path / INDEX) else load_file

        def read_to(device: Device) -> Model:
            import torch

            with torch.inference_mode(False):  # what is made in it has no version: no change would be noticed
                return read(path, name=name, device=device, precision=dtypes, allow_pickle=allow_pickle)

        model = _read_where_it_fits(read_to, where, memory_limit_bytes)
    notes = (*map(escaped, notes), *model.notes)
    if memory_limit_bytes is not None and where.kind != "cuda":
        notes += (f"the memory limit is for CUDA devices: on {where.kind} nothing is limited by it",)
    return replace(model, notes=notes, memory_limit_bytes=memory_limit_bytes)


def _read_where_it_fits(read_to: Callable[[Device], Model], device: Device, limit_bytes: int | None) -> Model:
    """The model on the device, or, where a CUDA device has no memory for all of it, on the host, from where
    its placement moves it part by part.

    Where it does not fit beside the self-tests that are at work, these come to their end first.
    """
    claimed = 0
    if device.kind == "cuda":
        from clearway.ops import verdicts

        claimed = verdicts.claimed_bytes(device)
    if claimed:
        limit = None if limit_bytes is None else limit_bytes - claimed
        model = _read_if_it_fits(read_to, device, limit)
        if model is not None:
            return model
        verdicts.settle(device.kind)
    model = _read_if_it_fits(read_to, device, limit_bytes)
    if model is not None:
        return model
    model = read_to(Device("cpu"))
    note = f"{model.name} does not fit into the memory of {device} at once: it is moved there part by part"
    return replace(model, device=device, notes=(*model.notes, note))


def _read_if_it_fits(
    read_to: Callable[[Device], Model], device: Device, limit_bytes: int | None
) -> Model | None:
    """The model on the device; None, with nothing left there, where a CUDA device has too little memory."""
    try:
        with machine.capped(device, limit_bytes):
            return read_to(device)
    except UnavailableError as error:
        if device.kind != "cuda" or error.__cause__ is None or not machine.is_out_of_memory(error.__cause__):
            raise
    gc.collect()  # what was read of it, before the memory is needed again
    machine.release_memory(device)
    return None


def _canonical(precision: Precision) -> Precision:
    """The same dtypes by torch's full names ("fp16" is "float16"); RequestError for one that is not known."""
    parts = ("unet", "text_encoder", "vae", "sampling")
    named = {part: machine.dtype_for(part, getattr(precision, part)) for part in parts}
    return replace(precision, **named)  # type: ignore[arg-type]


def _locate(source: str, precision: Precision, local_files_only: bool) -> tuple[Path, str, tuple[str, ...]]:
    """(path, the model's name, notes) of a source that is not the embedded model."""
    if not source.strip() or "\0" in source:
        raise RequestError("the model's name is empty; 'embedded' is the one that ships with Clearway")
    try:
        path = expanded(source)
        exists = path.exists()
        # "." and ".." have no name of their own; a link keeps its own and not its target's
        path = path.resolve() if path.name in ("", "..") else path.absolute()
    except (OSError, RuntimeError):  # a name too long for a path, a circle of links
        exists = False
    if exists:
        return path, library.name_of(path), ()
    found = library.find(source)
    if found is not None:
        return found, library.name_of(found), ()
    if hub.is_hub_id(source) and not source.lower().endswith(library.SUFFIXES):
        half = precision.unet == "float16"
        folder, notes = hub.download(source, half=half, local_files_only=local_files_only)
        return folder, source.rpartition("/")[2], notes
    raise library.not_found(source)
