"""The arguments of a call as torch.mps.compile_shader takes them, in memory that a kernel may touch.

A tensor is copied to a buffer of its own between canaries, so that a stray access cannot land in a neighbour,
and what changed is copied back. Nothing but what the tensor's view covers may have changed.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

CONSTANT_LIMIT = 4096  # bytes, setBytes
_GUARD = 65536
_LETTERS = {
    torch.float16: "h",
    torch.bfloat16: "b",
    torch.float32: "f",
    **dict.fromkeys((torch.bool, torch.int8, torch.uint8), "1"),
    torch.int16: "2",
    torch.int32: "4",
    torch.int64: "8",
}
_CASTS = {
    **{"int32": ("i", "4"), "int16": ("h", "2"), "int8": ("b", "1"), "uint8": ("B", "1")},
    **{"fp16": ("e", "h"), "bf16": ("bf16", "b")},
}


@dataclass(slots=True)
class Argument:
    """`address` and `size` are what the kernel gets; `letter` is the element type, as cpp/msl/entry.h's."""

    address: int
    size: int
    letter: str
    keep: Any
    tensor: torch.Tensor | None = None
    inside: np.ndarray[Any, Any] | None = None
    before: bytes = field(default=b"", repr=False)


def bind(arguments: tuple[Any, ...], casts: str | dict[int, str] | None) -> list[Argument]:
    """One Argument each, in order. Raises what the real call raises: RuntimeError, ValueError."""
    bound: list[Argument] = []
    for index, value in enumerate(arguments):
        if isinstance(value, torch.Tensor):
            shared = next((a for a in bound if a.tensor is not None and _same(a.tensor, value)), None)
            bound.append(shared or _tensor(value))
        else:
            cast = casts.get(index) if isinstance(casts, dict) else casts
            bound.append(_constant(value, cast))
    return bound


def give_back(bound: list[Argument]) -> list[tuple[int, str]]:
    """Copies what the kernel changed into the tensors; (argument, what was wrong with a store)."""
    faults = []
    for index, argument in enumerate(bound):
        tensor = argument.tensor
        if tensor is None:
            continue
        if not _canaries_whole(argument):
            faults.append((index, "store out of bounds"))
        after = ctypes.string_at(argument.address, argument.size)
        if after == argument.before:
            continue
        others = [a.tensor for a in bound if a.tensor is not None and a is not argument]
        if any(_overlap(tensor, other) for other in others):
            faults.append((index, "store to memory that another argument covers too"))
        if argument.inside is not None:
            changed = np.frombuffer(after, np.uint8) != np.frombuffer(argument.before, np.uint8)
            if (changed & (argument.inside == 0)).any():
                faults.append((index, "store between the elements of a strided argument"))
        ctypes.memmove(tensor.data_ptr(), argument.address, argument.size)
    return faults


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the view's first element to its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + _span(b) and other < start + _span(a)


def _tensor(tensor: torch.Tensor) -> Argument:
    if tensor.dtype not in _LETTERS:
        raise RuntimeError(f"the emulator takes no tensor of {tensor.dtype}")
    size = _span(tensor)
    store = ctypes.create_string_buffer(size + 2 * _GUARD + 256)
    ctypes.memset(store, 0xA5, ctypes.sizeof(store))
    # A view's own alignment, so that misaligned vector accesses show as they would on the device.
    address = ctypes.addressof(store) + _GUARD
    address += -address % 256 + tensor.data_ptr() % 64
    ctypes.memmove(address, tensor.data_ptr(), size)
    before = ctypes.string_at(address, size)
    return Argument(address, size, _LETTERS[tensor.dtype], store, tensor, _inside(tensor, size), before)


def _inside(tensor: torch.Tensor, size: int) -> np.ndarray[Any, Any] | None:
    """1 for each byte of the span that the view covers; None where it covers all."""
    width = tensor.element_size()
    covered = np.zeros(size // width, np.uint8)
    if size:
        view = np.lib.stride_tricks.as_strided(covered, tuple(tensor.shape), tensor.stride())
        view[...] = 1
    return None if covered.all() else np.repeat(covered, width)


def _canaries_whole(argument: Argument) -> bool:
    start = ctypes.addressof(argument.keep)
    end = start + ctypes.sizeof(argument.keep)
    after = argument.address + argument.size
    low = ctypes.string_at(start, argument.address - start)
    high = ctypes.string_at(after, end - after)
    return low == b"\xa5" * len(low) and high == b"\xa5" * len(high)


def _constant(value: Any, cast: str | None) -> Argument:
    """A number or a list of numbers as setBytes gets it: ints as int64, floats as float32, unless cast."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not values:
        raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
    if any(isinstance(each, torch.Tensor) for each in values):
        raise RuntimeError("the emulator has no lists of tensors")
    if not all(isinstance(each, (int, float)) for each in values):
        raise RuntimeError(f"Unsupported argument type: {type(value).__name__}")
    whole = isinstance(values[0], int)
    if whole and not all(isinstance(each, int) for each in values):
        raise RuntimeError("a list that begins with an int is one of ints")
    code, letter = ("q", "8") if whole else ("f", "f")
    if cast is not None:
        if cast not in _CASTS:
            raise RuntimeError(f"Unsupported cast instruction {cast}")
        code, letter = _CASTS[cast]
    raw = b"".join(_pack(each, code) for each in values)
    if len(raw) > CONSTANT_LIMIT:
        raise ValueError(f"a constant of {len(raw)} bytes; setBytes takes up to {CONSTANT_LIMIT}")
    store = ctypes.create_string_buffer(raw, len(raw) + 64)
    return Argument(ctypes.addressof(store), len(raw), letter, store)


def _pack(value: int | float, code: str) -> bytes:
    if code == "bf16":
        return struct.pack("<h", int(torch.tensor(float(value), dtype=torch.bfloat16).view(torch.int16)))
    return struct.pack(f"<{code}", int(value) if code in "qihbB" else float(value))
