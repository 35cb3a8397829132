"""A linear layer and the GEGLU of what it gives: y = a * gelu(b), (a, b) = x weight^T + bias.

Used in the feed-forward of every transformer block of the SD UNets (D = 1280 to 5120), whose two halves take
more memory than any other tensor of the block: here a tile of both is multiplied at once, and they are never
written. One warp has Hopper's copy engine fetch the blocks of this tile and already those of the next one,
while the others multiply, gate and write.
Sources: Shazeer 2020 (arXiv 2002.05202); diffusers.models.activations.GEGLU.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: RUF005
# Kernels are in Gluon's language: their arguments are no Python types, and it knows no starred lists.
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _gluon, attention_torch
from clearway.ops._cases import loose, normal
from clearway.ops._described import Described
from clearway.ops._gluon import HOPPER, PROCESSORS, counting, gl, hopper, processors
from clearway.ops._layout import LIMIT, refuse_alike, refuse_dtype
from clearway.ops.contract import REFERENCE, Case, Given, op

DTYPES = (torch.float16, torch.bfloat16)
ROWS, COLUMNS, BLOCK_K, STAGES, WARPS = 128, 128, 64, 4, 8
"""Columns are of each half. Tiles of 160 would fill a Hopper's 132 multiprocessors in whole turns, but leave
room for three stages: on an H200 they were slower at SDXL's sizes."""
TOGETHER = 16
"""Tiles of rows that are next to each other in the order of tiles."""
LEAST_USE = 0.75
"""Part of the multiprocessors' turns that tiles must fill: below it PyTorch's product, which cuts finer, and
a pass after it are expected to be quicker."""


def inputs(rows: tuple[int, ...], width: int, outputs: int, bias: bool = True) -> Case:
    """Arguments, weights of about unit gain."""
    return (
        normal(*rows, width),
        normal(2 * outputs, width, seed=1, deviation=width**-0.5),
        normal(2 * outputs, seed=2, deviation=0.5) if bias else None,
    )


def cases() -> Iterator[tuple[str, Given]]:
    """Feed-forwards of SD UNets at their resolutions, and small ones."""
    yield "tiny", inputs((1, 3), 8, 4)
    yield "ragged", inputs((2, 5), 37, 7)
    yield "no bias", inputs((4, 3), 16, 24, bias=False)
    _, *rest = inputs((6,), 24, 8)
    yield "every second row", (normal(12, 24)[::2], *rest)
    yield "one tile", inputs((100,), 64, 128)
    x, *rest = inputs((1, 1), 64, 128)
    yield "one row, whatever its stride", (loose(x), *rest)
    yield "several tiles", inputs((3, 60), 128, 256)
    yield "SD1.5 64x64", lambda: inputs((2, 4096), 320, 1280)
    yield "SD1.5 32x32", lambda: inputs((2, 1024), 640, 2560)
    yield "SDXL 64x64", lambda: inputs((2, 4096), 640, 2560)
    yield "SDXL 32x32", lambda: inputs((2, 1024), 1280, 5120)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernel does not take."""
    x, weight, bias = (arg.half() for arg in inputs((2, 128), 64, 128))
    yield "gluon", "float32", (x.float(), weight.float(), bias.float())
    yield "gluon", "agree", (x, weight.bfloat16(), bias)
    yield "gluon", "(2 * N, K)", (x, weight[:, :40], bias)
    yield "gluon", "multiples of", (x, weight[:192], bias[:192])
    yield "gluon", "contiguous", (x.transpose(0, 1), weight, bias)
    yield "gluon", "without a bias", (x, weight, None)


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, w, *_: x.nbytes + w.nbytes + x.nbytes // x.shape[-1] * w.shape[0] // 2,
    flops=lambda x, w, *_: 2 * x.numel() * w.shape[0],
    size_class=lambda x, w, *_: f"{(x.numel() // x.shape[-1]).bit_length()}x{w.shape[0]}x{w.shape[1]}",
    compile="inline",
)
def geglu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """a * gelu(b) of (a, b) = x weight^T + bias, contiguous. x (..., K), weight (2 N, K), bias (2 N,) ->
    (..., N). ValueError where the weight has an odd number of rows."""
    if weight.shape[0] % 2:
        raise ValueError(f"geglu_linear: the weight has {weight.shape[0]} rows; they must be even")
    a, b = F.linear(x, weight, bias).chunk(2, dim=-1)
    return (a * F.gelu(b)).contiguous()


@geglu_linear.default("cuda")
def _prefer_on_cuda(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    if not x.is_cuda or _refuse(x, weight, bias) is not None:
        return REFERENCE
    part = use(x.numel() // x.shape[-1], weight.shape[0] // 2, processors(x.get_device()))
    return "gluon" if part >= LEAST_USE else REFERENCE


def use(rows: int, outputs: int, there: int) -> float:
    """Part of the turns of `there` multiprocessors that the tiles of (rows, outputs) fill."""
    tiles = -(-rows // ROWS) * (outputs // COLUMNS)
    return tiles / (-(-tiles // there) * there)


def _refuse(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    reason = refuse_dtype("x", x, DTYPES) or refuse_alike(x, weight=weight, bias=bias)
    if reason is not None:
        return reason
    if attention_torch.capability(x) not in (None, HOPPER):
        return "it is for Hopper, compute capability 9.0"
    if weight.dim() != 2 or weight.shape[0] % 2 or weight.shape[1] != x.shape[-1]:
        return f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}; it takes (..., K) and (2 * N, K)"
    if bias is None or bias.shape != weight.shape[:1]:
        return "it is without a bias, or its bias is of another size; it takes one, (2 * N,)"
    if weight.shape[0] // 2 % COLUMNS or weight.shape[1] % BLOCK_K:
        return f"weight is {tuple(weight.shape)}; N and K must be multiples of {COLUMNS} and {BLOCK_K}"
    if not (x.is_contiguous() and weight.is_contiguous() and bias.is_contiguous()):
        return "x, weight or bias is not contiguous"
    if max(x.numel(), weight.numel(), x.numel() // x.shape[-1] * weight.shape[0]) >= LIMIT:
        return "there are 2^31 elements or more"
    if any(arg.data_ptr() % 16 for arg in (x, weight, bias)):
        return "x, weight or bias does not begin at a multiple of 16 bytes"
    return None


@counting()
def _place(tile, down, outputs, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TOGETHER: gl.constexpr):
    """A tile's first row and first column. TOGETHER tiles of rows take all columns before the next ones do:
    what multiprocessors read at a time stays in the cache."""
    many = TOGETHER * (outputs // COLUMNS)
    group = tile // many
    rest = tile - group * many
    high = gl.minimum(TOGETHER, down - group * TOGETHER)
    return (group * TOGETHER + rest % high) * ROWS, rest // high * COLUMNS


@counting()
def _fetch(
    x, weight, rows, both, full, empty, down, tiles, outputs, blocks,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """One warp: blocks of x and of both halves of the weight into the stages that are empty."""
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = _place(tile, down, outputs, ROWS, COLUMNS, TOGETHER)  # type: ignore[operator]
        for k in range(blocks):
            s = turn % STAGES
            hopper.mbarrier.wait(empty.index(s), ((turn // STAGES) & 1) ^ 1)
            hopper.mbarrier.expect(full.index(s), x.block_type.nbytes + 2 * weight.block_type.nbytes)
            at = k * BLOCK_K
            hopper.tma.async_copy_global_to_shared(x, [m, at], full.index(s), rows.index(s))
            values = both.index(s).slice(0, COLUMNS, 0)
            gates = both.index(s).slice(COLUMNS, COLUMNS, 0)
            hopper.tma.async_copy_global_to_shared(weight, [n, at], full.index(s), values)
            hopper.tma.async_copy_global_to_shared(weight, [n + outputs, at], full.index(s), gates)
            turn += 1


@counting()
def _gate(
    out, bias, rows, both, made, full, empty, down, tiles, outputs, blocks,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Both sums of a tile, then a * gelu(b): the polynomial is geglu's. The bias is there before it is asked
    for."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * COLUMNS, 16])
    halves, _ = (
        gl.zeros([ROWS, 2 * COLUMNS], gl.float32, layout)
        .reshape([ROWS, 2, COLUMNS])
        .permute([0, 2, 1])
        .split()
    )
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, halves.type.layout))
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = _place(tile, down, outputs, ROWS, COLUMNS, TOGETHER)  # type: ignore[operator]
        bias_a = gl.load(bias + n + columns)
        bias_b = gl.load(bias + outputs + n + columns)
        total = gl.zeros([ROWS, 2 * COLUMNS], gl.float32, layout)
        for k in range(blocks):
            s = turn % STAGES
            hopper.mbarrier.wait(full.index(s), (turn // STAGES) & 1)
            total = hopper.warpgroup_mma(rows.index(s), both.index(s).permute([1, 0]), total, is_async=True)
            total = hopper.warpgroup_mma_wait(1, [total])
            hopper.mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=k > 0)
            turn += 1
        total = hopper.warpgroup_mma_wait(0, [total])
        hopper.mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
        a, b = total.reshape([ROWS, 2, COLUMNS]).permute([0, 2, 1]).split()
        a += bias_a.to(gl.float32)[None, :]
        b += bias_b.to(gl.float32)[None, :]
        t = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + 0.2316418882 * gl.abs(b)],
            dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        y = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
        y = t * (0.127414796 + t * (-0.142248368 + t * y)) * gl.exp2(-0.7213475204444817 * b * b)
        y = gl.where(b < 0, y, 1.0 - y)
        hopper.tma.store_wait(0)
        made.store((a * (b * y)).to(out.dtype))
        hopper.fence_async_shared()
        hopper.tma.async_copy_shared_to_global(out, [m, n], made)
    hopper.tma.store_wait(0)


@counting("down", "tiles")
def _product(
    x, weight, out, bias, down, tiles, outputs, blocks,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    TOGETHER: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """As many programs as the device has multiprocessors, each a tile after the other."""
    rows = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)
    both = gl.allocate_shared_memory(weight.dtype, [STAGES, 2 * COLUMNS, BLOCK_K], weight.layout)
    made = gl.allocate_shared_memory(out.dtype, out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(s), count=1)
        hopper.mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (
                _gate,
                (out, bias, rows, both, made, full, empty, down, tiles, outputs, blocks,
                 ROWS, COLUMNS, STAGES, TOGETHER, num_warps),
            ),
            (
                _fetch,
                (x, weight, rows, both, full, empty, down, tiles, outputs, blocks,
                 ROWS, COLUMNS, BLOCK_K, STAGES, TOGETHER),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


@geglu_linear.implementation(
    "gluon", device="cuda", absent=_gluon.absent, refuse=_refuse, sources=("_gluon.py", "_described.py")
)
def _gluon_run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, outputs = x.numel() // x.shape[-1], weight.shape[0] // 2
    out = x.new_empty((*x.shape[:-1], outputs))
    down = -(-rows // ROWS)
    tiles = down * (outputs // COLUMNS)
    there = processors(x.get_device()) if x.is_cuda else PROCESSORS
    _product.launch(
        (min(there, tiles),),
        Described(x.view(rows, -1), (ROWS, BLOCK_K)),
        Described(weight, (COLUMNS, BLOCK_K)),
        Described(out.view(rows, outputs), (ROWS, COLUMNS)),
        *(bias, down, tiles, outputs, weight.shape[1] // BLOCK_K),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        BLOCK_K=BLOCK_K,
        STAGES=STAGES,
        TOGETHER=TOGETHER,
        num_warps=WARPS,
    )
    return out
