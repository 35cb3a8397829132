"""RMSNorm: y = weight * x / sqrt(mean(x²) + eps) over the last axis.

Used on queries and keys in every block of Flux (D = 128), SD 3.5 (64) and LTX (2048), and in T5 text encoders
(D = 4096).
Source: Zhang and Sennrich 2019 (arXiv 1910.07467); torch.nn.functional.rms_norm.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _triton
from clearway.ops._cases import normal
from clearway.ops._layout import refuse_dtype, refuse_others, row_groups
from clearway.ops._triton import kernel, tl
from clearway.ops.contract import Case, Given, op


def inputs(*shape: int, affine: bool = True, mean: float = 0.5) -> Case:
    """Arguments for x of `shape`."""
    weight = normal(shape[-1], seed=2, mean=1.0, deviation=0.2) if affine else None
    return normal(*shape, mean=mean), weight, 1e-6


def cases() -> Iterator[tuple[str, Given]]:
    """Queries of Flux, SD 3.5 and LTX, T5's states, and small ones."""
    yield "tiny", inputs(1, 2, 8)
    yield "least", inputs(1, 1)
    yield "ragged", inputs(3, 5, 77)
    yield "no weight", inputs(2, 9, 96, affine=False)
    yield "rows of one tile are cut", inputs(19, 128)
    yield "large values", inputs(3, 64, mean=300.0)
    packed, weight, eps = inputs(2, 5, 3, 64)
    yield "queries of packed QKV", (packed[:1, :, 0], weight, eps)
    whole, *rest = inputs(2, 5, 3, 3, 32)
    yield "heads of packed keys", (whole[:, :, 1], *rest)
    yield "heads first", (inputs(1, 6, 3, 40)[0].transpose(1, 2), *inputs(40)[1:])
    yield "Flux 1024", lambda: inputs(1, 4608, 24, 128)
    yield "SD3.5 1024", lambda: inputs(2, 4250, 24, 64)
    yield "LTX", lambda: inputs(1, 4992, 2048)
    yield "T5", lambda: inputs(1, 512, 4096)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernel does not take."""
    x, *rest = inputs(4, 6, 8)
    yield "triton", "contiguous rows", (normal(4, 8, 6).transpose(1, 2), *rest)
    yield "triton", "weight is (9,)", (x, torch.ones(9), rest[1])
    yield "triton", "float64", (x.double(), *rest)
    yield "triton", "up to 16384", inputs(1, 16385)


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, *_: 2 * x.nbytes,
    flops=lambda x, *_: 4 * x.numel(),
    compile="inline",
)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """rms_norm(x) over the last axis, contiguous. x (..., D), weight (D,)."""
    weight = None if weight is None else weight.to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps).contiguous()


def _refuse(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    if x.shape[-1] > _triton.WIDEST:
        return f"rows have {x.shape[-1]} elements; it takes up to {_triton.WIDEST}"
    if row_groups(x) is None:
        return f"x has strides {x.stride()}; it takes contiguous rows at two strides at most"
    reason = refuse_dtype("x", x, _triton.DTYPES)
    return reason or refuse_others(x, x.shape[-1], weight=weight)


@kernel
def _forward(
    x, weight, out, rows, width, in_group, x_group, x_row, eps,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    in_row = c < width
    live = (row < rows)[:, None] & in_row[None, :]
    at = (row // in_group) * x_group + (row % in_group) * x_row
    value = tl.load(x + at[:, None] + c[None, :], mask=live, other=0.0).to(tl.float32)
    y = value * tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight + c, mask=in_row, other=0.0).to(tl.float32)[None, :]
    tl.store(out + (row * width)[:, None] + c[None, :], y.to(out.dtype.element_ty), mask=live)


@rms_norm.implementation(
    "triton", device="cuda", absent=_triton.absent, refuse=_refuse, sources=("_triton.py",)
)
def _triton_run(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = x.new_empty(x.shape)
    width = x.shape[-1]
    rows, (tile, block) = x.numel() // width, _triton.row_tile(width)
    groups = row_groups(x)
    assert groups is not None
    _forward.launch(
        (-(-rows // tile),),
        *(x, x if weight is None else weight, out, rows, width, *groups, eps),
        HAS_WEIGHT=weight is not None,
        ROWS=tile,
        BLOCK=block,
        num_warps=_triton.warps(2 * tile * block),
    )
    return out
