"""A linear layer on many rows: y = x weight^T + bias, by the fastest of cuBLASLt's choices.

Used by the transformers of the SD UNets: projections into and out of them, queries, keys and values, the
attention's output, and both products of the feed-forward. PyTorch takes the first choice of cuBLASLt's
heuristic for the shape; `cublaslt` tries the first few once on a machine and keeps which is faster, or calls
PyTorch where none is. All of them add up in float32. It runs where it is named or was selected: what it gives
is little beside what its trials take of the first picture at each size (docs/candidates.md).
Source: torch.nn.functional.linear; _cublaslt.py, _linear_choices.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _cublaslt, _linear_choices, ahead
from clearway.ops._cases import normal
from clearway.ops._cublaslt import ALIGNED, Failed, Shape
from clearway.ops._layout import LIMIT, refuse_alike, refuse_dtype
from clearway.ops.contract import REFERENCE, Case, Given, op
from clearway.ops.state import BuildError

DTYPES = tuple(_cublaslt.DTYPES)
MULTIPLE = 8
"""Inputs and outputs come in multiples of it: rows then begin at multiples of ALIGNED bytes."""


def inputs(inputs: int, outputs: int, *leading: int, bias: bool = True) -> Case:
    """Arguments for x of (*leading, inputs), weights of about unit gain."""
    weight = normal(outputs, inputs, seed=1, deviation=inputs**-0.5)
    return normal(*leading, inputs), weight, normal(outputs, seed=2) if bias else None


def cases() -> Iterator[tuple[str, Given]]:
    """The UNets' products, and small ones."""
    yield "tiny", inputs(8, 8, 3)
    yield "tiny, no bias", inputs(16, 8, 1, bias=False)
    yield "ragged", inputs(33, 77, 5, 3)
    yield "ragged rows", inputs(40, 24, 37)
    yield "ragged rows of images", inputs(64, 192, 2, 45, bias=False)
    yield "several tiles", inputs(96, 264, 2, 70)
    yield "one row", inputs(72, 40, 1, 1)
    yield "a long sum", inputs(1280, 16, 20)
    x, weight, bias = inputs(64, 16, 4)
    yield "columns of a wider weight", (x, normal(16, 80, seed=1)[:, 8:72], bias)
    yield "every second row", (normal(8, 64)[::2], weight, bias)
    yield "a part of packed weights", (x, normal(48, 64, seed=1)[16:32], normal(48, seed=2)[16:32])
    yield "SD1.5 64x64, packed QKV", lambda: inputs(320, 960, 2, 4096, bias=False)
    yield "SD1.5 64x64, GEGLU", lambda: inputs(320, 2560, 2, 4096)
    yield "SD1.5 64x64, feed-forward", lambda: inputs(1280, 320, 2, 4096)
    yield "SD1.5 32x32, GEGLU", lambda: inputs(640, 5120, 2, 1024)
    yield "SD1.5 8x8, query", lambda: inputs(1280, 1280, 2, 64, bias=False)
    yield "SDXL 64x64, packed QKV", lambda: inputs(640, 1920, 2, 4096, bias=False)
    yield "SDXL 64x64, out", lambda: inputs(640, 640, 2, 4096)
    yield "SDXL 32x32, packed QKV", lambda: inputs(1280, 3840, 2, 1024, bias=False)
    yield "SDXL 32x32, GEGLU", lambda: inputs(1280, 10240, 2, 1024)
    yield "SDXL 32x32, feed-forward", lambda: inputs(5120, 1280, 2, 1024)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What `cublaslt` does not take."""
    x, weight, bias = (arg.half() for arg in inputs(16, 24, 4))
    yield "cublaslt", "float32", inputs(16, 24, 4)
    yield "cublaslt", "must agree", (x, weight, bias.bfloat16())
    yield "cublaslt", "multiples of 8", (x, weight[:12], bias[:12])
    yield "cublaslt", "multiples of 8", (x[:, :12].contiguous(), weight[:, :12].contiguous(), bias)
    yield "cublaslt", "(N, 16)", (x, weight[:, :8], bias)
    yield "cublaslt", "empty", (x[:, :0], weight[:, :0], bias)
    yield "cublaslt", "(24,)", (x, weight, bias[:8])
    yield "cublaslt", "contiguous", (x[::2], weight, bias)
    yield "cublaslt", "contiguous", (x[:, :8], weight[:, :8], bias)
    yield "cublaslt", "begin at", (x, weight, bias.new_zeros(25)[1:])


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, weight, bias: (
        x.nbytes + weight.nbytes + x.numel() // max(x.shape[-1], 1) * weight.shape[0] * x.element_size()
    ),
    flops=lambda x, weight, bias: 2 * x.numel() * weight.shape[0],
    size_class=lambda x, weight, bias: (
        f"{(x.numel() // max(x.shape[-1], 1)).bit_length()}x{weight.shape[0]}x{weight.shape[1]}"
        f"{'' if bias is None else ' bias'}"
    ),
    compile="inline",
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias. x (..., K), weight (N, K), bias (N,) -> (..., N)."""
    return F.linear(x, weight, bias)


@linear.default("cuda")
def _prefer_on_cuda(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    return REFERENCE


def _refuse(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    reason = refuse_dtype("x", x, DTYPES) or refuse_alike(x, weight=weight, bias=bias)
    if reason is not None:
        return reason
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        return f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}; it takes (N, {(0, *x.shape)[-1]})"
    outputs, width = weight.shape
    if not width:
        return "x and weight have rows of no elements"
    if bias is not None and bias.shape != (outputs,):
        return f"bias is {tuple(bias.shape)}; it takes ({outputs},)"
    if outputs % MULTIPLE or width % MULTIPLE:
        return f"it is {width} to {outputs}; it takes multiples of {MULTIPLE}"
    for name, given in (("x", x), ("weight", weight), ("bias", bias)):
        if given is None:
            continue
        if not given.is_contiguous():
            return f"{name} has strides {given.stride()}; it takes contiguous ones"
        if given.storage_offset() * given.element_size() % ALIGNED:
            return f"{name} does not begin at a multiple of {ALIGNED} bytes"
    rows = x.numel() // width
    if max(x.numel(), weight.numel(), rows * outputs) >= LIMIT:
        return "x, weight or the output has 2^31 elements or more"
    if getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False):
        return "the caller allows sums in float16"
    return None


@linear.implementation(
    "cublaslt",
    device="cuda",
    absent=_cublaslt.absent,
    refuse=_refuse,
    sources=("_cublaslt.py", "_linear_choices.py", "_linear_trial.py"),
)
def _cublaslt_run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if ahead.gathering() is not None:  # nothing of ours runs there: it may be untested
        return F.linear(x, weight, bias)
    outputs, width = weight.shape
    rows = x.numel() // width
    addresses = x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())
    if addresses % ALIGNED:  # memory that is not PyTorch's own
        return F.linear(x, weight, bias)
    shape = Shape(x.get_device(), x.dtype, rows, outputs, width, bias is not None)
    try:
        known = _linear_choices.choices()
        choice = known.of(shape, x.device)
        if choice is None:
            return F.linear(x, weight, bias)
        flat = x if x.dim() == 2 else x.view(rows, width)
        return known.binding.run(shape, choice, flat, weight, bias).view(*x.shape[:-1], outputs)
    except Failed as error:
        raise BuildError(str(error)) from error
