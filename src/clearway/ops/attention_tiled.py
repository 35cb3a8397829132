"""Attention in one pass over the keys, in Triton: for few keys, and where it measures faster than PyTorch's.

A program holds a tile of queries in registers, reads keys and values tile by tile and rescales what it has
summed by the running maximum, as flash attention does. Cross-attention's 77 keys are one tile, so there a
program is two small matrix products: PyTorch's kernels take several launches and longer for it.
Sources: Dao et al. 2022 (arXiv 2205.14135); Milakov and Gimelshein 2018 (arXiv 1805.02867).
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

import math

import torch
from torch import Tensor

from clearway.ops import _triton, attention_torch
from clearway.ops._layout import refuse_dtype
from clearway.ops._triton import counting, tl

WIDEST = 160
"""Elements of a head: its tile of queries and its sums are held in registers."""
LOG2_E = math.log2(math.e)


def refuse(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> str | None:
    """What it does not take; metadata only."""
    reason = attention_torch.restricted_keys(q, k, v, is_causal, mask)
    reason = reason or refuse_dtype("q", q, _triton.DTYPES)
    if reason is not None:
        return reason
    if v.shape[-1] != q.shape[-1]:
        return f"heads of q and v differ: {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[-1] > WIDEST:
        return f"heads of {q.shape[-1]}; it takes up to {WIDEST}"
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        return "heads are not contiguous"
    if q.shape[0] * q.shape[1] > 65535:
        return f"there are {q.shape[0] * q.shape[1]} heads in all; it takes up to 65535"
    return None


@counting("queries", "keys")
def _forward(
    q, k, v, out, queries, keys, heads, scale,
    q_b, q_n, q_l, k_b, k_n, k_l, v_b, v_n, v_l, out_b, out_n, out_l,
    UNIT: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, ONE: tl.constexpr,
    EVEN: tl.constexpr, LATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`scale` holds log2(e), so that powers are of two. ONE: all keys are in one tile; EVEN: tiles are full;
    LATE: products are scaled in the instruction that subtracts the maximum, which a scale above 0 allows.
    Strides come in UNITs, so that the compiler knows how heads of 40 are aligned."""
    head = tl.program_id(1)
    b, n = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e, c = tl.arange(0, WIDE), tl.arange(0, BLOCK_N)
    known = e < SIZE
    live = (row < queries)[:, None] & known[None, :]
    wide = row.to(tl.int64)
    q_tile = tl.load(q + (b * q_b + n * q_n + wide[:, None] * q_l) * UNIT + e[None, :], mask=live, other=0.0)
    k_at = k + (b * k_b + n * k_n + c[None, :].to(tl.int64) * k_l) * UNIT + e[:, None]
    v_at = v + (b * v_b + n * v_n + c[:, None].to(tl.int64) * v_l) * UNIT + e[None, :]
    if ONE:
        there = c < keys
        k_tile = tl.load(k_at, mask=there[None, :] & known[:, None], other=0.0)
        v_tile = tl.load(v_at, mask=there[:, None] & known[None, :], other=0.0)
        s = tl.dot(q_tile, k_tile, input_precision=PRECISION)
        s = tl.where(there[None, :], s * scale, -float("inf"))  # after the scale: it may be negative or 0
        p = tl.exp2(s - tl.max(s, 1)[:, None])
        total = tl.sum(p, 1)
        y = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
    else:
        top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        y = tl.zeros((BLOCK_M, WIDE), tl.float32)
        for first in range(0, keys, BLOCK_N):
            if EVEN:
                k_tile = tl.load(k_at)
                v_tile = tl.load(v_at)
                s = tl.dot(q_tile, k_tile, input_precision=PRECISION)
                if not LATE:
                    s *= scale
            else:
                there = first + c < keys
                k_tile = tl.load(k_at, mask=there[None, :] & known[:, None], other=0.0)
                v_tile = tl.load(v_at, mask=there[:, None] & known[None, :], other=0.0)
                s = tl.dot(q_tile, k_tile, input_precision=PRECISION)
                if not LATE:
                    s *= scale
                s = tl.where(there[None, :], s, -float("inf"))
            if LATE:
                higher = tl.maximum(top, tl.max(s, 1) * scale)
                p = tl.exp2(s * scale - higher[:, None])
            else:
                higher = tl.maximum(top, tl.max(s, 1))
                p = tl.exp2(s - higher[:, None])
            rescale = tl.exp2(top - higher)
            total = total * rescale + tl.sum(p, 1)
            y = tl.dot(p.to(v_tile.dtype), v_tile, y * rescale[:, None], input_precision=PRECISION)
            top = higher
            k_at += BLOCK_N * k_l * UNIT
            v_at += BLOCK_N * v_l * UNIT
    y = y / total[:, None]
    to = out + (b * out_b + n * out_n + wide[:, None] * out_l) * UNIT + e[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=live)


def tile(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages) of a program for these arguments."""
    size, keys = _triton.power_of_two(q.shape[-1]), k.shape[2]
    few = max(_triton.power_of_two(keys), 16)
    if few <= 128 and q.dtype != torch.float32:
        return 64, few, 4, 1
    if q.dtype == torch.float32:
        return (64, 32, 4, 1) if size <= 128 else (32, 16, 4, 1)
    return (64, 64, 4, 3) if size <= 128 else (64, 32, 4, 2)  # what fits the 99 KB of the smaller cards


def run(q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None) -> Tensor:
    """The op, for arguments it does not refuse."""
    out = torch.empty_like(q)
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    block_m, block_n, warps, stages = tile(q, k)
    factor = (1 / math.sqrt(size) if scale is None else scale) * LOG2_E
    strides = [stride for t in (q, k, v, out) for stride in t.stride()[:3]]
    unit = math.gcd(8, *strides)
    _forward.launch(
        (-(-queries // block_m), batch * heads),
        *(q, k, v, out, queries, keys, heads, factor, *(stride // unit for stride in strides)),
        UNIT=unit,
        SIZE=size,
        WIDE=max(_triton.power_of_two(size), 16),
        PRECISION="ieee",
        ONE=keys <= block_n,
        EVEN=keys % block_n == 0 and size == max(_triton.power_of_two(size), 16),
        LATE=factor > 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=warps,
        num_stages=stages,
    )
    return out
