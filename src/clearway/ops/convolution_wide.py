"""3x3 convolutions in tiles of 320 or 160 output channels, in Gluon, for Hopper.

One warp has the copy engine fetch pixels, shifted by the tap, with zeros beyond the image's border, and
weights; the others multiply, each in products of a warpgroup. The SD UNets' channels are multiples of 320: a
tile of all 320 reads every pixel once, where tiles of powers of two leave parts of them empty. Where an image
is small the sum of a tile is cut into shares that a second launch adds in order.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: RUF005
# Kernels are in Gluon's language: their arguments are no Python types, and it knows no starred lists.
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from clearway.ops import attention_torch
from clearway.ops._described import Described
from clearway.ops._gluon import HOPPER, PROCESSORS, counting, gl, hopper, processors
from clearway.ops._layout import LIMIT, refuse_alike, refuse_dtype
from clearway.ops._triton import kernel, tl

DTYPES = (torch.float16, torch.bfloat16)
CHANNELS = 64
"""Channels of x come in multiples of it: a block of the sum lies within one tap."""
OUTPUTS = 160
"""Channels of the output come in multiples of it."""
WASTE = 0.15
"""Part of the tiles' pixels that may lie beyond the image."""
SUMMED = 1024  # elements of a program that adds shares


class Tile(NamedTuple):
    """Rows, columns as two powers of two, stages, warps, and how well it uses a multiprocessor."""

    rows: int
    first: int
    second: int
    stages: int
    warps: int
    use: float


TILES = (
    Tile(128, 256, 64, 4, 8, 1.0),
    Tile(64, 256, 64, 4, 4, 0.93),
    Tile(64, 128, 32, 6, 4, 0.8),
)


class Plan(NamedTuple):
    """A tile, its height and width in pixels, and how many programs share its sum."""

    tile: Tile
    height: int
    width: int
    split: int


@functools.lru_cache(maxsize=1024)
def plan(batch: int, channels: int, outputs: int, height: int, width: int, there: int) -> Plan | None:
    """The cut that is estimated to be the quickest on `there` multiprocessors; None where too much of every
    tile would lie beyond the image."""
    best, least = None, float("inf")
    for tile in TILES:
        columns = tile.first + tile.second
        if outputs % columns:
            continue
        found = _sides(tile.rows, height, width)
        if found is None:
            continue
        high, wide = found
        tiles = batch * -(-height // high) * -(-width // wide) * (outputs // columns)
        blocks = 9 * channels // CHANNELS
        for split in (1, 2, 4, 8, 16):
            if split > 1 and (tiles * split > there or blocks // split < 8):
                continue
            turns = -(-tiles * split // there)
            cost = turns * -(-blocks // split) * tile.rows * columns / tile.use
            if split > 1:  # shares are written and read again, by a launch of its own
                cost += 8.0 * split * batch * height * width * outputs / there + 2.5e5
            if cost < least:
                best, least = Plan(tile, high, wide, split), cost
    return best


def _sides(rows: int, height: int, width: int) -> tuple[int, int] | None:
    """(height, width) of `rows` pixels that cover the image with the least beyond it, wide before high."""
    best, least = None, (1.0 + WASTE) * height * width
    wide = rows
    while wide >= 1:
        high = rows // wide
        covered = -(-height // high) * high * -(-width // wide) * wide
        if covered < least and wide <= 256 and high <= 256:
            best, least = (high, wide), float(covered)
        wide //= 2
    return best


def refuse(x: Tensor, weight: Tensor) -> str | None:
    """What it does not take; metadata only."""
    reason = refuse_dtype("x", x, DTYPES) or refuse_alike(x, weight=weight)
    if reason is not None:
        return reason
    if attention_torch.capability(x) not in (None, HOPPER):
        return "it is for Hopper, compute capability 9.0"
    if x.dim() != 4 or weight.dim() != 4 or weight.shape[1:] != (x.shape[1], 3, 3):
        return f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}; it takes 3x3 taps of C"
    if x.shape[1] % CHANNELS or weight.shape[0] % OUTPUTS:
        return (
            f"{x.shape[1]} channels to {weight.shape[0]}; it takes multiples of {CHANNELS} to multiples of"
            f" {OUTPUTS}"
        )
    if not all(arg.is_contiguous(memory_format=torch.channels_last) for arg in (x, weight)):
        return f"strides are {x.stride()} and {weight.stride()}; it takes channels-last x and weight"
    if max(x.numel(), weight.numel()) >= LIMIT:
        return f"x has {x.numel()} elements, weight {weight.numel()}; it takes fewer than 2^31"
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return "x or weight does not begin at a multiple of 16 bytes"
    if _planned(x, weight) is None:
        return f"an image of {x.shape[2]}x{x.shape[3]} leaves too much of its tiles empty"
    return None


def _planned(x: Tensor, weight: Tensor) -> Plan | None:
    batch, channels, height, width = x.shape
    there = processors(x.get_device()) if x.is_cuda else PROCESSORS
    return plan(batch, channels, weight.shape[0], height, width, there)


@counting()
def _fetch(
    x, weight, more, pixels, taps, others, full, empty, n, y0, x0, o, start, blocks, per_tap,
    BLOCK_K: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: blocks of pixels and weights into the stages that are empty."""
    for k in range(blocks):
        s = k % STAGES
        hopper.mbarrier.wait(empty.index(s), ((k // STAGES) & 1) ^ 1)
        hopper.mbarrier.expect(
            full.index(s), x.block_type.nbytes + weight.block_type.nbytes + more.block_type.nbytes
        )
        block = start + k
        tap = block // per_tap
        at = [n, y0 + tap // 3 - 1, x0 + tap % 3 - 1, (block - tap * per_tap) * BLOCK_K]
        hopper.tma.async_copy_global_to_shared(x, at, full.index(s), pixels.index(s))
        hopper.tma.async_copy_global_to_shared(weight, [o, block * BLOCK_K], full.index(s), taps.index(s))
        at = [o + FIRST, block * BLOCK_K]
        hopper.tma.async_copy_global_to_shared(more, at, full.index(s), others.index(s))


@counting()
def _multiply(
    out, rest, pixels, taps, others, full, empty, n, y0, x0, o, blocks,
    ROWS: gl.constexpr, BLOCK_K: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The sums of a tile's FIRST and SECOND columns, to `out` and `rest` by way of the stages' memory."""
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, FIRST, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SECOND, 16])
    total = gl.zeros([ROWS, FIRST], gl.float32, wide)
    more = gl.zeros([ROWS, SECOND], gl.float32, narrow)
    for k in range(blocks):
        s = k % STAGES
        hopper.mbarrier.wait(full.index(s), (k // STAGES) & 1)
        a = pixels.index(s).reshape([ROWS, BLOCK_K])
        total = hopper.warpgroup_mma(a, taps.index(s).permute([1, 0]), total, is_async=True)
        more = hopper.warpgroup_mma(a, others.index(s).permute([1, 0]), more, is_async=True)
        total, more = hopper.warpgroup_mma_wait(2, [total, more])
        hopper.mbarrier.arrive(empty.index((k + STAGES - 1) % STAGES), count=1, pred=k > 0)
    total, more = hopper.warpgroup_mma_wait(0, [total, more])
    first = taps._reinterpret(out.dtype, out.block_type.shape, out.layout)
    first.reshape([ROWS, FIRST]).store(total.to(out.dtype))
    second = pixels._reinterpret(rest.dtype, rest.block_type.shape, rest.layout)
    second.reshape([ROWS, SECOND]).store(more.to(rest.dtype))
    hopper.fence_async_shared()
    hopper.tma.async_copy_shared_to_global(out, [n, y0, x0, o], first)
    hopper.tma.async_copy_shared_to_global(rest, [n, y0, x0, o + FIRST], second)
    hopper.tma.store_wait(0)


@counting("images", "across", "down")
def _convolve(
    x, weight, more, out, rest, images, across, down, columns, per_tap,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr, BLOCK_K: gl.constexpr, FIRST: gl.constexpr,
    SECOND: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A tile of HEIGHT x WIDTH pixels; program_id(1) says which share of its sum, for which `out` has images
    of its own."""
    ROWS: gl.constexpr = HEIGHT * WIDTH
    tile = gl.program_id(0)
    share = gl.program_id(1)
    o = tile % columns * (FIRST + SECOND)
    tile = tile // columns
    x0 = tile % across * WIDTH
    tile = tile // across
    y0 = tile % down * HEIGHT
    n = tile // down
    start = share * (9 * per_tap) // gl.num_programs(1)
    blocks = (share + 1) * (9 * per_tap) // gl.num_programs(1) - start
    pixels = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)
    taps = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)
    others = gl.allocate_shared_memory(more.dtype, [STAGES] + more.block_type.shape, more.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(s), count=1)
        hopper.mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (out, rest, pixels, taps, others, full, empty, share * images + n, y0, x0, o, blocks,
                 ROWS, BLOCK_K, FIRST, SECOND, STAGES, num_warps),
            ),
            (
                _fetch,
                (x, weight, more, pixels, taps, others, full, empty, n, y0, x0, o, start, blocks, per_tap,
                 BLOCK_K, FIRST, STAGES),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


@kernel
def _add(shares, out, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """All shares in order, rounded once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    total = tl.load(shares + at, mask=live, other=0.0)
    for share in tl.static_range(1, SPLIT):
        total += tl.load(shares + share * size + at, mask=live, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live)


def run(x: Tensor, weight: Tensor) -> Tensor:
    """The op, for arguments it does not refuse."""
    cut = _planned(x, weight)
    assert cut is not None
    return cut_so(x, weight, cut)


def cut_so(x: Tensor, weight: Tensor, cut: Plan) -> Tensor:
    """The op, cut in a certain way."""
    (batch, channels, height, width), outputs = x.shape, weight.shape[0]
    tile, high, wide, split = cut
    shape, last = (batch, outputs, height, width), torch.channels_last
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=last)
    shares = out.permute(0, 2, 3, 1)
    if split > 1:
        shares = x.new_empty((split * batch, height, width, outputs), dtype=torch.float32)
    matrix = weight.permute(0, 2, 3, 1).reshape(outputs, 9 * channels)
    columns, down, across = outputs // (tile.first + tile.second), -(-height // high), -(-width // wide)
    _convolve.launch(
        (batch * down * across * columns, split),
        Described(x.permute(0, 2, 3, 1), (1, high, wide, CHANNELS)),
        *(Described(matrix, (one, CHANNELS)) for one in (tile.first, tile.second)),
        *(Described(shares, (1, high, wide, one)) for one in (tile.first, tile.second)),
        *(batch, across, down, columns, channels // CHANNELS),
        HEIGHT=high,
        WIDTH=wide,
        BLOCK_K=CHANNELS,
        FIRST=tile.first,
        SECOND=tile.second,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    if split > 1:
        _add.launch((-(-out.numel() // SUMMED),), shares, out, out.numel(), SPLIT=split, BLOCK=SUMMED)
    return out
