"""SiLU of GroupNorm: y = silu(weight * (x - mean) / sqrt(variance + eps) + bias), statistics over a group.

Used twice in every residual block of the SD 1.x, SD 2.x and SDXL UNets and of their VAEs, and before the last
convolution of each; with `activation` False before every attention block. `shift` is what was added to x
just before, per channel: the bias of the convolution that made x, or a time embedding, so that x is not
written and read once more for it.
Source: Wu and He 2018 (arXiv 1803.08494); torch.nn.functional.group_norm, .silu.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _metal, _metal_launch, _triton, group_norm_silu_triton
from clearway.ops._cases import normal
from clearway.ops._layout import LIMIT, in_layout_of, plane_strides, refuse_dtype, refuse_others
from clearway.ops.contract import Case, Given, op


def inputs(
    *shape: int,
    groups: int = 32,
    last: bool = False,
    shift: int = 0,
    mean: float = 0.5,
    affine: bool = True,
    activation: bool = True,
) -> Case:
    """Arguments for x of `shape`; `last`: channels last; `shift`: 1 (C,), 2 (N, C)."""
    x = normal(*shape, mean=mean)
    channels = shape[1]
    added = None if shift == 0 else normal(*shape[: 2 if shift == 2 else 1][: shift - 1], channels, seed=1)
    return (
        x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x,
        normal(channels, seed=2, mean=1.0, deviation=0.2) if affine else None,
        normal(channels, seed=3, deviation=0.2) if affine else None,
        groups,
        1e-5,
        added,
        activation,
    )


def cases() -> Iterator[tuple[str, Given]]:
    """Shapes of SD UNets and VAEs, and small ones for every branch of the kernels."""
    yield "tiny", inputs(1, 4, 2, 2, groups=2)
    yield "least: one channel a group, one pixel", inputs(2, 3, 1, 1, groups=3)
    yield "ragged", inputs(2, 21, 7, 9, groups=3)
    yield "ragged, channels last", inputs(2, 21, 7, 9, groups=3, last=True)
    yield "mean 1000", inputs(1, 8, 6, 10, groups=2, mean=1000.0)
    yield "several tiles a group", inputs(1, 12, 31, 33, groups=2, shift=1)
    yield "several tiles a group, channels last", inputs(2, 24, 19, 23, groups=2, last=True, shift=2)
    yield "two passes", inputs(1, 6, 117, 150, groups=2, mean=1000.0, shift=2)
    yield "two passes, channels last", inputs(1, 6, 117, 150, groups=2, last=True, mean=1000.0, shift=1)
    flat = inputs(1, 6, 117, 150, groups=2, last=True)
    yield "chunks of other means", (flat[0] + torch.linspace(-9, 9, 117)[:, None], *flat[1:])
    yield "one group, no affine, no SiLU", inputs(2, 5, 3, 4, groups=1, affine=False, activation=False)
    half = inputs(2, 12, 6, 8, groups=3)
    yield "half of the channels of a tensor", (half[0][:, :6], half[1][:6], half[2][:6], *half[3:])
    yield "tokens (N, C, L)", inputs(2, 8, 35, groups=4, last=True)
    yield "SD1.5 8x8", lambda: inputs(2, 1280, 8, 8, last=True)
    yield "SD1.5 16x16", lambda: inputs(2, 1280, 16, 16, last=True)
    yield "SD1.5 64x64", lambda: inputs(2, 320, 64, 64, last=True, shift=2)
    yield "SD1.5 64x64, contiguous", lambda: inputs(2, 320, 64, 64, shift=2)
    yield "SD1.5 64x64, skip", lambda: inputs(2, 640, 64, 64, last=True)
    yield "SDXL 32x32", lambda: inputs(2, 1280, 32, 32, last=True)
    yield "SDXL 64x64", lambda: inputs(2, 640, 64, 64, last=True)
    yield "SDXL 128x128", lambda: inputs(2, 320, 128, 128, last=True, shift=2)
    yield "VAE 512, mid", lambda: inputs(1, 512, 64, 64, last=True)
    yield "VAE 512, last", lambda: inputs(1, 128, 512, 512, last=True, shift=1)
    yield "VAE 512, last, contiguous", lambda: inputs(1, 128, 512, 512, shift=1)
    yield "VAE 1024, last", lambda: inputs(1, 128, 1024, 1024, last=True, shift=1)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernels do not take."""
    x, *rest = inputs(1, 8, 6, 10, groups=2)
    for name in ("triton", "metal"):
        yield name, "no common stride", (x[:, :, :, ::3], *rest)
        yield name, "weight is (9,)", (x, torch.ones(9), *rest[1:])
        yield name, "float64", (x.double(), *rest)
    yield "metal", "shift", inputs(1, 8, 6, 10, groups=2, shift=1)
    yield "metal", "without SiLU", inputs(1, 8, 6, 10, groups=2, activation=False)
    yield "triton", "shift is", (x, *rest[:-2], torch.ones(3, 8), True)


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, *_: 2 * x.nbytes,  # the least: x once, the result once
    flops=lambda x, *_: 12 * x.numel(),
)
def group_norm_silu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    shift: Tensor | None = None,
    activation: bool = True,
) -> Tensor:
    """silu(group_norm(x + shift)) in the strides of empty_like(x); `activation` False leaves SiLU out.

    x (N, C, ...), weight and bias (C,), shift (C,) or (N, C). RuntimeError where groups do not divide C.
    PyTorch's channels-last kernel for the CPU subtracts squares of sums: in float32 it is 0.01 off where the
    mean is 100 times the deviation, and 1e-5 in contiguous layout (torch 2.13); a contiguous copy takes ten
    times as long, so it is left so.
    """
    if shift is not None:
        x = x + shift.to(x.dtype).reshape(-1, x.shape[1], *[1] * (x.dim() - 2))
    weight = None if weight is None else weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    y = F.group_norm(x, groups, weight, bias, eps)
    # In place, as nobody else sees y: 209 to 320 ms against 325 to 517 ms for 1×128×512×512 in float32 (two
    # shared CPU cores, torch 2.13, 2026-11-29). One folded pass, var_mean then addcmul, took 940 ms there.
    return in_layout_of(x, F.silu(y, inplace=True) if activation else y)


def _refuse(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int) -> str | None:
    reason = refuse_dtype("x", x, _triton.DTYPES)
    if reason is not None:
        return reason
    if x.dim() < 3 or x.shape[1] % groups:
        return f"x is {tuple(x.shape)} in {groups} groups; it takes (N, C, ...) with C a multiple of groups"
    if plane_strides(x) is None:
        return f"x has strides {x.stride()}; the axes after its channels have no common stride"
    return refuse_others(x, x.shape[1], weight=weight, bias=bias)


def _refuse_triton(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    shift: Tensor | None = None,
    activation: bool = True,
) -> str | None:
    if x.shape[0] > 65535 or x.shape[1] > 65535:
        return f"x is {tuple(x.shape)}; it takes up to 65535 images and channels"
    if shift is not None:
        if shift.shape not in ((x.shape[1],), (x.shape[0], x.shape[1])) or shift.stride(-1) != 1:
            return f"shift is {tuple(shift.shape)}, strides {shift.stride()}; it takes (C,) or (N, C), rows"
        reason = refuse_dtype("shift", shift, _triton.DTYPES)
        if reason is not None:
            return reason
    return _refuse(x, weight, bias, groups)


@group_norm_silu.implementation(
    "triton",
    device="cuda",
    absent=_triton.absent,
    refuse=_refuse_triton,
    sources=("group_norm_silu_triton.py", "group_norm_rows_triton.py", "_triton.py"),
)
def _triton_run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    shift: Tensor | None = None,
    activation: bool = True,
) -> Tensor:
    return group_norm_silu_triton.run(x, weight, bias, groups, eps, shift, activation)


def _refuse_metal(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    shift: Tensor | None = None,
    activation: bool = True,
) -> str | None:
    if shift is not None:
        return "there is a shift; its kernel adds none"
    if not activation:
        return "it is asked for without SiLU; its kernel always applies it"
    reason = _refuse(x, weight, bias, groups)
    strides = plane_strides(x)
    if reason is None and strides is not None:
        size = x.numel() // (x.shape[0] * x.shape[1])
        if x.numel() >= LIMIT or x.shape[1] // groups * strides[1] + size * strides[2] >= LIMIT:
            return f"x is {tuple(x.shape)} at strides {x.stride()}; it takes fewer than 2^31 elements"
    return reason


@group_norm_silu.implementation(
    "metal",
    device="mps",
    absent=_metal.absent,
    refuse=_refuse_metal,
    sources=("group_norm_silu.metal", "_metal.py", "_metal_launch.py"),
)
def _metal_run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    shift: Tensor | None = None,
    activation: bool = True,
) -> Tensor:
    out = torch.empty_like(x)
    _metal_launch.group_norm_silu(_metal.library("group_norm_silu"), x, weight, bias, groups, eps, out)
    return out
