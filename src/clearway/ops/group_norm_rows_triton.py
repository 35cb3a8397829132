"""Triton kernels of group_norm_silu for channels-last images of many rows: two launches over whole rows.

A row holds every group, padded to powers of two, so a program's sums are sums of groups; the second launch
merges what the first one's programs found, each for itself, and needs no launch between them. Sums are fp32
of differences from a mean of part of the same data, merged by the formula of Chan, Golub and LeVeque (1983).
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

import torch
from torch import Tensor

from clearway.ops._layout import plane_strides
from clearway.ops._triton import counting, power_of_two, tl

TILE = 8192  # elements a program has in registers: whole rows
WARPS = 8
CHUNKS, LARGE, CHUNKS_OF_LARGE = 128, 2**24, 256
"""Chunks an image is cut into, and into how many where it has more elements than LARGE. On an H200 132 and
264 were tried (bench/results/nvidia-h200/candidates.jsonl), one and two for each multiprocessor; these are
the powers of two beside them, of which the first is merged at once."""
MERGED = 128
"""Chunks that are merged at once. Where there are fewer the tile is as large, so that one variant serves
small images of all sizes; what that costs there was not timed on a device."""


def takes(channels: int, groups: int) -> bool:
    """Whether a row with its groups padded fits a tile."""
    return _lanes(channels, groups) <= TILE


def _lanes(channels: int, groups: int) -> int:
    return power_of_two(groups) * power_of_two(channels // groups)


@counting("size", "chunk")
def _sums(
    x, shift, means, squares, groups, size, chunk, x_n, x_p, shift_n, units,
    HAS_SHIFT: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared differences from it, of each group over a chunk of rows: to (N, chunks, G)."""
    per_group = units * UNIT
    k, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane, p = tl.arange(0, GROUPS * PER_GROUP), tl.arange(0, BLOCK_P)
    group, inner = lane // PER_GROUP, lane % PER_GROUP
    known = (group < groups) & (inner < per_group)
    channel = group * per_group + inner
    start = k.to(tl.int64) * chunk
    rows = tl.minimum(size - start, chunk).to(tl.int32)
    x += n * x_n + start * x_p
    at = x + (p.to(tl.int64) * x_p)[:, None] + channel[None, :]

    added = tl.zeros((GROUPS * PER_GROUP,), tl.float32)
    if HAS_SHIFT:
        added = tl.load(shift + n * shift_n + channel, mask=known, other=0.0).to(tl.float32)
    live = known[None, :] & (p < rows)[:, None]
    first = tl.where(live, tl.load(at, mask=live, other=0.0).to(tl.float32) + added[None, :], 0.0)
    seen = tl.minimum(rows, BLOCK_P) * per_group
    centre = tl.sum(tl.reshape(tl.sum(first, 0), (GROUPS, PER_GROUP)), 1) / seen.to(tl.float32)
    spread = tl.broadcast_to(centre[:, None], (GROUPS, PER_GROUP))
    by_lane = tl.reshape(spread, (GROUPS * PER_GROUP,)) - added
    total = tl.zeros((BLOCK_P, GROUPS * PER_GROUP), tl.float32)
    squared = tl.zeros((BLOCK_P, GROUPS * PER_GROUP), tl.float32)
    for p0 in range(0, rows, BLOCK_P):
        live = known[None, :] & (p0 + p < rows)[:, None]
        value = tl.load(at, mask=live, other=0.0).to(tl.float32)
        difference = tl.where(live, value - by_lane[None, :], 0.0)
        total += difference
        squared += difference * difference
        at += BLOCK_P * x_p
    count = (rows * per_group).to(tl.float32)
    summed = tl.sum(tl.reshape(tl.sum(total, 0), (GROUPS, PER_GROUP)), 1)
    both = tl.sum(tl.reshape(tl.sum(squared, 0), (GROUPS, PER_GROUP)), 1)
    drift = summed / count
    g = tl.arange(0, GROUPS)
    to = (n * tl.num_programs(0) + k) * groups + g
    tl.store(means + to, centre + drift, mask=g < groups)
    tl.store(squares + to, tl.maximum(both - summed * drift, 0.0), mask=g < groups)


@counting("size", "chunk", "chunks")
def _normalise(
    x, out, weight, bias, shift, means, squares, groups, size, chunk, chunks, x_n, x_p, out_n, out_p, shift_n,
    units, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHIFT: tl.constexpr, ACTIVATION: tl.constexpr,
    UNIT: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, BLOCK_P: tl.constexpr,
    ONE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What `_sums` found, merged, and with it the result for a chunk of rows."""
    per_group = units * UNIT
    n = tl.program_id(1).to(tl.int64)
    g, k = tl.arange(0, GROUPS), tl.arange(0, BLOCK_K)
    number = size.to(tl.float32)
    if ONE:
        there = (k < chunks)[:, None] & (g < groups)[None, :]
        at = (n * chunks + k)[:, None] * groups + g[None, :]
        share = (tl.minimum(size - k.to(tl.int64) * chunk, chunk).to(tl.float32) / number)[:, None]
        part = tl.load(means + at, mask=there, other=0.0)
        inner = tl.load(squares + at, mask=there, other=0.0) / (number * per_group)
        mean = tl.sum(tl.where(there, part * share, 0.0), 0)
        away = part - mean[None, :]
        variance = tl.sum(tl.where(there, inner + away * away * share, 0.0), 0)
    else:
        mean = tl.zeros((GROUPS,), tl.float32)
        for k0 in range(0, chunks, BLOCK_K):
            live = (k0 + k < chunks)[:, None] & (g < groups)[None, :]
            at = (n * chunks + k0 + k)[:, None] * groups + g[None, :]
            rows = tl.minimum(size - (k0 + k).to(tl.int64) * chunk, chunk).to(tl.float32)
            part = tl.load(means + at, mask=live, other=0.0)
            mean += tl.sum(tl.where(live, part * (rows / number)[:, None], 0.0), 0)
        variance = tl.zeros((GROUPS,), tl.float32)
        for k0 in range(0, chunks, BLOCK_K):
            live = (k0 + k < chunks)[:, None] & (g < groups)[None, :]
            at = (n * chunks + k0 + k)[:, None] * groups + g[None, :]
            rows = tl.minimum(size - (k0 + k).to(tl.int64) * chunk, chunk).to(tl.float32)
            away = tl.load(means + at, mask=live, other=0.0) - mean[None, :]
            inner = tl.load(squares + at, mask=live, other=0.0) / (number * per_group)
            variance += tl.sum(tl.where(live, inner + away * away * (rows / number)[:, None], 0.0), 0)
    scale = tl.rsqrt(variance + eps)

    lane, p = tl.arange(0, GROUPS * PER_GROUP), tl.arange(0, BLOCK_P)
    group, inner = lane // PER_GROUP, lane % PER_GROUP
    known = (group < groups) & (inner < per_group)
    channel = group * per_group + inner
    centre = tl.reshape(tl.broadcast_to(mean[:, None], (GROUPS, PER_GROUP)), (GROUPS * PER_GROUP,))
    by = tl.reshape(tl.broadcast_to(scale[:, None], (GROUPS, PER_GROUP)), (GROUPS * PER_GROUP,))
    if HAS_SHIFT:
        centre -= tl.load(shift + n * shift_n + channel, mask=known, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        by *= tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    added = tl.zeros((GROUPS * PER_GROUP,), tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    start = tl.program_id(0).to(tl.int64) * chunk
    end = tl.minimum(size - start, chunk).to(tl.int32)
    wide = p.to(tl.int64)[:, None]
    at = x + n * x_n + start * x_p + wide * x_p + channel[None, :]
    to = out + n * out_n + start * out_p + wide * out_p + channel[None, :]
    for p0 in range(0, end, BLOCK_P):
        live = known[None, :] & (p0 + p < end)[:, None]
        value = tl.load(at, mask=live, other=0.0).to(tl.float32)
        y = (value - centre[None, :]) * by[None, :] + added[None, :]
        if ACTIVATION:
            y *= tl.sigmoid(y)
        tl.store(to, y.to(out.dtype.element_ty), mask=live)
        at += BLOCK_P * x_p
        to += BLOCK_P * out_p


def run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    shift: Tensor | None,
    activation: bool,
) -> Tensor:
    """The op, for x whose channels lie next to each other and for which `takes` holds."""
    out = torch.empty_like(x)
    batch, channels = x.shape[:2]
    size, per_group = x.numel() // (batch * channels), channels // groups
    x_strides, out_strides = plane_strides(x), plane_strides(out)
    assert x_strides is not None and out_strides is not None
    (x_n, _, x_p), (out_n, _, out_p) = x_strides, out_strides
    shift_row = shift.stride(0) if shift is not None and shift.dim() == 2 else 0
    block_p = max(min(TILE // _lanes(channels, groups), power_of_two(size)), 1)
    columns = -(-size // block_p)
    chunk = -(-columns // (CHUNKS if channels * size <= LARGE else CHUNKS_OF_LARGE)) * block_p
    chunks = -(-size // chunk)
    partial = torch.empty((2, batch, chunks, groups), device=x.device, dtype=torch.float32)
    unit = min(per_group & -per_group, 16)
    same = {
        "HAS_SHIFT": shift is not None,
        "UNIT": unit,
        "GROUPS": power_of_two(groups),
        "PER_GROUP": power_of_two(per_group),
        "BLOCK_P": block_p,
        "num_warps": WARPS,
    }
    some = x if shift is None else shift
    _sums.launch(
        (chunks, batch),
        *(x, some, partial[0], partial[1], groups, size, chunk, x_n, x_p, shift_row, per_group // unit),
        **same,
    )
    _normalise.launch(
        (chunks, batch),
        *(x, out, x if weight is None else weight, x if bias is None else bias, some),
        *(partial[0], partial[1], groups, size, chunk, chunks),
        *(x_n, x_p, out_n, out_p, shift_row, per_group // unit, eps),
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        ONE=chunks <= MERGED,
        BLOCK_K=MERGED,
        **same,
    )
    return out
