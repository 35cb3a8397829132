"""Linear layers of one input, all at once: y_i = x weight_i^T for each of a list of weights.

What every cross-attention of a UNet reads of a prompt, its keys and values, are such products: 32 in SD 1.x,
140 in SDXL, of 77 tokens each. One by one they take longer to launch than to compute, and nothing else runs
while they are made. Each program reads from a table where its part of a weight lies, so weights need not lie
together. Source: torch.nn.functional.linear; grouped products as in CUTLASS's example 24 and cuBLAS's
gemmGroupedBatched.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _triton
from clearway.ops._cases import normal
from clearway.ops._layout import LIMIT, refuse_dtype, refuse_rows, row_stride
from clearway.ops._triton import counting, tl
from clearway.ops.contract import Case, Given, op

MULTIPLE = 8
"""Inputs and outputs come in multiples of it: rows then begin at multiples of ALIGNED bytes."""
ALIGNED = 16
ROWS, COLUMNS, DEPTH = 64, 128, 64
"""Of a program's tile, and how far its sum goes at once."""
TABLES = 16
"""How many tables are kept, each of one list of weights: a few UNets' in a few pieces."""


def inputs(width: int, outputs: Sequence[int], *leading: int) -> Case:
    """Arguments for x of (*leading, width)."""
    return normal(*leading, width), weights_of(width, outputs)


def weights_of(width: int, outputs: Sequence[int]) -> list[Tensor]:
    """Weights of about unit gain."""
    return [
        normal(count, width, seed=1 + place, deviation=width**-0.5) for place, count in enumerate(outputs)
    ]


def cases() -> Iterator[tuple[str, Given]]:
    """The UNets' keys and values, and small ones."""
    yield "tiny", inputs(8, (8, 16), 3)
    yield "one weight", inputs(16, (24,), 5)
    yield "ragged", inputs(24, (8, 16), 5, 3)
    yield "ragged tiles", inputs(72, (40, 200, 8), 2, 37)
    yield "several tiles", inputs(96, (264, 128, 136), 3, 70)
    yield "one row", inputs(40, (16, 320), 1, 1)
    yield "a prompt", inputs(128, (64, 64, 160, 160), 2, 77)
    x, weights = inputs(64, (16, 48), 4)
    yield "parts of one weight", (x, [weights[1][:16], weights[1][16:], weights[0]])
    yield "one weight twice", (x, [weights[0], weights[0]])
    yield "a part of every second row", (normal(8, 80)[::2, :16], weights_of(16, (8, 24)))
    yield "SD1.5", lambda: inputs(768, (320,) * 8 + (640,) * 8 + (1280,) * 16, 2, 77)
    yield "SDXL, 16 layers", lambda: inputs(2048, (640,) * 8 + (1280,) * 24, 2, 77)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernel does not take."""
    x, weights = inputs(16, (24, 8), 4)
    yield "triton", "no weights", (x, [])
    yield "triton", "float64", (x.double(), [weight.double() for weight in weights])
    yield "triton", "weights[1] is float16", (x, [weights[0], weights[1].half()])
    yield "triton", "multiples of 8", (x, [weights[0], weights[1][:4]])
    yield "triton", "multiples of 8", (x[:, :12].contiguous(), [weights[0][:, :12].contiguous()])
    yield "triton", "(N, 16)", (x, [weights[0], weights[1].flatten()])
    yield "triton", "contiguous rows", (normal(16, 4).mT, weights)
    yield "triton", "20 elements apart", (normal(4, 20)[:, :16], weights)
    yield "triton", "weights[1] has strides", (x, [weights[0], normal(16, 16)[::2]])
    yield "triton", "begin at", (x, [weights[0].new_zeros(129)[1:].view(8, 16)])


def sizes(x: Tensor, weights: Sequence[Tensor]) -> list[int]:
    """Elements of each product in what the op gives."""
    rows = x.numel() // max(x.shape[-1], 1)
    return [rows * weight.shape[0] for weight in weights]


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, weights: (
        x.nbytes + sum(weight.nbytes for weight in weights) + sum(sizes(x, weights)) * x.element_size()
    ),
    flops=lambda x, weights: 2 * x.numel() * sum(weight.shape[0] for weight in weights),
    size_class=lambda x, weights: (
        f"{(x.numel() // max(x.shape[-1], 1)).bit_length()}x{x.shape[-1]}x{len(weights).bit_length()}"
    ),
    then=lambda flat: flat.neg(),
    compile="inline",
)
def grouped_linear(x: Tensor, weights: list[Tensor]) -> Tensor:
    """The products x weight^T one after the other, each contiguous: x (..., K), weights (N_i, K) each ->
    (rows sum(N_i),), where rows are those of x; `sizes` says how many elements each has."""
    return torch.cat([F.linear(x, weight).flatten() for weight in weights])


def _refuse(x: Tensor, weights: list[Tensor]) -> str | None:
    if not weights:
        return "there are no weights"
    reason = refuse_dtype("x", x, _triton.DTYPES)
    if reason is not None:
        return reason
    if x.dim() == 0:
        return "x is (); it takes (..., K)"
    width, dtype = x.shape[-1], x.dtype
    if width % MULTIPLE:
        return f"x is {width} wide; it takes multiples of {MULTIPLE}"
    reason = refuse_rows("x", x)
    if reason is not None:
        return reason
    if (row_stride(x) or 0) % MULTIPLE:
        return f"the rows of x begin {row_stride(x)} elements apart; it takes multiples of {MULTIPLE}"
    if x.storage_offset() * x.element_size() % ALIGNED:
        return f"x does not begin at a multiple of {ALIGNED} bytes"
    columns = 0
    for place, weight in enumerate(weights):
        shape = weight.shape
        if weight.dtype != dtype:
            name = str(weight.dtype).removeprefix("torch.")
            return f"weights[{place}] is {name}, x {str(dtype).removeprefix('torch.')}; they must agree"
        if len(shape) != 2 or shape[1] != width:
            return f"weights[{place}] is {tuple(shape)}; it takes (N, {width})"
        if shape[0] % MULTIPLE:
            return f"weights[{place}] has {shape[0]} rows; it takes multiples of {MULTIPLE}"
        if not weight.is_contiguous():
            return f"weights[{place}] has strides {weight.stride()}; it takes contiguous ones"
        if weight.storage_offset() * weight.element_size() % ALIGNED:
            return f"weights[{place}] does not begin at a multiple of {ALIGNED} bytes"
        columns += shape[0]
    if x.numel() // width * columns >= LIMIT:
        return "the output has 2^31 elements or more"
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a graph is being captured, which would keep the addresses of weights"
    return None


@counting("rows", "blocks")
def _tiles(
    x, table, out, rows, blocks, x_row, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some rows by some columns of one product."""
    tile = table + tl.program_id(0) // blocks * 4
    weight = tl.multiple_of(tl.load(tile).to(tl.pointer_type(x.dtype.element_ty)), 16)
    before = tl.load(tile + 1) * rows  # elements of the products before it
    first = tl.load(tile + 2).to(tl.int32)
    columns = tl.multiple_of(tl.load(tile + 3).to(tl.int32), 8)
    m = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    lines, live = (m < rows)[:, None], (n < columns)[None, :]
    left = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    right = weight + n.to(tl.int64)[None, :] * WIDTH + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(0, WIDTH, BLOCK_K):
        if WIDTH % BLOCK_K == 0:
            a = tl.load(left + at, mask=lines, other=0.0)
            b = tl.load(right + at, mask=live, other=0.0)
        else:
            a = tl.load(left + at, mask=lines & (k + at < WIDTH)[None, :], other=0.0)
            b = tl.load(right + at, mask=live & (k + at < WIDTH)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    to = out + before + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=lines & live)


_tables: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()


def _table(weights: Sequence[Tensor]) -> Tensor:
    """(tiles, 4) int64 on the weights' device: of each tile of COLUMNS columns where its weight lies, columns
    of the products before it, its first column, and how many its product has."""
    device = weights[0].device
    key = (device, *[weight.data_ptr() for weight in weights], *[len(weight) for weight in weights])
    found = _tables.get(key)
    if found is None:
        lines, before = [], 0
        for weight in weights:
            address, columns = weight.data_ptr(), len(weight)
            lines += [(address, before, first, columns) for first in range(0, columns, COLUMNS)]
            before += columns
        with torch.inference_mode(False):
            made = torch.tensor(lines, dtype=torch.int64, pin_memory=device.type == "cuda")
            found = made.to(device, non_blocking=True)
        _tables[key] = found
        while len(_tables) > TABLES:
            _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    return found


@grouped_linear.implementation(
    "triton", device="cuda", absent=_triton.absent, refuse=_refuse, sources=("_triton.py",)
)
def _triton_run(x: Tensor, weights: list[Tensor]) -> Tensor:
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    if any(one.data_ptr() % ALIGNED for one in (x, *weights)):  # memory that is not PyTorch's own
        return grouped_linear.reference.run(x, weights)  # type: ignore[no-any-return]
    table = _table(weights)
    out = torch.empty(sum(sizes(x, weights)), dtype=x.dtype, device=x.device)
    exact = x.dtype == torch.float32
    block = min(max(_triton.power_of_two(rows), 16), ROWS)
    blocks = -(-rows // block)
    _tiles.launch(
        (len(table) * blocks,),
        *(x, table, out, rows, blocks, row_stride(x)),
        WIDTH=width,
        BLOCK_M=block,
        BLOCK_N=COLUMNS,
        BLOCK_K=32 if exact else DEPTH,
        num_warps=4,
        num_stages=2 if exact else 4,
    )
    return out
