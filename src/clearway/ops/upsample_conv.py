"""Upsampling by two to the nearest pixel, then a 3x3 convolution: y = conv(x repeated 2x2, weight) + bias.

Each of the four phases of the output (even or odd row, even or odd column) reads only 2x2 pixels of x, with
taps that are sums of the nine: `phases` does four 2x2 convolutions as one with 4 O channels, 16 products a
pixel of x instead of 36, and no image of four times the size in between. The sums are made in float32 and
rounded once to the weight's dtype.
Used in the upsamplers of the UNets (C = 640, 1280) and of the VAE's decoder (C = 256, 512).
Sources: diffusers.models.upsampling.Upsample2D; phases as Shi et al. 2016 (arXiv 1609.05158) draw them.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _gluon, _triton, convolution_gluon
from clearway.ops._cases import loose, normal
from clearway.ops._layout import image_format, refuse_alike, refuse_dtype
from clearway.ops._triton import counting, kernel, tl
from clearway.ops.contract import Case, Given, op


def inputs(batch: int, channels: int, out: int, height: int, width: int, last: bool = False) -> Case:
    """Arguments; with `last` x and weight are channels-last. Weights of about unit gain."""
    layout = torch.channels_last if last else torch.contiguous_format
    x = normal(batch, channels, height, width).contiguous(memory_format=layout)
    weight = normal(out, channels, 3, 3, seed=1, deviation=(9 * channels) ** -0.5)
    return x, weight.contiguous(memory_format=layout), normal(out, seed=2, deviation=0.5)


def cases() -> Iterator[tuple[str, Given]]:
    """Upsamplers of UNets and of the VAE's decoder, and small ones."""
    yield "tiny", inputs(1, 2, 2, 2, 2)
    yield "one pixel", inputs(1, 4, 3, 1, 1)
    yield "ragged", inputs(2, 5, 7, 3, 9)
    yield "ragged, channels-last", inputs(2, 5, 7, 9, 3, last=True)
    yield "no bias", (*inputs(1, 8, 8, 5, 6, last=True)[:2], None)
    yield "several blocks", inputs(1, 16, 80, 20, 36, last=True)
    yield "tiles of 160", inputs(2, 64, 160, 8, 12, last=True)
    yield "one pixel of 64 channels", inputs(2, 64, 160, 1, 1, last=True)
    x, *rest = inputs(1, 64, 160, 1, 12, last=True)
    yield "one row, whatever its stride", (loose(x), *rest)
    x, *rest = inputs(1, 8, 4, 6, 12)
    yield "every second column", (x[..., ::2], *rest)
    yield "SD1.5 8x8", lambda: inputs(2, 1280, 1280, 8, 8, last=True)
    yield "SD1.5 32x32", lambda: inputs(2, 640, 640, 32, 32, last=True)
    yield "SDXL 32x32", lambda: inputs(2, 1280, 1280, 32, 32, last=True)
    yield "VAE 512, first", lambda: inputs(1, 512, 512, 64, 64, last=True)
    yield "VAE 512, last", lambda: inputs(1, 256, 256, 256, 256, last=True)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the implementations do not take."""
    x, weight, bias = inputs(1, 4, 4, 3, 3)
    for name in ("phases", "triton"):
        yield name, "3x3", (x, weight[..., :1], bias)
        yield name, "agree", (x, weight.double(), bias)
    y, wide, plus = (arg.half() for arg in inputs(1, 64, 160, 4, 8, last=True))
    yield "phases", "one of 4", (x, weight, bias[:3])
    yield "triton", "contiguous", (x, weight, normal(8)[::2])
    yield "gluon", "one of 160", (y, wide, plus[:80])
    yield "gluon", "contiguous", (y, wide, normal(320).half()[::2])
    yield "gluon", "bias does not begin", (y, wide, normal(161).half()[1:])
    unaligned = torch.zeros(1 + 640 * 64 * 4).half()[1:].view(-1, 2, 2, 64).permute(0, 3, 1, 2)
    yield "gluon", "phases does not begin", (y, wide, plus, unaligned)
    yield "gluon", "float32", (y.float(), wide.float(), plus.float())
    yield "gluon", "multiples of 160", (y, wide[:40], plus[:40])
    yield "gluon", "channels-last", (y, wide, plus, phases_of(wide).contiguous())
    yield "triton", "float64", (x.double(), weight.double(), None)


def phases_of(weight: Tensor) -> Tensor:
    """The four 2x2 kernels of a 3x3 one: weight (O, C, 3, 3) -> (4 O, C, 2, 2), phases even-even, even-odd,
    odd-even and odd-odd one after the other, in the weight's dtype and layout."""
    wide = weight if weight.dtype == torch.float64 else weight.float()
    made = torch.cat([columns for rows in _paired(wide, 2) for columns in _paired(rows, 3)]).to(weight.dtype)
    return made.contiguous(memory_format=image_format(weight))


def _paired(w: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Two taps of three along `axis`: (first, second + third) for even pixels, (first + second, third) for
    odd ones."""
    a, b, c = w.unbind(axis)
    return torch.stack((a, b + c), axis), torch.stack((a + b, c), axis)


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, weight, *_: x.nbytes + weight.nbytes + 4 * x.nbytes // x.shape[1] * weight.shape[0],
    flops=lambda x, weight, *_: 72 * x.numel() * weight.shape[0],
    size_class=lambda x, weight, *_: (
        f"{x.shape[1]}x{weight.shape[0]}x{(x.shape[2] * x.shape[3]).bit_length()}"
    ),
)
def upsample_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, phases: Tensor | None = None
) -> Tensor:
    """conv(x repeated 2x2, weight) + bias with a border of zeros, channels-last where x is.

    x (N, C, H, W), weight (O, C, 3, 3), bias (O,) -> (N, O, 2H, 2W). `phases` is `phases_of(weight)`, for
    who keeps it; it is made anew where it is not given.
    """
    y = F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), weight, bias, padding=1)
    return y.contiguous(memory_format=image_format(x))


def _refuse(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, phases: Tensor | None = None
) -> str | None:
    if x.dim() != 4 or weight.dim() != 4 or weight.shape[1:] != (x.shape[1], 3, 3):
        return f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}; it takes (N, C, H, W) and 3x3 taps of C"
    if phases is not None and phases.shape != (4 * weight.shape[0], weight.shape[1], 2, 2):
        return f"phases is {tuple(phases.shape)}; it takes what phases_of(weight) gives"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias is {tuple(bias.shape)}; it takes one of {weight.shape[0]}"
    return refuse_alike(x, weight=weight, bias=bias, phases=phases)


@counting("height", "width")
def _interleave(
    grid, bias, out, height, width, channels, grid_n, grid_o, grid_h, grid_w, out_n, out_o, out_h, out_w,
    HAS_BIAS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """out[2i + a, 2j + b] = grid[phase 2a + b at (i + a, j + b)] + bias: a tile of channels and pixels."""
    n = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    i, j = p // width, p % width
    known = c < channels
    live = known[:, None] & (p < height * width)[None, :]
    wide = c.to(tl.int64)
    plus = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_BIAS:
        plus = tl.load(bias + c, mask=known, other=0.0).to(tl.float32)
    for phase in tl.static_range(4):
        a = phase // 2
        b = phase % 2
        at = ((wide + phase * channels) * grid_o)[:, None] + ((i + a) * grid_h + (j + b) * grid_w)[None, :]
        value = tl.load(grid + n * grid_n + at, mask=live, other=0.0).to(tl.float32) + plus[:, None]
        to = (wide * out_o)[:, None] + ((2 * i + a) * out_h + (2 * j + b) * out_w)[None, :]
        tl.store(out + n * out_n + to, value.to(out.dtype.element_ty), mask=live)


@kernel
def _sum_taps(
    weight, out, channels, outputs, w_o, w_c, w_i, w_j, out_o, out_c, out_i, out_j,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The four phases' taps of a block of input channels of one output channel; see phases_of."""
    o = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < channels
    at = weight + o * w_o + c * w_c
    for phase in tl.static_range(4):
        for tap in tl.static_range(4):
            # along an axis: even pixels read tap 0 and taps 1 + 2, odd ones taps 0 + 1 and tap 2
            i, j = 2 * (phase // 2) + tap // 2, 2 * (phase % 2) + tap % 2
            i0 = 0 if i == 0 or i == 2 else (1 if i == 1 else 2)
            i1 = 0 if i == 0 else (1 if i == 2 else 2)
            j0 = 0 if j == 0 or j == 2 else (1 if j == 1 else 2)
            j1 = 0 if j == 0 else (1 if j == 2 else 2)
            total = tl.load(at + i0 * w_i + j0 * w_j, mask=live, other=0.0).to(tl.float32)
            if i1 != i0:
                total += tl.load(at + i1 * w_i + j0 * w_j, mask=live, other=0.0).to(tl.float32)
            if j1 != j0:
                total += tl.load(at + i0 * w_i + j1 * w_j, mask=live, other=0.0).to(tl.float32)
            if i1 != i0 and j1 != j0:
                total += tl.load(at + i1 * w_i + j1 * w_j, mask=live, other=0.0).to(tl.float32)
            to = out + (phase * outputs + o) * out_o + c * out_c + (tap // 2) * out_i + (tap % 2) * out_j
            tl.store(to, total.to(out.dtype.element_ty), mask=live)


def _refuse_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, phases: Tensor | None = None
) -> str | None:
    if x.shape[0] > 65535:
        return f"x has {x.shape[0]} images; it takes up to 65535"
    if bias is not None and not bias.is_contiguous():
        return f"bias has strides {bias.stride()}; it takes a contiguous one"
    return refuse_dtype("x", x, _triton.DTYPES) or _refuse(x, weight, bias, phases)


@upsample_conv.implementation(
    "triton", device="cuda", absent=_triton.absent, refuse=_refuse_triton, sources=("_triton.py",)
)
def _triton_run(x: Tensor, weight: Tensor, bias: Tensor | None, phases: Tensor | None) -> Tensor:
    """One convolution by PyTorch, one pass that puts its phases where they belong and adds the bias."""
    grid = F.conv2d(x, _phases(weight) if phases is None else phases, None, padding=1)
    out = _empty(x, weight)
    batch, channels, height, width = *out.shape[:2], x.shape[2], x.shape[3]
    inner = out.stride(1) == 1 and channels > 1
    block_c = min(_triton.power_of_two(channels), 128 if inner else 4)
    block_p = min(_triton.power_of_two(height * width), 1024 // block_c)
    _interleave.launch(
        (-(-height * width // block_p), -(-channels // block_c), batch),
        *(grid, grid if bias is None else bias, out, height, width, channels, *grid.stride(), *out.stride()),
        HAS_BIAS=bias is not None,
        BLOCK_C=block_c,
        BLOCK_P=block_p,
        num_warps=4,
    )
    return out


@upsample_conv.default("cuda")
def _prefer_on_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, phases: Tensor | None = None
) -> str:
    return "gluon" if x.is_cuda and convolution_gluon.prefer(x, weight, side=2) else "triton"


def _refuse_gluon(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, phases: Tensor | None = None
) -> str | None:
    reason = _refuse(x, weight, bias, phases) or convolution_gluon.refuse(x, weight)
    if reason is not None:
        return reason
    if phases is not None and not phases.is_contiguous(memory_format=torch.channels_last):
        return f"strides of phases are {phases.stride()}; it takes channels-last ones"
    if bias is not None and not bias.is_contiguous():
        return f"bias has strides {bias.stride()}; it takes a contiguous one"
    for name, arg in (("phases", phases), ("bias", bias)):
        if arg is not None and arg.data_ptr() % 16:
            return f"{name} does not begin at a multiple of 16 bytes"
    return None


@upsample_conv.implementation(
    "gluon",
    device="cuda",
    absent=_gluon.absent,
    refuse=_refuse_gluon,
    sources=("_described.py", "_gluon.py", "_triton.py", "convolution_gluon.py"),
)
def _gluon_run(x: Tensor, weight: Tensor, bias: Tensor | None, phases: Tensor | None) -> Tensor:
    """Each phase's tiles written where they belong: no pass after the convolution."""
    out = convolution_gluon.run_phases(x, _phases(weight) if phases is None else phases, bias)
    return out.contiguous(memory_format=image_format(x))  # a copy of images of one pixel, which are both


def made_phases(weight: Tensor) -> Tensor:
    """`phases_of(weight)`, on CUDA in one pass where Triton is there."""
    return _phases(weight) if weight.is_cuda and _triton.absent() is None else phases_of(weight)


def _phases(weight: Tensor) -> Tensor:
    """phases_of, in one pass."""
    outputs, channels = weight.shape[:2]
    out = torch.empty(
        (4 * outputs, channels, 2, 2),
        dtype=weight.dtype,
        device=weight.device,
        memory_format=image_format(weight),
    )
    block = min(_triton.power_of_two(channels), 512)
    _sum_taps.launch(
        (outputs, -(-channels // block)),
        *(weight, out, channels, outputs, *weight.stride(), *out.stride()),
        BLOCK=block,
        num_warps=max(block // 256, 1),  # 8 elements a thread: 16 bytes of half precision
    )
    return out


@upsample_conv.implementation("phases", device="any", refuse=_refuse, differentiable=True)
def _phases_run(x: Tensor, weight: Tensor, bias: Tensor | None, phases: Tensor | None) -> Tensor:
    taps = phases_of(weight) if phases is None else phases
    grid = F.conv2d(x, taps, None if bias is None else bias.repeat(4), padding=1)
    out = _empty(x, weight)
    channels, height, width = weight.shape[0], x.shape[2], x.shape[3]
    for phase in range(4):
        a, b = divmod(phase, 2)
        part = grid[:, phase * channels : (phase + 1) * channels, a : a + height, b : b + width]
        out[:, :, a::2, b::2] = part
    return out


def _empty(x: Tensor, weight: Tensor) -> Tensor:
    shape = (x.shape[0], weight.shape[0], 2 * x.shape[2], 2 * x.shape[3])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=image_format(x))
