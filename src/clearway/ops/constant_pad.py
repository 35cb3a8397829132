"""x with a constant around it, or cut where an amount is negative.

Used before the strided convolutions of the VAE's encoder (one column and row at the end) and in video VAEs,
where MPSGraph's is silently wrong at five axes for inner extents from 65536 on (torch 2.13; PyTorch issues
194922, 194944, 195147).
Source: torch.nn.functional.pad.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _metal, _metal_launch
from clearway.ops._cases import normal
from clearway.ops._layout import LIMIT, refuse_dtype
from clearway.ops.contract import Case, Given, op


def cases() -> Iterator[tuple[str, Given]]:
    """The VAE encoder's, a video VAE's, and small ones."""
    yield "tiny", (normal(2, 3), [1, 2], 0.5)
    yield "ragged", (normal(2, 3, 5, 7), [0, 1, 0, 1], 0.0)
    yield "five axes", (normal(1, 2, 3, 4, 5), [1, 0, 2, 1, 0, 3, 1, 1], -1.5)
    yield "cut", (normal(2, 6, 7), [-1, 2, -2, -1], 0.25)
    yield "transposed", (normal(2, 6, 7).transpose(1, 2), [1, 1], 0.0)
    yield "VAE encoder 512", lambda: (normal(1, 128, 512, 512), [0, 1, 0, 1], 0.0)
    yield "video, wide", lambda: (normal(1, 2, 4, 3, 65537), [1, 1, 1, 1, 2, 0], 0.0)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernel does not take."""
    yield "metal", "6 axes", (normal(1, 1, 1, 1, 2, 3), [1, 1], 0.0)
    yield "metal", "float64", (normal(2, 8).double(), [1, 1], 0.0)


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, pad, value: x.nbytes + _product(_padded(x, pad)) * x.element_size(),
    flops=lambda *_: 0,
    compile="inline",
)
def constant_pad(x: Tensor, pad: list[int], value: float) -> Tensor:
    """x padded with `value`, contiguous; `pad` from the last axis on, (before, after) each."""
    out = F.pad(x, pad, value=value).contiguous()
    return out if any(pad) else out.clone()  # with nothing to add torch may give x itself back


def _refuse(x: Tensor, pad: list[int], value: float) -> str | None:
    if x.dim() > _metal_launch.PAD_AXES:
        return f"x has {x.dim()} axes; it takes up to {_metal_launch.PAD_AXES}"
    if len(pad) % 2 or len(pad) > 2 * x.dim():
        return f"there are {len(pad)} amounts for {x.dim()} axes; it takes pairs, one an axis at most"
    shape = _padded(x, pad)
    if min(shape, default=0) < 0 or _product(shape) >= LIMIT:
        return f"the result would be {tuple(shape)}; it takes fewer than 2^31 elements"
    return refuse_dtype("x", x, _metal.DTYPES)


def _padded(x: Tensor, pad: list[int]) -> list[int]:
    shape = list(x.shape)
    for axis in range(len(pad) // 2):
        shape[-1 - axis] += pad[2 * axis] + pad[2 * axis + 1]
    return shape


def _product(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@constant_pad.implementation(
    "metal",
    device="mps",
    absent=_metal.absent,
    refuse=_refuse,
    sources=("constant_pad.metal", "_metal.py", "_metal_launch.py"),
)
def _metal_run(x: Tensor, pad: list[int], value: float) -> Tensor:
    out = x.new_empty(_padded(x, pad))
    _metal_launch.constant_pad(_metal.library("constant_pad"), x, pad, value, out)
    return out
