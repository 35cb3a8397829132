"""Convolution of a small image, without bias: y = conv(x, weight), 3x3 with a border of zeros, or 1x1.

The UNets' smallest images have few pixels and many channels (SD 1.x: 8x8 and 16x16 of up to 2560 channels),
so a convolution is a product of few rows and a long sum, and reading its weights is most of the work: cut
into tiles of the output alone it keeps a fraction of a GPU busy. `split_k` cuts the sum too: each program
adds up a share of (tap, channels) for a tile, and a second launch adds the shares in a fixed order, so that
results repeat bit for bit. Pixels are read where they lie, shifted by the tap: no copy of windows is made.
Used by the residual blocks, whose biases are added elsewhere (residual_add, group_norm_silu).
Sources: diffusers.models.resnet.ResnetBlock2D; implicit products as Chetlur et al. 2014 (arXiv 1410.0759);
sums cut as by Osama et al. 2023 (arXiv 2301.03598).
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _gluon, _triton, attention_torch, convolution_wide
from clearway.ops._cases import normal
from clearway.ops._layout import LIMIT, refuse_alike, refuse_dtype
from clearway.ops._triton import counting, kernel, tl
from clearway.ops.contract import REFERENCE, Case, Given, op

DTYPES = (torch.float16, torch.bfloat16)
CHANNELS = 64
"""Channels of x and of the output come in multiples of it: tiles are full and lie within one tap."""
MOST_ROWS = 512
"""Pixels of all images together up to which the sum is cut: beyond it PyTorch's tiles fill a GPU."""
CUDA_CAPABILITY = (9, 0)
"""On Hopper `split_k` is preferred where it takes the arguments; on others PyTorch's own convolution."""
ROOMY = ((8, 0), (9, 0), (10, 0))
"""Capabilities with 163 KB or more of shared memory a block; others have 99."""
PROCESSORS = 132
"""Multiprocessors where there is no device to ask: those of an H100 or H200."""
LEAST_BLOCKS = 4
"""Blocks of the sum that a program adds at least."""
SUMMED = 1024  # elements of a program that adds shares


class Plan(NamedTuple):
    """Sides of a tile, how many programs share a sum, and how a program is built."""

    block_m: int
    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int


def inputs(
    batch: int, channels: int, out: int, height: int, width: int, side: int = 3, last: bool = True
) -> Case:
    """Arguments, weights of about unit gain; with `last` both are channels-last."""
    layout = torch.channels_last if last else torch.contiguous_format
    x = normal(batch, channels, height, width).contiguous(memory_format=layout)
    weight = normal(out, channels, side, side, seed=1, deviation=(side * side * channels) ** -0.5)
    return x, weight.contiguous(memory_format=layout)


def cases() -> Iterator[tuple[str, Given]]:
    """The UNets' smallest images, and small ones."""
    yield "one pixel", inputs(1, 64, 64, 1, 1)
    yield "one column", inputs(1, 64, 64, 5, 1)
    yield "one row, 1x1", inputs(2, 64, 64, 1, 7, side=1)
    yield "ragged", inputs(2, 64, 64, 3, 5)
    yield "ragged, several rows of tiles", inputs(3, 64, 64, 7, 9)
    yield "several columns of tiles", inputs(1, 64, 192, 4, 3)
    yield "wide tiles", inputs(1, 64, 128, 5, 4)
    yield "more channels", inputs(1, 192, 64, 3, 3)
    yield "1x1", inputs(2, 512, 64, 5, 3, side=1)
    yield "1x1, one pixel each", inputs(3, 128, 128, 1, 1, side=1)
    yield "tiles of 160", inputs(2, 64, 160, 8, 8)
    yield "few channels", inputs(1, 3, 5, 4, 7)
    yield "contiguous", inputs(1, 64, 64, 3, 5, last=False)
    yield "every second column", (inputs(1, 8, 4, 6, 12)[0][..., ::2], inputs(1, 8, 4, 1, 1)[1])
    yield "SD1.5 8x8", lambda: inputs(2, 1280, 1280, 8, 8)
    yield "SD1.5 8x8, skip", lambda: inputs(2, 2560, 1280, 8, 8)
    yield "SD1.5 8x8, shortcut", lambda: inputs(2, 2560, 1280, 8, 8, side=1)
    yield "SD1.5 16x16", lambda: inputs(2, 1280, 1280, 16, 16)
    yield "SD1.5 16x16, first", lambda: inputs(2, 640, 1280, 16, 16)
    yield "SD1.5 16x16, skip", lambda: inputs(2, 1920, 1280, 16, 16)
    yield "SD1.5 64x64", lambda: inputs(2, 320, 320, 64, 64)
    yield "SDXL 32x32", lambda: inputs(2, 1280, 1280, 32, 32)
    yield "SDXL 128x128", lambda: inputs(2, 320, 320, 128, 128)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernel does not take."""
    x, weight = (arg.half() for arg in inputs(1, 64, 64, 3, 3))
    yield "split_k", "float32", (x.float(), weight.float())
    yield "split_k", "agree", (x, weight.bfloat16())
    yield "split_k", "3x3 or 1x1", (x, weight[..., :2])
    yield "split_k", "3x3 or 1x1", (x, weight[:, :32])
    yield "split_k", "multiples of 64", (x, weight[:40])
    yield "split_k", "channels-last", (x.contiguous(), weight)
    yield "split_k", "channels-last", (x, weight.contiguous())
    yield "gluon", "float32", (x.float(), weight.float())
    yield "gluon", "agree", (x, weight.bfloat16())
    yield "gluon", "3x3", (x, weight[..., 1:2, 1:2])
    yield "gluon", "multiples of 160", (x, weight)
    y, wide = (arg.half() for arg in inputs(1, 64, 320, 3, 3))
    yield "gluon", "empty", (y, wide)
    y, wide = (arg.half() for arg in inputs(1, 64, 320, 8, 8))
    yield "gluon", "channels-last", (y.contiguous(), wide)
    yield "split_k", "513 pixels", tuple(arg.half() for arg in inputs(1, 64, 64, 27, 19))


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, w: x.nbytes + w.nbytes + x.nbytes // x.shape[1] * w.shape[0],
    flops=lambda x, w: 2 * x.numel() * w.shape[0] * w.shape[2] * w.shape[3],
    size_class=lambda x, w: (
        f"{x.shape[1]}x{w.shape[0]}x{w.shape[-1]}x{(x.shape[0] * x.shape[2] * x.shape[3]).bit_length()}"
    ),
    compile="inline",
)
def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """conv(x, weight) of the size of x, with a border of zeros, in the layout PyTorch gives it.

    x (N, C, H, W), weight (O, C, 3, 3) or (O, C, 1, 1) -> (N, O, H, W), channels-last where x or weight is.
    """
    return F.conv2d(x, weight, None, padding=weight.shape[-1] // 2)


@convolution.default("cuda")
def _prefer_on_cuda(x: Tensor, weight: Tensor) -> str:
    if attention_torch.capability(x) != CUDA_CAPABILITY:
        return REFERENCE
    return "gluon" if convolution_wide.refuse(x, weight) is None else "split_k"


def _refuse(x: Tensor, weight: Tensor) -> str | None:
    reason = refuse_dtype("x", x, DTYPES) or refuse_alike(x, weight=weight)
    if reason is not None:
        return reason
    if x.dim() != 4 or weight.dim() != 4 or weight.shape[1:] not in _shapes(x.shape[1]):
        return f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}; it takes 3x3 or 1x1 taps of C"
    if x.shape[1] % CHANNELS or weight.shape[0] % CHANNELS:
        return f"{x.shape[1]} channels to {weight.shape[0]}; it takes multiples of {CHANNELS}"
    rows = x.shape[0] * x.shape[2] * x.shape[3]
    if rows > MOST_ROWS:
        return f"there are {rows} pixels in all; it takes up to {MOST_ROWS}"
    if not all(arg.is_contiguous(memory_format=torch.channels_last) for arg in (x, weight)):
        return f"strides are {x.stride()} and {weight.stride()}; it takes channels-last x and weight"
    return f"weight has {weight.numel()} elements; it takes fewer" if weight.numel() >= LIMIT else None


def _shapes(channels: int) -> tuple[tuple[int, int, int], ...]:
    return (channels, 3, 3), (channels, 1, 1)


@counting("rows", "height", "width")
def _share(
    x, weight, rows, height, width, channels,
    SIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """This program's share of the sums of a tile: weight is (O, taps * C), and so is the image, by shifts."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    i, j = m // width % height, m % width
    per_tap = channels // BLOCK_K
    blocks = SIDE * SIDE * per_tap
    first = tl.program_id(2) * blocks // tl.num_programs(2)
    last = (tl.program_id(2) + 1) * blocks // tl.num_programs(2)
    x_at = x + m[:, None] * channels + k[None, :]
    weight_at = weight + o[None, :] * (SIDE * SIDE * channels) + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(first, last):
        tap = block // per_tap
        down, right = tap // SIDE - SIDE // 2, tap % SIDE - SIDE // 2
        there = (m < rows) & (i + down >= 0) & (i + down < height) & (j + right >= 0) & (j + right < width)
        away = (down * width + right) * channels + (block - tap * per_tap) * BLOCK_K
        pixels = tl.load(x_at + away, mask=there[:, None], other=0.0)
        taps = tl.load(weight_at + block * BLOCK_K)
        total = tl.dot(pixels, taps, total)
    return total


@counting("rows", "height", "width")
def _product(
    x, weight, out, rows, height, width, channels, outputs,
    SIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Shares to (split, rows, outputs); where a sum is one share, that is the output."""
    total = _share(x, weight, rows, height, width, channels, SIDE, BLOCK_M, BLOCK_N, BLOCK_K)  # type: ignore[operator]
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    to = out + (tl.program_id(2) * rows + m)[:, None] * outputs + o[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m < rows)[:, None])


@kernel
def _add(shares, out, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """All shares in order, rounded once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    total = tl.load(shares + at, mask=live, other=0.0)
    for share in tl.static_range(1, SPLIT):
        total += tl.load(shares + share * size + at, mask=live, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live)


def plan(rows: int, outputs: int, reduction: int, processors: int, roomy: bool) -> Plan:
    """How a product (rows, reduction) x (reduction, outputs) is cut, so that programs are one to a
    multiprocessor."""
    block_m = 64 if rows <= 64 else 128
    block_n = 64 if outputs % 128 else 128
    tiles = -(-rows // block_m) * (outputs // block_n)
    split = max(min(processors // tiles, reduction // (CHANNELS * LEAST_BLOCKS)), 1)
    return Plan(
        block_m, block_n, CHANNELS, split, 4 if block_m * block_n < 128 * 128 else 8, 4 if roomy else 3
    )


def _planned(x: Tensor, weight: Tensor) -> Plan:
    rows, reduction = x.shape[0] * x.shape[2] * x.shape[3], weight.numel() // weight.shape[0]
    processors = _processors(x.get_device()) if x.is_cuda else PROCESSORS
    return plan(rows, weight.shape[0], reduction, processors, attention_torch.capability(x) in ROOMY)


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@convolution.implementation(
    "split_k", device="cuda", absent=_triton.absent, refuse=_refuse, sources=("_triton.py",)
)
def _split_k_run(x: Tensor, weight: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    outputs, rows = weight.shape[0], batch * height * width
    shape, last = (batch, outputs, height, width), torch.channels_last
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=last)
    block_m, block_n, block_k, split, warps, stages = _planned(x, weight)
    shares = torch.empty((split, rows, outputs), dtype=torch.float32, device=x.device) if split > 1 else out
    _product.launch(
        (outputs // block_n, -(-rows // block_m), split),
        *(x, weight, shares, rows, height, width, channels, outputs),
        SIDE=weight.shape[-1],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
    )
    if split > 1:
        _add.launch((-(-out.numel() // SUMMED),), shares, out, out.numel(), SPLIT=split, BLOCK=SUMMED)
    return out


@convolution.implementation(
    "gluon",
    device="cuda",
    absent=_gluon.absent,
    refuse=convolution_wide.refuse,
    sources=("_described.py", "_gluon.py", "_triton.py", "convolution_wide.py"),
)
def _gluon_run(x: Tensor, weight: Tensor) -> Tensor:
    return convolution_wide.run(x, weight)
