"""Skip concatenation: a UNet's image and the one of the same size on its way down, channel after channel.

Done before every residual block of the way up (9 in SDXL, 12 in SD 1.x, 640 to 2560 channels together).
PyTorch copies channels-last images piece by piece, at half of the memory's rate or less.
Source: diffusers.models.unets.unet_2d_blocks; Ronneberger et al. 2015 (arXiv 1505.04597).
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearway.ops import _triton
from clearway.ops._cases import normal
from clearway.ops._layout import plane_strides, refuse_alike, refuse_dtype
from clearway.ops._triton import counting, kernel, tl
from clearway.ops.contract import Case, Given, op

CHANNELS, POSITIONS = 256, 8


def inputs(batch: int, channels: int, skipped: int, height: int, width: int, last: bool = True) -> Case:
    """Arguments; channels-last with `last`."""
    layout = torch.channels_last if last else torch.contiguous_format
    x, skip = (
        normal(batch, count, height, width, seed=seed).contiguous(memory_format=layout)
        for seed, count in enumerate((channels, skipped))
    )
    return x, skip


def cases() -> Iterator[tuple[str, Given]]:
    """The ways up of SD UNets, and small ones."""
    yield "tiny", inputs(1, 2, 3, 2, 3)
    yield "one pixel", inputs(2, 40, 24, 1, 1)
    yield "contiguous", inputs(2, 5, 4, 7, 9, last=False)
    yield "ragged", inputs(3, 7, 12, 5, 11)
    yield "several blocks", inputs(1, 300, 260, 5, 7)
    x, skip = inputs(1, 6, 4, 4, 5)
    yield "one of each layout", (x.contiguous(), skip)
    wide = normal(2, 12, 4, 4, seed=3).contiguous(memory_format=torch.channels_last)
    yield "channels of wider tensors", (wide[:, :5], wide[:, 6:9])
    yield "SD1.5 64x64", lambda: inputs(2, 320, 320, 64, 64)
    yield "SD1.5 8x8", lambda: inputs(2, 1280, 1280, 8, 8)
    yield "SDXL 128x128", lambda: inputs(2, 640, 320, 128, 128)
    yield "SDXL 32x32", lambda: inputs(2, 1280, 1280, 32, 32)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernel does not take."""
    x, skip = inputs(1, 4, 4, 4, 6)
    yield "triton", "no common stride", (x[..., ::2, ::3], skip[..., ::2, ::3])
    yield "triton", "agree", (x, skip.double())
    yield "triton", "float64", (x.double(), skip.double())
    yield "triton", "is (1, 4, 4, 3)", (x, skip[..., :3])


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, skip: 2 * (x.nbytes + skip.nbytes),
    flops=lambda x, skip: 0,
    compile="inline",
)
def skip_concat(x: Tensor, skip: Tensor) -> Tensor:
    """cat((x, skip), 1), channels-last where x is. x (N, C, H, W), skip (N, D, H, W) -> (N, C + D, H, W)."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.cat((x, skip), 1).contiguous(memory_format=layout)


def _refuse(x: Tensor, skip: Tensor) -> str | None:
    reason = refuse_dtype("x", x, _triton.DTYPES) or refuse_alike(x, skip=skip)
    if reason is not None:
        return reason
    if x.dim() != 4 or skip.dim() != 4 or (x.shape[0], *x.shape[2:]) != (skip.shape[0], *skip.shape[2:]):
        return (
            f"x is {tuple(x.shape)}, skip is {tuple(skip.shape)}; it takes images of one size, (N, C, H, W)"
        )
    if plane_strides(x) is None or plane_strides(skip) is None:
        return "the pixels of x or skip have no common stride"
    return None


@kernel
def _forward(
    x, skip, out, channels, both, size, x_n, x_c, x_p, skip_n, skip_c, skip_p, out_n, out_c, out_p,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A tile of pixels and channels of one image."""
    n = tl.program_id(2).to(tl.int64)
    p = (tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    c = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    live = (p < size) & (c < both)
    first = c < channels
    wide = c.to(tl.int64)
    one = tl.load(x + n * x_n + p * x_p + wide * x_c, mask=live & first, other=0.0)
    at = skip + n * skip_n + p * skip_p + (wide - channels) * skip_c
    other = tl.load(at, mask=live & (c >= channels), other=0.0)
    tl.store(out + n * out_n + p * out_p + wide * out_c, tl.where(first, one, other), mask=live)


_forward_last = counting("size")(_forward.function)
"""Where channels lie next to each other, so that memory is not read along the positions."""


@skip_concat.implementation(
    "triton", device="cuda", absent=_triton.absent, refuse=_refuse, sources=("_triton.py",)
)
def _triton_run(x: Tensor, skip: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    both, size = channels + skip.shape[1], height * width
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    shape = (batch, both, height, width)
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    strides = plane_strides(x), plane_strides(skip), plane_strides(out)
    assert strides[0] is not None and strides[1] is not None and strides[2] is not None
    inner = strides[0][1] == 1 and size > 1  # channels lie next to each other
    block_c = min(_triton.power_of_two(both), CHANNELS if inner else POSITIONS)
    block_p = min(_triton.power_of_two(size), CHANNELS * POSITIONS // block_c)
    (_forward_last if inner else _forward).launch(
        (-(-size // block_p), -(-both // block_c), batch),
        *(x, skip, out, channels, both, size, *strides[0], *strides[1], *strides[2]),
        BLOCK_C=block_c,
        BLOCK_P=block_p,
        num_warps=4,
    )
    return out
