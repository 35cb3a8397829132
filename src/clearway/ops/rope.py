"""Rotary position embedding of interleaved pairs: (x0, x1) -> (x0 cos - x1 sin, x1 cos + x0 sin) by position.

Used on queries and keys in every block of Flux (24 heads of 128) and, over the whole width, of LTX.
Either order of heads and positions in memory: pass a (B, L, N, E) tensor as x.transpose(1, 2).
Source: Su et al. 2021 (arXiv 2104.09864); apply_rotary_emb of diffusers' embeddings (use_real_unbind_dim -1)
and of its transformer_ltx.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearway.ops import _triton
from clearway.ops._cases import normal
from clearway.ops._layout import in_layout_of, refuse_dtype
from clearway.ops._triton import kernel, tl
from clearway.ops.contract import Case, Given, op


def inputs(batch: int, heads: int, length: int, size: int, *, positions_first: bool = False) -> Case:
    """Arguments for x of (batch, heads, length, size); `positions_first`: as a linear layer gives it."""
    x = normal(batch, length, heads, size).transpose(1, 2)
    angles = normal(length, size // 2, seed=1, deviation=3.0).repeat_interleave(2, dim=-1)
    return x if positions_first else x.contiguous(), angles.cos(), angles.sin()


def cases() -> Iterator[tuple[str, Given]]:
    """Queries of Flux and LTX, and small ones."""
    yield "tiny", inputs(1, 1, 3, 4)
    yield "least", inputs(1, 1, 1, 2)
    yield "ragged", inputs(2, 3, 7, 26)
    yield "positions first", inputs(2, 3, 37, 64, positions_first=True)
    packed, cos, sin = inputs(2, 5, 6, 32)
    yield "some heads of a packed tensor", (packed[:, 1:3], cos, sin)
    yield "Flux 1024", lambda: inputs(1, 24, 4608, 128, positions_first=True)
    yield "Flux 1024, heads first", lambda: inputs(1, 24, 4608, 128)
    yield "LTX", lambda: inputs(1, 1, 4992, 2048)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernel does not take."""
    x, cos, sin = inputs(1, 2, 3, 8)
    yield "triton", "last stride", (normal(1, 2, 8, 3).transpose(2, 3), cos, sin)
    yield "triton", "(B, N, L, E)", (x[0], cos, sin)
    yield "triton", "cos is (4, 8)", (x, torch.ones(4, 8), sin)
    yield "triton", "float64", (x.double(), cos, sin)
    yield "triton", "up to 4096", inputs(1, 1, 1, 4098)


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, cos, sin: 2 * x.nbytes + cos.nbytes + sin.nbytes,
    flops=lambda x, *_: 3 * x.numel(),
    compile="inline",
)
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x rotated, computed in float32 or wider, in the strides torch.empty_like(x) has.

    x (B, N, L, E) with E even; cos and sin (L, E), each value twice in a row, in the dtype of x or wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    turned = torch.stack((-value[..., 1::2], value[..., ::2]), dim=-1).flatten(-2)
    return in_layout_of(x, (value * cos + turned * sin).to(x.dtype))


def _refuse(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    if x.dim() != 4 or x.shape[-1] % 2:
        return f"x is {tuple(x.shape)}; it takes (B, N, L, E) with E even"
    if x.shape[-1] > 4096:
        return f"heads have {x.shape[-1]} elements; it takes up to 4096"
    if x.stride(-1) != 1:
        return f"x has strides {x.stride()}; it takes a last stride of 1"
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != x.shape[2:] or not table.is_contiguous():
            return f"{name} is {tuple(table.shape)}, x {tuple(x.shape)}; it takes (L, E), contiguous"
    reason = refuse_dtype("x", x, _triton.DTYPES) or refuse_dtype("cos", cos, _triton.DTYPES)
    return reason or refuse_dtype("sin", sin, _triton.DTYPES)


@kernel
def _forward(
    x, cos, sin, out, heads, length, size, x_b, x_n, x_l, out_b, out_n, out_l, tiles,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = program // tiles
    b, n = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    position = (program % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK)
    live = (position < length)[:, None] & (e < size)[None, :]
    value = tl.load(x + b * x_b + n * x_n + (position * x_l)[:, None] + e[None, :], mask=live, other=0.0)
    table = (position * size)[:, None] + e[None, :]
    by_cos = tl.load(cos + table, mask=live, other=0.0).to(tl.float32)
    by_sin = tl.load(sin + table, mask=live, other=0.0).to(tl.float32)
    first, second = tl.split(value.to(tl.float32).reshape(ROWS, BLOCK // 2, 2))
    turned = tl.join(-second, first).reshape(ROWS, BLOCK)
    y = value.to(tl.float32) * by_cos + turned * by_sin
    at = out + b * out_b + n * out_n + (position * out_l)[:, None] + e[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=live)


@rope.implementation("triton", device="cuda", absent=_triton.absent, refuse=_refuse, sources=("_triton.py",))
def _triton_run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x)
    batch, heads, length, size = x.shape
    block = _triton.power_of_two(size)
    rows = min(max(2048 // block, 1), _triton.power_of_two(length))
    tiles = -(-length // rows)
    _forward.launch(
        (batch * heads * tiles,),
        *(x, cos, sin, out, heads, length, size, *x.stride()[:3], *out.stride()[:3], tiles),
        ROWS=rows,
        BLOCK=block,
        num_warps=_triton.warps(2 * rows * block),
    )
    return out
