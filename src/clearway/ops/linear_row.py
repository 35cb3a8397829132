"""A linear layer on one row: y = x weight^T + bias. It reads the weight once, so bandwidth is all it costs.

Used on time embeddings and their projection in every residual block of the SD UNets (K = 320 to 1280), on
modulation in Flux and SD 3.5 (N up to 18432), and on pooled text, at a batch of one.
Source: torch.nn.functional.linear.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _metal, _metal_launch
from clearway.ops._cases import normal
from clearway.ops._layout import LIMIT, refuse_alike, refuse_dtype, refuse_rows
from clearway.ops.contract import Case, Given, op


def inputs(inputs: int, outputs: int, *leading: int, bias: bool = True) -> Case:
    """Arguments for x of (*leading, inputs)."""
    weight = normal(outputs, inputs, seed=1, deviation=inputs**-0.5)
    return normal(*leading, inputs), weight, normal(outputs, seed=2) if bias else None


def cases() -> Iterator[tuple[str, Given]]:
    """Time embeddings of SD UNets, Flux's modulation, and small ones."""
    yield "tiny", inputs(4, 3, 1)
    yield "ragged", inputs(77, 33, 1, 1)
    yield "no bias", inputs(40, 9, 1, bias=False)
    yield "without a leading axis", inputs(24, 10)
    x, weight, bias = inputs(64, 12, 1)
    yield "columns of a wider weight", (x, normal(12, 80, seed=1)[:, 8:72], bias)
    yield "a slice of a row", (normal(1, 200)[:, 3:67], weight, bias)
    yield "SD1.5 time embedding", lambda: inputs(1280, 1280, 1)
    yield "Flux modulation", lambda: inputs(3072, 18432, 1)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernel does not take."""
    x, weight, bias = inputs(8, 6, 1)
    yield "metal", "2 rows", inputs(8, 6, 2)
    yield "metal", "contiguous rows", (x, normal(8, 6).t(), bias)
    yield "metal", "must agree", (x, weight, bias.double())
    yield "metal", "float64", (x.double(), weight.double(), bias.double())


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, weight, bias: x.nbytes + weight.nbytes + weight.shape[0] * x.element_size(),
    flops=lambda x, weight, bias: 2 * weight.numel(),
)
def linear_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias. x (..., K) of one row, weight (N, K), bias (N,) -> (..., N)."""
    return F.linear(x, weight, bias)


def _refuse(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if x.dim() == 0 or x.numel() != x.shape[-1]:
        return f"x is {tuple(x.shape)}, {x.numel() // max(x.shape[-1:] or (1,))} rows; it takes one"
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.numel() >= LIMIT:
        return f"weight is {tuple(weight.shape)}; it takes (N, {x.shape[-1]}), fewer than 2^31 elements"
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        return f"bias is {tuple(bias.shape)}; it takes ({weight.shape[0]},), contiguous"
    reason = refuse_dtype("x", x, _metal.DTYPES) or refuse_alike(x, weight=weight, bias=bias)
    return reason or refuse_rows("x", x) or refuse_rows("weight", weight)


@linear_row.implementation(
    "metal",
    device="mps",
    absent=_metal.absent,
    refuse=_refuse,
    sources=("linear_row.metal", "_metal.py", "_metal_launch.py"),
)
def _metal_run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.empty((*x.shape[:-1], weight.shape[0]), device=x.device, dtype=x.dtype)
    _metal_launch.linear_row(_metal.library("linear_row"), x, weight, bias, out)
    return out
