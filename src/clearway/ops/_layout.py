"""What op files ask of tensors before a kernel takes them: rows, planes, dtypes. Metadata only."""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 2**31


def row_stride(x: Tensor) -> int | None:
    """The one stride of the rows along the last axis; None where there is none or rows are not contiguous."""
    if x.dim() == 0 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        return None
    found = _collapsed(x, 0, x.dim() - 1)
    return found[1] if found else None


def row_groups(x: Tensor) -> tuple[int, int, int] | None:
    """(rows a group, stride of groups, stride of rows): rows along the last axis at two strides.

    As of the heads of packed queries, keys and values. None where two are too few or rows not contiguous.
    """
    if x.dim() == 0 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        return None
    for split in range(x.dim()):
        groups, rows = _collapsed(x, 0, split), _collapsed(x, split, x.dim() - 1)
        if groups and rows:
            return rows[0], groups[1], rows[1]
    return None


def plane_strides(x: Tensor) -> tuple[int, int, int] | None:
    """Strides of batch, channel and all axes after it taken as one; None where those have no common one."""
    found = _collapsed(x, 2, x.dim())
    return (x.stride(0), x.stride(1), found[1]) if found else None


def _collapsed(x: Tensor, first: int, end: int) -> tuple[int, int] | None:
    length, inner = 1, 0
    for axis in reversed(range(first, end)):
        size, stride = x.shape[axis], x.stride(axis)
        if size == 1:
            continue
        if length == 1:
            inner = stride
        elif stride != inner * length:
            return None
        length *= size
    return length, inner


def refuse_rows(name: str, x: Tensor) -> str | None:
    """Why `x` is not rows at one stride."""
    if row_stride(x) is None:
        return f"{name} has strides {x.stride()}; it takes contiguous rows at one stride"
    return None


def refuse_dtype(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why the dtype of `x` is none of `dtypes`."""
    if x.dtype in dtypes:
        return None
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{name} is {str(x.dtype).removeprefix('torch.')}; it takes {names}"


def refuse_others(x: Tensor, width: int, **others: Tensor | None) -> str | None:
    """Why one of `others` is not (width,), contiguous, of the dtype of x or all float32."""
    given = {name: other for name, other in others.items() if other is not None}
    if len({other.dtype for other in given.values()}) > 1:
        return f"{' and '.join(given)} differ in dtype"
    for name, other in given.items():
        if other.dtype not in (x.dtype, torch.float32):
            return f"{name} is {other.dtype}, x {x.dtype}; it takes the dtype of x or float32"
        if other.shape != (width,) or not other.is_contiguous():
            return (
                f"{name} is {tuple(other.shape)}, strides {other.stride()}; it takes ({width},), contiguous"
            )
    return None


def refuse_alike(x: Tensor, **others: Tensor | None) -> str | None:
    """Why one of `others` has not the dtype of x."""
    for name, other in others.items():
        if other is not None and other.dtype != x.dtype:
            return f"{name} is {other.dtype}, x {x.dtype}; they must agree"
    return None


def image_format(x: Tensor) -> torch.memory_format:
    """Channels-last where x (N, C, H, W) is that and nothing else; contiguous otherwise."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def in_layout_of(x: Tensor, out: Tensor) -> Tensor:
    """`out`, of the shape of x, in the strides torch.empty_like gives x."""
    wanted = torch.empty_like(x)
    return out if out.stride() == wanted.stride() else wanted.copy_(out)
