"""GEGLU: y = a * gelu(b) of h = (a, b) along the last axis, with the exact gelu(b) = b (1 + erf(b / √2)) / 2.

Used in the feed-forward of every transformer block of the SD 1.x, SD 2.x and SDXL UNets, D = 1280 to 5120.
Source: Shazeer 2020 (arXiv 2002.05202); diffusers.models.activations.GEGLU.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _metal, _metal_launch, _triton
from clearway.ops._cases import normal
from clearway.ops._layout import LIMIT, refuse_dtype, refuse_rows, row_stride
from clearway.ops._triton import kernel, tl
from clearway.ops.contract import Case, Given, op


def cases() -> Iterator[tuple[str, Given]]:
    """Feed-forwards of SD UNets at their resolutions, and small ones."""
    yield "tiny", (normal(1, 3, 8),)
    yield "least", (normal(9, 2),)  # of one element alone the budget is one ulp, too little for any erf
    yield "ragged", (normal(2, 5, 74, deviation=3.0),)
    yield "several blocks a row", (normal(3, 2 * 1300),)
    yield "every second row", (normal(2, 14, 48)[:, ::2],)  # rows at one stride as seven in both halves
    yield "columns of a wider tensor", (normal(6, 100)[:, 20:84],)
    yield "large values", (normal(1, 4, 64, deviation=40.0),)
    yield "SD1.5 64x64", lambda: (normal(2, 4096, 2560),)
    yield "SD1.5 16x16", lambda: (normal(2, 256, 10240),)
    yield "SDXL 64x64", lambda: (normal(2, 4096, 5120),)
    yield "SDXL 32x32", lambda: (normal(2, 1024, 10240),)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernels do not take."""
    for name in ("triton", "metal"):
        yield name, "contiguous rows", (normal(4, 8, 6).transpose(1, 2),)
        yield name, "float64", (normal(2, 8).double(),)
        yield name, "odd", (normal(2, 7),)


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda h: h.nbytes * 3 // 2,
    flops=lambda h: h.numel() * 15,  # 30 an output, most of them erf
    compile="inline",
)
def geglu(h: Tensor) -> Tensor:
    """a * gelu(b), contiguous. h (..., 2D) -> (..., D). ValueError where the last axis is odd."""
    if h.shape[-1] % 2:
        raise ValueError(f"geglu: the last axis has {h.shape[-1]} elements; it must be even")
    a, b = h.chunk(2, dim=-1)
    return (a * F.gelu(b)).contiguous()


def _refuse(h: Tensor) -> str | None:
    if h.shape[-1] % 2:
        return f"the last axis is odd ({h.shape[-1]})"
    return refuse_dtype("h", h, _triton.DTYPES) or refuse_rows("h", h)


@kernel
def _cumulative(b):
    """(1 + erf(b / √2)) / 2 to 1e-7: half of t·(a1 + t·(a2 + …)) exp(-b²/2) below 0 and its complement above.

    Source: Abramowitz and Stegun 1964, 7.1.26 (Hastings). A third of the instructions of erf.
    """
    t = 1.0 / (1.0 + 0.2316418882 * tl.abs(b))
    y = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
    y = t * (0.127414796 + t * (-0.142248368 + t * y)) * tl.exp2(-0.7213475204444817 * b * b)
    return tl.where(b < 0, y, 1.0 - y)


@kernel
def _forward(h, out, width, h_row, blocks, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    c = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    live = c < width
    a = tl.load(h + row * h_row + c, mask=live, other=0.0).to(tl.float32)
    b = tl.load(h + row * h_row + width + c, mask=live, other=0.0).to(tl.float32)
    below = 0.5 * (1.0 + tl.erf(b * 0.7071067811865476)) if EXACT else _cumulative(b)  # type: ignore[operator]
    y = a * (b * below)
    tl.store(out + row * width + c, y.to(out.dtype.element_ty), mask=live)


@geglu.implementation("triton", device="cuda", absent=_triton.absent, refuse=_refuse, sources=("_triton.py",))
def _triton_run(h: Tensor) -> Tensor:
    width = h.shape[-1] // 2
    out = h.new_empty((*h.shape[:-1], width))
    # The largest power of two that divides the width, so that no lane idles: 1280 is 5 blocks of 256.
    block = min(width & -width, 1024)
    block = block if block >= 256 else min(_triton.power_of_two(width), 1024)
    blocks = -(-width // block)
    _forward.launch(
        (blocks * (out.numel() // width),),
        *(h, out, width, row_stride(h), blocks),
        EXACT=h.dtype == torch.float32,
        BLOCK=block,
        num_warps=max(block // 512, 1),
    )
    return out


def _refuse_metal(h: Tensor) -> str | None:
    if h.numel() >= LIMIT:
        return f"h has {h.numel()} elements; it takes fewer than 2^31"
    return _refuse(h)


@geglu.implementation(
    "metal",
    device="mps",
    absent=_metal.absent,
    refuse=_refuse_metal,
    sources=("geglu.metal", "_metal.py", "_metal_launch.py"),
)
def _metal_run(h: Tensor) -> Tensor:
    out = h.new_empty((*h.shape[:-1], h.shape[-1] // 2))
    _metal_launch.geglu(_metal.library("geglu"), h, out)
    return out
