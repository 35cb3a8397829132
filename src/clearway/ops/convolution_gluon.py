"""Convolutions in tiles of 320 or 160 output channels, in Gluon, for Hopper.

One warp has the copy engine fetch pixels, shifted by the tap, with zeros beyond the image's border, and
weights; the others multiply, each in products of a warpgroup. The SD UNets' channels are multiples of 320: a
tile of all 320 reads every pixel once, where tiles of powers of two leave parts of them empty. Where an image
is small the sum of a tile is cut into shares that a second launch adds in order. An upsampler's four phases
are convolutions of 2x2 taps whose tiles are written where they belong in the larger image.
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
FEW = 512
"""Pixels of all images up to which PyTorch's own tiles keep a part of a GPU busy only."""
LEAST_USE, LEAST_USE_OF_FEW = 0.7, 0.15
"""The plan's use below which PyTorch's convolution is expected to be quicker."""
SPLITS = (1, 2, 3, 4, 6, 8, 16)
LEAST_BLOCKS = 8
"""Blocks of a sum that a share has at least."""
SUMMED = 1024  # elements of a program that adds shares
_LAUNCH, _SHARE, _TURN = 2.5e5, 8.0, 5e4
"""What takes time besides, in sums of a block: a launch that adds shares, an element of a share, a turn's
beginning and end."""


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
    """A tile, its height and width in pixels, how many programs share its sum, and which part it is of what
    the multiprocessors could do in the time that it is estimated to take."""

    tile: Tile
    height: int
    width: int
    split: int
    use: float


@functools.lru_cache(maxsize=1024)
def plan(batch: int, channels: int, outputs: int, height: int, width: int, there: int, side: int = 3) -> Plan:
    """The cut that is estimated to be the quickest on `there` multiprocessors, for taps of side x side; those
    of 2x2 are an upsampler's phases, whose tiles are of rows that divide the image."""
    made = 4 * outputs if side == 2 else outputs
    blocks, rows = side * side * channels // CHANNELS, batch * height * width
    best, least = Plan(TILES[-1], 1, TILES[-1].rows, 1, 0.0), float("inf")
    for tile in TILES:
        columns = tile.first + tile.second
        if outputs % columns:
            continue
        for high, wide in _sides(tile.rows):
            if side == 2 and height % high:
                continue
            tiles = batch * -(-height // high) * -(-width // wide) * (made // columns)
            for split in SPLITS:
                if split > 1 and (tiles * split > there or blocks // split < LEAST_BLOCKS):
                    continue
                turns = -(-tiles * split // there)
                cost = turns * (-(-blocks // split) * tile.rows * columns / tile.use + _TURN)
                cost += _LAUNCH + _SHARE * split * rows * made / there if split > 1 else 0.0
                if cost < least:
                    use = rows * made / there * blocks / cost
                    best, least = Plan(tile, high, wide, split, use), cost
    return best


def _sides(rows: int) -> list[tuple[int, int]]:
    """(height, width) of tiles of so many pixels, in order of preference. All are as quick where they leave
    as little empty (NVIDIA H200, fp16, 2026-11-30: single replays within 1 % at five sizes,
    bench/results/nvidia-h200/candidates.jsonl), so images of many sizes share the first one and the kernel
    built for it."""
    return [(rows // wide, wide) for wide in (16, 32, 8, 64, 128, 4) if wide <= rows]


def refuse(x: Tensor, weight: Tensor) -> str | None:
    """What it does not take of 3x3 convolutions; metadata only."""
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
    return None


def prefer(x: Tensor, weight: Tensor, side: int = 3) -> bool:
    """Whether it is expected to be quicker than PyTorch's convolution."""
    if refuse(x, weight) is not None:
        return False
    rows = x.shape[0] * x.shape[2] * x.shape[3]
    return planned(x, weight.shape[0], side).use >= (LEAST_USE_OF_FEW if rows <= FEW else LEAST_USE)


def planned(x: Tensor, outputs: int, side: int) -> Plan:
    """The plan for x (N, C, H, W) on its device."""
    batch, channels, height, width = x.shape
    there = processors(x.get_device()) if x.is_cuda else PROCESSORS
    return plan(batch, channels, outputs, height, width, there, side)


@counting()
def _fetch(
    x, weight, more, pixels, taps, others, full, empty, n, y0, x0, o, start, blocks, per_tap,
    SIDE: gl.constexpr, BLOCK_K: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: blocks of pixels, those of the first tap from (y0, x0) on, and of weights into the stages
    that are empty."""
    for k in range(blocks):
        s = k % STAGES
        hopper.mbarrier.wait(empty.index(s), ((k // STAGES) & 1) ^ 1)
        hopper.mbarrier.expect(
            full.index(s), x.block_type.nbytes + weight.block_type.nbytes + more.block_type.nbytes
        )
        block = start + k
        tap = block // per_tap
        at = [n, y0 + tap // SIDE, x0 + tap % SIDE, (block - tap * per_tap) * BLOCK_K]
        hopper.tma.async_copy_global_to_shared(x, at, full.index(s), pixels.index(s))
        hopper.tma.async_copy_global_to_shared(weight, [o, block * BLOCK_K], full.index(s), taps.index(s))
        at = [o + FIRST, block * BLOCK_K]
        hopper.tma.async_copy_global_to_shared(more, at, full.index(s), others.index(s))


@counting()
def _multiply(
    out, rest, bias, pixels, taps, others, full, empty, n, y0, x0, o, a, b, blocks,
    ROWS: gl.constexpr, BLOCK_K: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr,
    SIDE: gl.constexpr, HAS_BIAS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The sums of a tile's FIRST and SECOND columns, to `out` and `rest` by way of the stages' memory."""
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, FIRST, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SECOND, 16])
    total = gl.zeros([ROWS, FIRST], gl.float32, wide)
    more = gl.zeros([ROWS, SECOND], gl.float32, narrow)
    for k in range(blocks):
        s = k % STAGES
        hopper.mbarrier.wait(full.index(s), (k // STAGES) & 1)
        part = pixels.index(s).reshape([ROWS, BLOCK_K])
        total = hopper.warpgroup_mma(part, taps.index(s).permute([1, 0]), total, is_async=True)
        more = hopper.warpgroup_mma(part, others.index(s).permute([1, 0]), more, is_async=True)
        total, more = hopper.warpgroup_mma_wait(2, [total, more])
        hopper.mbarrier.arrive(empty.index((k + STAGES - 1) % STAGES), count=1, pred=k > 0)
    total, more = hopper.warpgroup_mma_wait(0, [total, more])
    if HAS_BIAS:
        at = bias + o + gl.arange(0, FIRST, gl.SliceLayout(0, wide))
        total += gl.load(at).to(gl.float32)[None, :]
        at_more = bias + o + FIRST + gl.arange(0, SECOND, gl.SliceLayout(0, narrow))
        more += gl.load(at_more).to(gl.float32)[None, :]
    first = taps._reinterpret(out.dtype, out.block_type.shape, out.layout)
    first.reshape([ROWS, FIRST]).store(total.to(out.dtype))
    second = pixels._reinterpret(rest.dtype, rest.block_type.shape, rest.layout)
    second.reshape([ROWS, SECOND]).store(more.to(rest.dtype))
    hopper.fence_async_shared()
    if SIDE == 2:
        hopper.tma.async_copy_shared_to_global(out, [n + y0, a, x0, b, o], first)
        hopper.tma.async_copy_shared_to_global(rest, [n + y0, a, x0, b, o + FIRST], second)
    else:
        hopper.tma.async_copy_shared_to_global(out, [n, y0, x0, o], first)
        hopper.tma.async_copy_shared_to_global(rest, [n, y0, x0, o + FIRST], second)
    hopper.tma.store_wait(0)


@counting("images", "height", "across", "down")
def _convolve(
    x, weight, more, out, rest, bias, images, height, across, down, outputs, per_tap,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr, BLOCK_K: gl.constexpr, FIRST: gl.constexpr,
    SECOND: gl.constexpr, SIDE: gl.constexpr, HAS_BIAS: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """A tile of HEIGHT x WIDTH pixels; program_id(1) says which share of its sum, for which `out` has images
    of its own. With taps of 2x2 `out` is (images * height, 2, width, 2, outputs)."""
    ROWS: gl.constexpr = HEIGHT * WIDTH
    columns = (4 if SIDE == 2 else 1) * outputs // (FIRST + SECOND)
    tile = gl.program_id(0)
    share = gl.program_id(1)
    column = tile % columns * (FIRST + SECOND)
    phase = column // outputs
    tile = tile // columns
    x0 = tile % across * WIDTH
    tile = tile // across
    y0 = tile % down * HEIGHT
    n = tile // down
    a = phase // 2
    b = phase % 2
    start = share * (SIDE * SIDE * per_tap) // gl.num_programs(1)
    blocks = (share + 1) * (SIDE * SIDE * per_tap) // gl.num_programs(1) - start
    image = share * images + n
    if SIDE == 2:
        image = image * height
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
                (out, rest, bias, pixels, taps, others, full, empty, image, y0, x0, column - phase * outputs,
                 a, b, blocks, ROWS, BLOCK_K, FIRST, SECOND, SIDE, HAS_BIAS, STAGES, num_warps),
            ),
            (
                _fetch,
                (x, weight, more, pixels, taps, others, full, empty, n, y0 + a - 1, x0 + b - 1,
                 column, start, blocks, per_tap, SIDE, BLOCK_K, FIRST, STAGES),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


@kernel
def _add(shares, out, bias, size, outputs, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """All shares in order and the bias, rounded once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    total = tl.load(shares + at, mask=live, other=0.0)
    for share in tl.static_range(1, SPLIT):
        total += tl.load(shares + share * size + at, mask=live, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % outputs, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live)


def run(x: Tensor, weight: Tensor) -> Tensor:
    """conv(x, weight) of 3x3 taps, for arguments that `refuse` takes."""
    return cut_so(x, weight, None, planned(x, weight.shape[0], 3))


def run_phases(x: Tensor, phases: Tensor, bias: Tensor | None) -> Tensor:
    """The upsampled image: phases (4 O, C, 2, 2), for arguments that `refuse` takes with the 3x3 taps."""
    return cut_so(x, phases, bias, planned(x, phases.shape[0] // 4, 2))


def cut_so(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Plan) -> Tensor:
    """The same, cut in a certain way; weight (O, C, 3, 3), or four phases, (4 O, C, 2, 2)."""
    (batch, channels, height, width), side = x.shape, weight.shape[-1]
    up = 2 if side == 2 else 1
    outputs = weight.shape[0] // up**2
    tile, high, wide, split = cut[:4]
    shape, last = (batch, outputs, up * height, up * width), torch.channels_last
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=last)
    shares = out.permute(0, 2, 3, 1)
    if split > 1:
        shares = x.new_empty((split * batch, up * height, up * width, outputs), dtype=torch.float32)
    blocks: list[tuple[int, ...]] = [(1, high, wide, one) for one in (tile.first, tile.second)]
    to = shares
    if side == 2:
        to = shares.view(split * batch * height, 2, width, 2, outputs)
        blocks = [(high, 1, wide, 1, one) for one in (tile.first, tile.second)]
    matrix = weight.permute(0, 2, 3, 1).reshape(weight.shape[0], side * side * channels)
    columns, down, across = (
        weight.shape[0] // (tile.first + tile.second),
        -(-height // high),
        -(-width // wide),
    )
    added = bias if split == 1 else None
    _convolve.launch(
        (batch * down * across * columns, split),
        Described(x.permute(0, 2, 3, 1), (1, high, wide, CHANNELS)),
        *(Described(matrix, (one, CHANNELS)) for one in (tile.first, tile.second)),
        *(Described(to, block) for block in blocks),
        *(x if added is None else added, batch, height, across, down, outputs, channels // CHANNELS),
        HEIGHT=high,
        WIDTH=wide,
        BLOCK_K=CHANNELS,
        FIRST=tile.first,
        SECOND=tile.second,
        SIDE=side,
        HAS_BIAS=added is not None,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    if split > 1:
        _add.launch(
            (-(-out.numel() // SUMMED),),
            *(shares, out, out if bias is None else bias, out.numel(), outputs),
            SPLIT=split,
            HAS_BIAS=bias is not None,
            BLOCK=SUMMED,
        )
    return out
