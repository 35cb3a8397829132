"""Convolution without bias: y = conv(x, weight), 3x3 with a border of zeros, or 1x1.

Used by the residual blocks, whose biases are added elsewhere (residual_add, group_norm_silu). Of PyTorch's
kernels none has tiles of 320 columns, which the SD UNets' channels are multiples of, and where images are
small (SD 1.x: 8x8 and 16x16 of up to 2560 channels) they keep a part of a GPU busy; see convolution_gluon.py.
Sources: diffusers.models.resnet.ResnetBlock2D; implicit products as Chetlur et al. 2014 (arXiv 1410.0759);
sums cut as by Osama et al. 2023 (arXiv 2301.03598).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _gluon, convolution_gluon
from clearway.ops._cases import loose, normal
from clearway.ops.contract import REFERENCE, Case, Given, op


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
    yield "one pixel", inputs(1, 2, 3, 1, 1)
    yield "one row, 1x1", inputs(2, 6, 4, 1, 7, side=1)
    yield "ragged", inputs(2, 5, 7, 3, 5)
    yield "tiles with pixels beyond the image", inputs(2, 64, 160, 5, 7)
    yield "several tiles", inputs(3, 64, 160, 9, 12)
    yield "tiles of 160", inputs(2, 64, 160, 8, 8)
    yield "one pixel of 64 channels", inputs(2, 64, 160, 1, 1)
    x, weight = inputs(1, 64, 160, 1, 7)
    yield "one row, whatever its stride", (loose(x), weight)
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
    x, weight = (arg.half() for arg in inputs(1, 64, 160, 3, 3))
    yield "gluon", "float32", (x.float(), weight.float())
    yield "gluon", "agree", (x, weight.bfloat16())
    yield "gluon", "3x3", (x, weight[..., 1:2, 1:2])
    yield "gluon", "multiples of 160", (x, weight[:128])
    yield "gluon", "multiples of 64", tuple(arg.half() for arg in inputs(1, 40, 160, 3, 3))
    yield "gluon", "channels-last", (x.contiguous(), weight)
    yield "gluon", "channels-last", (x, weight.contiguous())


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
    return "gluon" if x.is_cuda and convolution_gluon.prefer(x, weight) else REFERENCE


@convolution.implementation(
    "gluon",
    device="cuda",
    absent=_gluon.absent,
    refuse=convolution_gluon.refuse,
    sources=("_described.py", "_gluon.py", "_triton.py", "convolution_gluon.py"),
)
def _gluon_run(x: Tensor, weight: Tensor) -> Tensor:
    return convolution_gluon.run(x, weight)
