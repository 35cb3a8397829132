"""Any source -> Model: the embedded model, a folder, a checkpoint file, a model's name, a hub id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clearway import device as machine
from clearway.device import Device
from clearway.errors import RequestError, UnavailableError
from clearway.models import hub, library
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
) -> Model:
    """The model at `source`, ready to draw.

    `source` is "embedded", a path (Diffusers folder or checkpoint file; an existing path always wins), the
    name of a model in a CLEARWAY_MODELS folder, or a hub id "owner/name". `device` and `precision` are chosen
    for the machine where they are None. Pickles are refused unless `allow_pickle`, and then only tensors are
    taken out of them. Raises RequestError for what is not there or is no usable model, UnavailableError where
    memory does not suffice or the hub cannot be reached.
    """
    text = str(source)
    where = device if isinstance(device, Device) else machine.pick(device)
    dtypes = precision or machine.default_precision(where)
    for name in (dtypes.unet, dtypes.text_encoder, dtypes.vae):
        machine.dtype(name)
    notes: tuple[str, ...] = ()
    if text == library.EMBEDDED:
        path, name = library.embedded_folder(), library.EMBEDDED
        if not (path / INDEX).is_file():
            raise UnavailableError(
                "this installation of Clearway holds no embedded model; give --model a path"
            )
    else:
        path, name, notes = _locate(text, dtypes, local_files_only)
    read = load_folder if (path / INDEX).is_file() else load_file
    model = read(path, name=name, device=where, precision=dtypes, allow_pickle=allow_pickle)
    return replace(model, notes=(*notes, *model.notes)) if notes else model


def _locate(source: str, precision: Precision, local_files_only: bool) -> tuple[Path, str, tuple[str, ...]]:
    """(path, the model's name, notes) of a source that is not the embedded model."""
    if not source.strip() or "\0" in source:
        raise RequestError("the model's name is empty; 'embedded' is the one that ships with Clearway")
    try:
        path = Path(source).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError):  # a name too long for a path, a home that is not known
        exists = False
    if exists:
        return path, library.name_of(path.absolute()), ()
    found = library.find(source)
    if found is not None:
        return found, library.name_of(found), ()
    if hub.is_hub_id(source) and not source.lower().endswith(library.SUFFIXES):
        half = precision.unet == "float16"
        folder, notes = hub.download(source, half=half, local_files_only=local_files_only)
        return folder, source.rpartition("/")[2], notes
    raise library.not_found(source)
