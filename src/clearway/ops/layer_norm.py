"""LayerNorm of a sum: s = x + residual, y = weight * (s - mean(s)) / sqrt(variance(s) + eps) + bias over the
last axis; both are given back, because a transformer block goes on from s.

Used three times in every transformer block of the SD UNets (D = 320 to 1280), twice in every layer of their
CLIP text encoders (D = 768 to 1280); without weight and bias in Flux, PixArt and LTX.
Source: Ba, Kiros and Hinton 2016 (arXiv 1607.06450); torch.nn.functional.layer_norm.
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
from clearway.ops._layout import LIMIT, refuse_alike, refuse_dtype, refuse_others, refuse_rows, row_stride
from clearway.ops._triton import counting, tl
from clearway.ops.contract import Case, Given, op


def inputs(*shape: int, residual: bool = False, affine: bool = True, mean: float = 0.5) -> Case:
    """Arguments for x of `shape`."""
    width = shape[-1]
    return (
        normal(*shape, mean=mean),
        normal(*shape, seed=1) if residual else None,
        normal(width, seed=2, mean=1.0, deviation=0.2) if affine else None,
        normal(width, seed=3, deviation=0.2) if affine else None,
        1e-5,
    )


def cases() -> Iterator[tuple[str, Given]]:
    """Transformer blocks of SD UNets, CLIP, Flux, and small ones."""
    yield "tiny", inputs(1, 2, 8)
    yield "least", inputs(2, 1, residual=True)
    yield "ragged, residual", inputs(3, 7, 77, residual=True)
    yield "rows of one tile are cut", inputs(37, 40, residual=True)
    yield "mean 1000", inputs(5, 320, mean=1000.0)
    yield "no affine", inputs(2, 9, 96, affine=False)
    x, _, *rest = inputs(4, 6, 64)
    yield "rows of a larger tensor", (x[:, ::2], normal(4, 3, 64, seed=1), *rest)
    yield "columns of a wider tensor", (normal(6, 100)[:, 20:84], None, *rest)
    yield "SD1.5 64x64", lambda: inputs(2, 4096, 320, residual=True)
    yield "SD1.5 16x16", lambda: inputs(2, 256, 1280, residual=True)
    yield "SDXL 64x64", lambda: inputs(2, 4096, 640, residual=True)
    yield "SDXL 32x32", lambda: inputs(2, 1024, 1280, residual=True)
    yield "SDXL 32x32, no residual", lambda: inputs(2, 1024, 1280)
    yield "CLIP-L", lambda: inputs(2, 77, 768, residual=True)
    yield "Flux 1024", lambda: inputs(1, 4608, 3072, affine=False)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernels do not take."""
    x, *rest = inputs(4, 6, 8)
    for name in ("triton", "metal"):
        yield name, "contiguous rows", (normal(4, 8, 6).transpose(1, 2), *rest)
        yield name, "residual is (6, 8)", (x, normal(6, 8), *rest[1:])
        yield name, "weight is (9,)", (x, None, torch.ones(9), *rest[2:])
        yield name, "float64", (x.double(), *rest)
    yield "triton", "up to 16384", inputs(1, 16385)


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, residual, *_: x.nbytes * (2 if residual is None else 4),
    flops=lambda x, residual, *_: x.numel() * (8 if residual is None else 9),
    compile="inline",
)
def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual), contiguous; the second is empty, (0,), without residual.

    x and residual (..., D), weight and bias (D,). It is empty and not x because what an op gives back is new.
    """
    total = x if residual is None else x + residual
    weight = None if weight is None else weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    out = F.layer_norm(total, (x.shape[-1],), weight, bias, eps).contiguous()
    return out, x.new_empty((0,)) if residual is None else total.contiguous()


def _refuse(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> str | None:
    reason = refuse_dtype("x", x, _triton.DTYPES) or refuse_rows("x", x)
    if reason is None and residual is not None:
        if residual.shape != x.shape:
            return f"residual is {tuple(residual.shape)}, x {tuple(x.shape)}; they must agree"
        reason = refuse_alike(x, residual=residual) or refuse_rows("residual", residual)
    return reason or refuse_others(x, x.shape[-1], weight=weight, bias=bias)


def _refuse_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> str | None:
    if x.shape[-1] > _triton.WIDEST:
        return f"rows have {x.shape[-1]} elements; it takes up to {_triton.WIDEST}"
    return _refuse(x, residual, weight, bias, eps)


@counting("rows")
def _forward(
    x, residual, weight, bias, out, total, rows, width, x_row, residual_row, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers, so the variance is that of differences from the exact mean."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    in_row = c < width
    live = (row < rows)[:, None] & in_row[None, :]
    at = (row * width)[:, None] + c[None, :]
    value = tl.load(x + (row * x_row)[:, None] + c[None, :], mask=live, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual + (row * residual_row)[:, None] + c[None, :], mask=live, other=0.0)
        value += added.to(tl.float32)
        tl.store(total + at, value.to(total.dtype.element_ty), mask=live)
    mean = tl.sum(value, 1) / width
    difference = tl.where(live, value - mean[:, None], 0.0)
    variance = tl.sum(difference * difference, 1) / width
    y = difference * tl.rsqrt(variance + eps)[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight + c, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias + c, mask=in_row, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live)


def _tile(rows: int, width: int) -> tuple[int, int, int]:
    """(rows, padded width, warps) of a program. Many rows of 1025 to 2048 take two a program, of a warp each:
    5.8 us in place of 7.0 at 2048 x 1280 with residual (bench/results/nvidia-h200/candidates.jsonl)."""
    tile, block = _triton.row_tile(width)
    if block == 2048 and rows >= 1024:
        return 2, block, 2
    return tile, block, _triton.warps(2 * tile * block)


@layer_norm.implementation(
    "triton", device="cuda", absent=_triton.absent, refuse=_refuse_triton, sources=("_triton.py",)
)
def _triton_run(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape)
    total = x.new_empty((0,) if residual is None else x.shape)
    width = x.shape[-1]
    rows = x.numel() // width
    tile, block, warps = _tile(rows, width)
    _forward.launch(
        (-(-rows // tile),),
        *(x, x if residual is None else residual, x if weight is None else weight),
        *(x if bias is None else bias, out, total, rows, width, row_stride(x)),
        *(0 if residual is None else row_stride(residual), eps),
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        ROWS=tile,
        BLOCK=block,
        num_warps=warps,
    )
    return out, total


def _refuse_metal(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> str | None:
    if x.numel() >= LIMIT:
        return f"x has {x.numel()} elements; it takes fewer than 2^31"
    return _refuse(x, residual, weight, bias, eps)


@layer_norm.implementation(
    "metal",
    device="mps",
    absent=_metal.absent,
    refuse=_refuse_metal,
    sources=("layer_norm.metal", "_metal.py", "_metal_launch.py"),
)
def _metal_run(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape)
    total = x.new_empty((0,) if residual is None else x.shape)
    library = _metal.library("layer_norm")
    summed = None if residual is None else total
    _metal_launch.layer_norm(library, x, weight, bias, eps, out, residual, summed)
    return out, total
