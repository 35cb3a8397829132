"""Softmax over wide rows: y = exp(x - max(x)) / sum(exp(x - max(x))) along the last axis.

Used where attention materialises its scores: rows as long as there are keys, 77 to 16384. PyTorch has a Metal
kernel of its own from 2.15 on; before, MPSGraph computes it.
Source: torch.nn.functional.softmax.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _metal, _metal_launch
from clearway.ops._cases import normal
from clearway.ops._layout import LIMIT, refuse_dtype, refuse_rows
from clearway.ops.contract import Case, Given, op


def cases() -> Iterator[tuple[str, Given]]:
    """Scores of SD UNets and of the VAE, and small ones."""
    yield "tiny", (normal(1, 2, 3),)
    yield "ragged", (normal(3, 5, 77, deviation=4.0),)
    yield "large values", (normal(4, 130, deviation=300.0),)
    yield "every second row", (normal(2, 14, 48)[:, ::2],)
    yield "SD1.5 32x32", lambda: (normal(2, 8, 1024, 1024),)
    yield "SD1.5 64x64, text", lambda: (normal(2, 8, 4096, 77),)
    yield "VAE 512", lambda: (normal(1, 1, 4096, 4096),)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernel does not take."""
    yield "metal", "contiguous rows", (normal(4, 8, 6).transpose(1, 2),)
    yield "metal", "float64", (normal(2, 8).double(),)


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x: 2 * x.nbytes,
    flops=lambda x: 5 * x.numel(),
    compile="inline",
)
def softmax(x: Tensor) -> Tensor:
    """softmax(x) over the last axis, contiguous. x (..., D)."""
    return F.softmax(x, dim=-1).contiguous()


def _refuse(x: Tensor) -> str | None:
    if x.numel() >= LIMIT:
        return f"x has {x.numel()} elements; it takes fewer than 2^31"
    return refuse_dtype("x", x, _metal.DTYPES) or refuse_rows("x", x)


@softmax.implementation(
    "metal",
    device="mps",
    absent=_metal.absent,
    refuse=_refuse,
    sources=("softmax.metal", "_metal.py", "_metal_launch.py"),
)
def _metal_run(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    _metal_launch.softmax(_metal.library("softmax"), x, out)
    return out
