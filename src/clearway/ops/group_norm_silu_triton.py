"""Triton kernels of group_norm_silu: one that keeps or re-reads a group, and three for large groups that
are no whole rows (group_norm_rows_triton.py has those).

All take x as (N, C, P) by strides, so one text serves contiguous and channels-last. Sums are fp32 of
differences from a mean of part of the same data: with that part a fraction f of a sum, squares lose at most
log2(1/f) bits where E[x²] − E[x]² would lose log2(mean²/variance). Partial results are merged by the formula
of Chan, Golub and LeVeque (1983).
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

import torch
from torch import Tensor

from clearway.ops import group_norm_rows_triton
from clearway.ops._layout import plane_strides
from clearway.ops._triton import counting, kernel, power_of_two, tl, warps

TILE = 4096  # elements a program has in registers
WHOLE, WHOLE_POSITIONS, WHOLE_PER_PROGRAM = 2**14, 256, 384
"""One program a group, in one pass, where it beats two passes (H200, fp16, bench/results/nvidia-h200/
group_norm_passes.jsonl): up to so many elements; channels-last only in planes of so many positions;
contiguous also up to so many elements for each program that the launch has."""
PROGRAMS = 1024  # at least so many for the moments of large groups, if there is work for them


@kernel
def _group(
    x, out, weight, bias, shift, units, size, x_n, x_c, x_p, out_n, out_c, out_p, shift_n, eps, count, seen,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHIFT: tl.constexpr, ACTIVATION: tl.constexpr,
    ONE_TILE: tl.constexpr, UNIT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program a group of `count` elements, `seen` in its first tile: statistics, then the result."""
    per_group = units * UNIT  # so that the compiler knows how groups of 10, 20 or 40 are aligned
    group, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x += n * x_n + group.to(tl.int64) * per_group * x_c
    out += n * out_n + group.to(tl.int64) * per_group * out_c
    c, p = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P)

    live = (c < per_group)[:, None] & (p < size)[None, :]
    first = tl.load(
        x + (c.to(tl.int64) * x_c)[:, None] + (p.to(tl.int64) * x_p)[None, :], mask=live, other=0.0
    )
    first = first.to(tl.float32)
    if HAS_SHIFT:
        row = shift + n * shift_n + group * per_group + c
        first += tl.load(row, mask=c < per_group, other=0.0).to(tl.float32)[:, None]
    mean = tl.sum(tl.where(live, first, 0.0)) / seen
    if ONE_TILE:
        difference = tl.where(live, first - mean, 0.0)
        variance = tl.sum(difference * difference) / count
    else:
        total = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
        squares = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
        for c0 in range(0, per_group, BLOCK_C):
            cs = c0 + c
            added = tl.zeros((BLOCK_C,), tl.float32)
            if HAS_SHIFT:
                added_at = shift + n * shift_n + group * per_group + cs
                added = tl.load(added_at, mask=cs < per_group, other=0.0).to(tl.float32)
            for p0 in range(0, size, BLOCK_P):
                ps = p0 + p
                live = (cs < per_group)[:, None] & (ps < size)[None, :]
                at = x + (cs.to(tl.int64) * x_c)[:, None] + (ps.to(tl.int64) * x_p)[None, :]
                value = tl.load(at, mask=live, other=0.0).to(tl.float32) + added[:, None]
                difference = tl.where(live, value - mean, 0.0)
                total += difference
                squares += difference * difference
        drift = tl.sum(total) / count
        mean += drift
        variance = tl.maximum(tl.sum(squares) / count - drift * drift, 0.0)
    scale = tl.rsqrt(variance + eps)

    for c0 in range(0, per_group, BLOCK_C):
        cs = c0 + c
        in_group = cs < per_group
        channel = group * per_group + cs
        by = tl.zeros((BLOCK_C,), tl.float32) + scale
        added = tl.zeros((BLOCK_C,), tl.float32)
        centre = tl.zeros((BLOCK_C,), tl.float32) + mean
        if HAS_WEIGHT:
            by *= tl.load(weight + channel, mask=in_group, other=0.0).to(tl.float32)
        if HAS_BIAS:
            added += tl.load(bias + channel, mask=in_group, other=0.0).to(tl.float32)
        if HAS_SHIFT:
            centre -= tl.load(shift + n * shift_n + channel, mask=in_group, other=0.0).to(tl.float32)
        for p0 in range(0, size, BLOCK_P):
            ps = p0 + p
            live = in_group[:, None] & (ps < size)[None, :]
            at = x + (cs.to(tl.int64) * x_c)[:, None] + (ps.to(tl.int64) * x_p)[None, :]
            value = tl.load(at, mask=live, other=0.0).to(tl.float32)
            y = (value - centre[:, None]) * by[:, None] + added[:, None]
            if ACTIVATION:
                y *= tl.sigmoid(y)
            at = out + (cs.to(tl.int64) * out_c)[:, None] + (ps.to(tl.int64) * out_p)[None, :]
            tl.store(at, y.to(out.dtype.element_ty), mask=live)


_group_last = counting("size")(_group.function)
"""Where channels lie next to each other, so that memory is not read along the positions."""


@kernel
def _moments(
    x, means, squares, channels, size, chunk, x_n, x_c, x_p, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Mean and sum of squared differences from it, of each channel over a chunk: to (N, chunks, C)."""
    k, n = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c, p = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P)
    known = c < channels
    start = k.to(tl.int64) * chunk
    count = tl.minimum(size - start, chunk).to(tl.int32)
    x += n * x_n + start * x_p
    row = (c.to(tl.int64) * x_c)[:, None]

    live = known[:, None] & (p < count)[None, :]
    first = tl.load(x + row + (p.to(tl.int64) * x_p)[None, :], mask=live, other=0.0).to(tl.float32)
    centre = tl.sum(first, 1) / tl.minimum(count, BLOCK_P).to(tl.float32)
    total = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
    squared = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
    for p0 in range(0, count, BLOCK_P):
        ps = p0 + p
        live = known[:, None] & (ps < count)[None, :]
        value = tl.load(x + row + (ps.to(tl.int64) * x_p)[None, :], mask=live, other=0.0).to(tl.float32)
        difference = tl.where(live, value - centre[:, None], 0.0)
        total += difference
        squared += difference * difference
    summed = tl.sum(total, 1)
    drift = summed / count.to(tl.float32)
    to = (n * tl.num_programs(0) + k) * channels + c
    tl.store(means + to, centre + drift, mask=known)
    tl.store(squares + to, tl.sum(squared, 1) - summed * drift, mask=known)


@counting("size", "chunk", "chunks")
def _merge(
    means, squares, weight, shift, centres, scales, channels, per_group, size, chunk, chunks, shift_n, eps,
    number, HAS_WEIGHT: tl.constexpr, HAS_SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From moments by channel and chunk of a group of `number` elements: each channel's centre and scale."""
    group, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offset = n * chunks * channels + group * per_group
    lane = tl.arange(0, BLOCK)
    entries = per_group * chunks
    base = tl.load(means + offset)
    if HAS_SHIFT:
        base += tl.load(shift + n * shift_n + group * per_group).to(tl.float32)

    drift = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, entries, BLOCK):
        entry = start + lane
        live = entry < entries
        k, c = entry // per_group, entry % per_group
        count = tl.minimum(size - k.to(tl.int64) * chunk, chunk).to(tl.float32)
        mean = tl.load(means + offset + k * channels + c, mask=live, other=0.0)
        if HAS_SHIFT:
            at = shift + n * shift_n + group * per_group + c
            mean += tl.load(at, mask=live, other=0.0).to(tl.float32)
        drift += tl.where(live, (mean - base) * (count / number), 0.0)
    centre = base + tl.sum(drift)

    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, entries, BLOCK):
        entry = start + lane
        live = entry < entries
        k, c = entry // per_group, entry % per_group
        count = tl.minimum(size - k.to(tl.int64) * chunk, chunk).to(tl.float32)
        mean = tl.load(means + offset + k * channels + c, mask=live, other=0.0)
        inner = tl.load(squares + offset + k * channels + c, mask=live, other=0.0)
        if HAS_SHIFT:
            at = shift + n * shift_n + group * per_group + c
            mean += tl.load(at, mask=live, other=0.0).to(tl.float32)
        away = mean - centre
        total += tl.where(live, inner / number + away * away * (count / number), 0.0)
    scale = tl.rsqrt(tl.maximum(tl.sum(total), 0.0) + eps)

    for start in range(0, per_group, BLOCK):
        c = start + lane
        live = c < per_group
        channel = group * per_group + c
        by = tl.zeros((BLOCK,), tl.float32) + scale
        middle = tl.zeros((BLOCK,), tl.float32) + centre
        if HAS_WEIGHT:
            by *= tl.load(weight + channel, mask=live, other=0.0).to(tl.float32)
        if HAS_SHIFT:
            middle -= tl.load(shift + n * shift_n + channel, mask=live, other=0.0).to(tl.float32)
        tl.store(centres + n * channels + channel, middle, mask=live)
        tl.store(scales + n * channels + channel, by, mask=live)


@kernel
def _apply(
    x, out, centres, scales, bias, channels, size, x_n, x_c, x_p, out_n, out_c, out_p,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """silu((x - centre) * scale + bias) of one tile."""
    n = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    known = c < channels
    live = known[:, None] & (p < size)[None, :]
    centre = tl.load(centres + n * channels + c, mask=known, other=0.0)
    scale = tl.load(scales + n * channels + c, mask=known, other=0.0)
    wide = c.to(tl.int64)
    value = tl.load(x + n * x_n + (wide * x_c)[:, None] + (p * x_p)[None, :], mask=live, other=0.0)
    y = (value.to(tl.float32) - centre[:, None]) * scale[:, None]
    if HAS_BIAS:
        y += tl.load(bias + c, mask=known, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION:
        y *= tl.sigmoid(y)
    at = out + n * out_n + (wide * out_c)[:, None] + (p * out_p)[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=live)


def run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    shift: Tensor | None,
    activation: bool,
) -> Tensor:
    """The op, for arguments it does not refuse."""
    batch, channels = x.shape[:2]
    size, per_group = x.numel() // (batch * channels), channels // groups
    inner = size > 1 and x.stride(1) == 1  # channels lie next to each other
    one_pass = _one_pass(per_group, size, batch * groups, inner)
    if inner and not one_pass and group_norm_rows_triton.takes(channels, groups):
        return group_norm_rows_triton.run(x, weight, bias, groups, eps, shift, activation)
    out = torch.empty_like(x)
    x_strides, out_strides = plane_strides(x), plane_strides(out)
    assert x_strides is not None and out_strides is not None
    shift_row = shift.stride(0) if shift is not None and shift.dim() == 2 else 0
    has = {"HAS_WEIGHT": weight is not None, "HAS_SHIFT": shift is not None}
    if one_pass:
        block_c, block_p = _tile(per_group, size, inner)
        unit = min(per_group & -per_group, 16)
        (_group_last if inner else _group).launch(
            (groups, batch),
            *(x, out, _or(weight, x), _or(bias, x), _or(shift, x), per_group // unit, size),
            *(*x_strides, *out_strides, shift_row, eps, float(per_group * size)),
            float(min(per_group, block_c) * min(size, block_p)),
            **has,
            HAS_BIAS=bias is not None,
            ACTIVATION=activation,
            ONE_TILE=per_group <= block_c and size <= block_p,
            UNIT=unit,
            BLOCK_C=block_c,
            BLOCK_P=block_p,
            num_warps=warps(2 * block_c * block_p),
        )
        return out
    block_c, block_p = _tile(channels, size, inner)
    blocks, columns = -(-channels // block_c), -(-size // block_p)
    chunks = max(1, min(columns, -(-PROGRAMS // (batch * blocks))))
    chunk = -(-columns // chunks) * block_p
    chunks = -(-size // chunk)
    partial = torch.empty((2, batch, chunks, channels), device=x.device, dtype=torch.float32)
    folded = torch.empty((2, batch, channels), device=x.device, dtype=torch.float32)
    tile = {"BLOCK_C": block_c, "BLOCK_P": block_p, "num_warps": 4}
    _moments.launch(
        (chunks, blocks, batch), x, partial[0], partial[1], channels, size, chunk, *x_strides, **tile
    )
    _merge.launch(
        (groups, batch),
        *(partial[0], partial[1], _or(weight, x), _or(shift, x), folded[0], folded[1]),
        *(channels, per_group, size, chunk, chunks, shift_row, eps, float(per_group * size)),
        **has,
        BLOCK=1024,
        num_warps=4,
    )
    _apply.launch(
        (columns, blocks, batch),
        *(x, out, folded[0], folded[1], _or(bias, x), channels, size, *x_strides, *out_strides),
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        **tile,
    )
    return out


def _one_pass(per_group: int, size: int, programs: int, inner: bool) -> bool:
    """Whether a program a group is quicker than two passes over the image."""
    if inner:
        return per_group * size <= WHOLE and size <= WHOLE_POSITIONS
    return per_group * size <= max(WHOLE, WHOLE_PER_PROGRAM * programs)


def _tile(channels: int, size: int, inner: bool) -> tuple[int, int]:
    """Channels and positions of a tile of about TILE elements, long where memory is contiguous."""
    if inner:
        block_c = min(power_of_two(channels), 64)
        return block_c, min(power_of_two(size), TILE // block_c)
    block_p = min(power_of_two(size), 1024)
    return min(power_of_two(channels), TILE // block_p), block_p


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Something to pass where there is none; the kernel does not read it."""
    return other if tensor is None else tensor
