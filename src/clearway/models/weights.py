"""Named tensors of a checkpoint, read one at a time, whatever kind of file they lie in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from clearway.device import is_out_of_memory
from clearway.errors import RequestError, one_line
from clearway.models.card import read_object
from clearway.models.escape import shown
from clearway.models.header import TensorInfo, contents, read_header

if TYPE_CHECKING:
    from torch import Tensor

PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
READ_BYTES = 2**30  # macOS refuses to read 2 GiB at once
TORCH_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


class Weights:
    """Tensors by name; a context manager that closes the files behind them.

    `shapes` and `metadata` are there at once. What `read(name)` returns is the caller's own, unless `shared`:
    then it must be copied to be kept. `order(name)` is its place on disk, for reading front to back.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Tensor],
        *,
        metadata: Mapping[str, str] | None = None,
        order: Callable[[str], Any] | None = None,
        files: contextlib.ExitStack | None = None,
        shared: bool = False,
    ) -> None:
        self.shapes = dict(shapes)
        self.metadata = dict(metadata or {})
        self.read = read
        self.shared = shared
        self.order = order or (lambda name: 0)
        self._files = files or contextlib.ExitStack()

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle checkpoint by its content, or by its name where the content says nothing."""
    kind, suffix = contents(path), path.suffix.lower()
    if kind == "other":
        return suffix in PICKLE_SUFFIXES
    return kind in ("zip", "pickle") and suffix != ".safetensors"


def open_weights(path: Path, *, allow_pickle: bool = False) -> Weights:
    """The tensors of one checkpoint file. RequestError where it is damaged, or an unwelcome pickle."""
    if is_pickle(path):
        if not allow_pickle:
            raise RequestError(
                f"{path.name} is a pickle checkpoint, which can run code when it is opened; take the "
                ".safetensors version, or allow it with --allow-pickle (only tensors are read then)"
            )
        return _open_pickle(path)
    return open_safetensors([path])


def open_safetensors(paths: list[Path]) -> Weights:
    """The tensors of one or several (sharded) safetensors files as one collection.

    Read straight into their own memory and not through a mapping: 2.1 GB of float16 took 1.3 to 1.5 s and one
    copy's memory; mapped and copied 1.4 to 2.9 s and twice as much (2-core x86 VM, file cached, 2026-11-29).
    """
    place: dict[str, tuple[int, TensorInfo]] = {}
    metadata: dict[str, str] = {}
    opened: list[tuple[Path, FileIO]] = []
    with contextlib.ExitStack() as files:
        for number, path in enumerate(paths):
            header = read_header(path)
            opened.append((path, files.enter_context(FileIO(path))))
            metadata |= header.metadata
            place |= {name: (number, info) for name, info in header.tensors.items()}
        kept = files.pop_all()

    def read(name: str) -> Tensor:
        number, info = place[name]
        path, file = opened[number]
        return _read(path.name, file, info)

    return Weights(
        {name: info.shape for name, (_, info) in place.items()},
        read,
        metadata=metadata,
        order=lambda name: (place[name][0], place[name][1].start),
        files=kept,
    )


def _read(name: str, file: FileIO, info: TensorInfo) -> Tensor:
    """One tensor's bytes as a tensor of its own."""
    import torch

    value = torch.empty(info.shape, dtype=getattr(torch, TORCH_DTYPES[info.dtype]))
    if value.numel() == 0:
        return value
    memory = value.view(-1).view(torch.uint8).numpy().data
    try:
        file.seek(info.start)
        done = 0
        while done < len(memory):
            got = file.readinto(memory[done : done + READ_BYTES])
            if not got:
                raise RequestError(f"{name} became shorter while it was read")
            done += got
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror or one_line(error)}") from error
    return value


def _open_pickle(path: Path) -> Weights:
    """A pickle's tensors, through torch's weights_only loader: anything else in it is refused."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=contents(path) == "zip")
    except Exception as error:  # a hostile file can make torch raise anything; all of it means "not loaded"
        if is_out_of_memory(error):
            raise
        raise RequestError(
            f"{path.name} holds more than tensors or is damaged, and was not opened "
            f"({one_line(error)[:160]}); take the .safetensors version"
        ) from error
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict):
        raise RequestError(f"{path.name} holds no table of named tensors")
    tensors = {
        name: value for name, value in found.items() if isinstance(name, str) and torch.is_tensor(value)
    }
    if not tensors:
        raise RequestError(f"{path.name} holds no tensors")

    def read(name: str) -> Tensor:
        value = tensors[name]
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if not plain or value.is_meta or value.is_nested:
            raise RequestError(
                f"{path.name}: {shown(name)} is no plain tensor (sparse, or without its numbers)"
            )
        return value

    return Weights({name: tuple(value.shape) for name, value in tensors.items()}, read, shared=True)


def shards(index: Path) -> list[Path]:
    """The files that a `….safetensors.index.json` names, in order; RequestError where one is not there."""
    listed = read_object(index).get("weight_map")
    names = list(listed.values()) if isinstance(listed, dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise RequestError(f"{index.name} does not list the files of the weights")
    paths = [index.parent / name for name in sorted(set(names))]
    for path in paths:
        if path.parent != index.parent or not os.path.isfile(path):
            raise RequestError(f"{index.name} names {shown(path.name)}, which is not beside it")
    return paths
