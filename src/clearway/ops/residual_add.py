"""Residual addition with a convolution's bias: y = x + bias + residual, bias along the channels.

PyTorch's convolutions on CUDA add their bias in a pass of its own; a residual block then adds its input in
another. Here both are one pass over x. Used after the second convolution of every residual block of the UNets
and the VAE; where the block's shortcut is a convolution too, `bias` is the sum of both of theirs.
Source: diffusers.models.resnet.ResnetBlock2D.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearway.ops import _triton
from clearway.ops._cases import normal
from clearway.ops._layout import in_layout_of, plane_strides, refuse_alike, refuse_dtype
from clearway.ops._triton import counting, kernel, tl
from clearway.ops.contract import Case, Given, op


def inputs(batch: int, channels: int, height: int, width: int, last: bool = True) -> Case:
    """Arguments; channels-last with `last`."""
    layout = torch.channels_last if last else torch.contiguous_format
    x, residual = (
        normal(batch, channels, height, width, seed=seed).contiguous(memory_format=layout) for seed in (0, 1)
    )
    return x, normal(channels, seed=2), residual


def cases() -> Iterator[tuple[str, Given]]:
    """Blocks of the UNets and of the VAE's decoder, and small ones."""
    yield "tiny", inputs(1, 2, 2, 3)
    yield "one pixel", inputs(2, 40, 1, 1)
    yield "ragged", inputs(2, 5, 7, 9, last=False)
    yield "ragged, channels-last", inputs(3, 7, 5, 11)
    yield "several blocks", inputs(1, 96, 12, 20)
    x, bias, residual = inputs(1, 6, 4, 5)
    yield "residual contiguous, x channels-last", (x, bias, residual.contiguous())
    yield "no bias", (x, None, residual)
    yield "no residual", (x, bias, None)
    wide = normal(2, 9, 4, 4, seed=3).contiguous(memory_format=torch.channels_last)
    other = normal(2, 12, 4, 4, seed=5).contiguous(memory_format=torch.channels_last)
    yield "channels of wider tensors", (wide[:, :4], normal(4, seed=4), other[:, 5:9])
    yield "SD1.5 64x64", lambda: inputs(2, 320, 64, 64)
    yield "SDXL 128x128", lambda: inputs(2, 320, 128, 128)
    yield "SDXL 32x32", lambda: inputs(2, 1280, 32, 32)
    yield "VAE 512, last", lambda: inputs(1, 128, 512, 512)
    yield "VAE 1024, last", lambda: inputs(1, 128, 1024, 1024)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernel does not take."""
    x, bias, residual = inputs(1, 4, 4, 6)
    assert residual is not None
    yield "triton", "no common stride", (x[..., ::2, ::3], bias, None)
    yield "triton", "float64", (x.double(), None, None)
    yield "triton", "agree", (x, bias, residual.double())
    yield "triton", "residual is (1, 4, 4, 3)", (x, bias, normal(1, 4, 4, 3))


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, bias, residual: x.nbytes * (2 if residual is None else 3),
    flops=lambda x, bias, residual: 2 * x.numel(),
    compile="inline",
)
def residual_add(x: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x + bias + residual in the strides of empty_like(x). x and residual (N, C, ...), bias (C,)."""
    y = x if bias is None else x + bias.to(x.dtype).reshape(1, -1, *[1] * (x.dim() - 2))
    if residual is not None:
        y = y + residual
    return in_layout_of(x, y.clone() if y is x else y)


def _refuse(x: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> str | None:
    reason = refuse_dtype("x", x, _triton.DTYPES) or refuse_alike(x, residual=residual)
    if reason is not None:
        return reason
    if x.dim() < 3 or x.shape[0] > 65535:
        return f"x is {tuple(x.shape)}; it takes (N, C, ...) of up to 65535 images"
    if plane_strides(x) is None or (residual is not None and plane_strides(residual) is None):
        return "the axes after the channels of x or residual have no common stride"
    if residual is not None and residual.shape != x.shape:
        return f"residual is {tuple(residual.shape)}, x {tuple(x.shape)}; they must agree"
    if bias is not None and (bias.shape != (x.shape[1],) or bias.stride(0) != 1):
        return f"bias is {tuple(bias.shape)}, strides {bias.stride()}; it takes ({x.shape[1]},), contiguous"
    return None if bias is None else refuse_dtype("bias", bias, _triton.DTYPES)


@kernel
def _forward(
    x, bias, residual, out, channels, size, x_n, x_c, x_p, r_n, r_c, r_p, out_n, out_c, out_p,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A tile of channels and positions of one image."""
    n = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    known = c < channels
    live = known[:, None] & (p < size)[None, :]
    wide = c.to(tl.int64)
    at = (n * x_n + wide * x_c)[:, None] + (p * x_p)[None, :]
    y = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + c, mask=known, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        at = (n * r_n + wide * r_c)[:, None] + (p * r_p)[None, :]
        y += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
    at = (n * out_n + wide * out_c)[:, None] + (p * out_p)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live)


_forward_last = counting("size")(_forward.function)
"""Where channels lie next to each other, so that memory is not read along the positions."""


@residual_add.implementation(
    "triton", device="cuda", absent=_triton.absent, refuse=_refuse, sources=("_triton.py",)
)
def _triton_run(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    out = torch.empty_like(x)
    batch, channels = x.shape[:2]
    size = x.numel() // (batch * channels)
    strides, r_strides = plane_strides(x), plane_strides(x if residual is None else residual)
    out_strides = plane_strides(out)
    assert strides is not None and r_strides is not None and out_strides is not None
    inner = strides[1] == 1 and size > 1
    block_c = min(_triton.power_of_two(channels), 128 if inner else 4)
    block_p = min(_triton.power_of_two(size), 2048 // block_c)
    (_forward_last if inner else _forward).launch(
        (-(-size // block_p), -(-channels // block_c), batch),
        *(x, x if bias is None else bias, x if residual is None else residual, out, channels, size),
        *(*strides, *r_strides, *out_strides),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK_C=block_c,
        BLOCK_P=block_p,
        num_warps=4,
    )
    return out
