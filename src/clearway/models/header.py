"""Safetensors headers: names, dtypes and shapes of a file's tensors, checked before anything is loaded.

The format: 8 bytes with the header's length (little endian), the header as JSON, then the tensors' bytes
without gaps. Every way in which a file can break this gives one sentence.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clearway.errors import RequestError, one_line

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: safetensors' dtype name, shape, and where in the file its bytes begin."""

    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says about itself."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {name: info.shape for name, info in self.tensors.items()}


def contents(path: Path) -> str:
    """What a file is by its first bytes: "safetensors", "zip", "pickle", "html", "git-lfs", "empty", "other".

    Raises RequestError where it cannot be read.
    """
    try:
        if not path.is_file():
            what = "a folder without model_index.json" if path.is_dir() else "not a file"
            name = path.name or str(path.absolute())
            raise RequestError(f"{name} is {what}; a model is a .safetensors file or a Diffusers folder")
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise RequestError(f"{path.name} cannot be read: {error.strerror or one_line(error)}") from error
    if not start:
        return "empty"
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER_BYTES:
        return "safetensors"  # before "pickle": a header's length may begin with the bytes of a pickle
    if start.startswith(b"PK\x03\x04"):
        return "zip"
    if start[0] == 0x80 and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    if start.startswith(b"version https://git-lfs"):
        return "git-lfs"
    return "html" if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<") else "other"


def read_header(path: Path) -> Header:
    """The checked header of the safetensors file at `path`; RequestError where it is none or is damaged."""
    name, kind = path.name, contents(path)
    sentences = {
        "empty": "is empty; download it again",
        "html": "is a web page and not weights; the download needs a login or another address",
        "git-lfs": "is a git-lfs pointer and not the weights; fetch them with `git lfs pull`",
        "zip": "is a zip archive (a pickle checkpoint, probably) and not safetensors, whatever its name says",
        "pickle": "is a pickle and not safetensors, whatever its name says",
    }
    if kind in sentences:
        raise RequestError(f"{name} {sentences[kind]}")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length < 2 or length > MAX_HEADER_BYTES:
                raise RequestError(f"{name} is not a safetensors file, or its beginning is damaged")
            if length > size - 8:
                raise RequestError(f"{name}: the file ends within its header; it was not downloaded whole")
            raw = file.read(length)
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror or one_line(error)}") from error
    try:
        found = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: its safetensors header is damaged ({one_line(error)})") from error
    return _checked(name, found, 8 + length, size)


def _checked(name: str, found: Any, begin: int, file_bytes: int) -> Header:
    """The header whose JSON is `found`, the tensors' bytes beginning at `begin`."""
    data_bytes = file_bytes - begin
    if not isinstance(found, dict):
        raise RequestError(f"{name}: its safetensors header is damaged (no table of tensors)")
    metadata = found.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        metadata = {}
    tensors = {key: _tensor(name, key, value) for key, value in found.items()}
    if not tensors:
        raise RequestError(f"{name} holds no tensors")
    end = 0
    for key, (info, stop) in sorted(tensors.items(), key=lambda item: (item[1][0].start, item[1][1])):
        if info.start != end:
            what = "overlaps another" if info.start < end else "leaves a gap before it"
            raise RequestError(f"{name}: its safetensors header is damaged (tensor {key[:80]!r} {what})")
        end = stop
    if end > data_bytes:
        whole = file_bytes - data_bytes + end
        raise RequestError(
            f"{name}: the file ends after {_part(file_bytes, whole)}; it was not downloaded whole"
        )
    if end < data_bytes:
        raise RequestError(
            f"{name}: {data_bytes - end} bytes follow the last tensor; the file or its header is damaged"
        )
    return Header(
        {key: replace(info, start=info.start + begin) for key, (info, _) in tensors.items()},
        {key: value for key, value in metadata.items() if isinstance(value, str)},
    )


def _tensor(name: str, key: str, value: Any) -> tuple[TensorInfo, int]:
    """The tensor's facts, its start counted from the first tensor's, and where its bytes end."""
    damaged = f"{name}: its safetensors header is damaged (tensor {key[:80]!r})"
    if not isinstance(value, dict):
        raise RequestError(damaged)
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not (_counts(shape) and _counts(offsets) and len(offsets) == 2 and len(shape) <= 16):
        raise RequestError(damaged)
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise RequestError(f"{name}: tensor {key[:80]!r} has the dtype {dtype!r:.40}, which is not supported")
    start, stop = offsets
    if max(shape, default=0) >= 2**48 or stop - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise RequestError(damaged)
    return TensorInfo(dtype, tuple(shape), start), stop


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _part(part: int, whole: int) -> str:
    """ "3.1 of 6.9 GB", in the unit of the whole; in bytes where rounding would hide the difference."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        left, right = f"{part / scale:.1f}", f"{whole / scale:.1f}"
        if whole >= scale and left != right:
            return f"{left} of {right} {unit}"
    return f"{part} of {whole} bytes"


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder; what cannot be read counts as nothing."""
    try:
        if path.is_file():
            return path.stat().st_size
        return sum(
            os.path.getsize(os.path.join(folder, file))
            for folder, _, files in os.walk(path)
            for file in files
        )
    except OSError:
        return 0
