"""group_norm_silu.metal, emulated, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import group_norm, silu

from clearway.ops import _metal_launch as launch
from metal.accuracy import DTYPES, MODES, assert_accurate, assert_sound, offset, poisoned_like
from metal.emulator import Library


def parameters(channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(channels)
    weight, bias = torch.randn(2, channels, generator=generator).to(dtype).unbind()
    return weight.clone(), bias.clone()


def images(*shape: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 2 + mean).to(dtype)


def check(
    library: Library, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float = 1e-5
) -> None:
    out = poisoned_like(x)
    launch.group_norm_silu(library, x, weight, bias, groups, eps, out)
    double = [None if tensor is None else tensor.double() for tensor in (weight, bias)]
    exact = silu(group_norm(x.double(), groups, *double, eps))
    plain = [None if tensor is None else tensor.to(x.dtype) for tensor in (weight, bias)]
    assert_accurate(out, exact, silu(group_norm(x, groups, *plain, eps)))
    assert_sound(library, {3: out})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize(
    "shape, groups",
    [((2, 320, 4, 4), 32), ((1, 96, 7, 9), 3), ((1, 35, 5, 5), 7), ((1, 8, 20, 16), 2)],
    ids=["sd15", "ragged", "five channels a group", "four at a time"],
)
def test_shapes_in_half(
    emulated: Callable[..., Library], shape: tuple[int, ...], groups: int, last: bool, mode: str
) -> None:
    x = images(*shape, dtype=torch.float16)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = parameters(shape[1], x.dtype)
    check(emulated("group_norm_silu", **MODES[mode]), x, weight, bias, groups)


@pytest.mark.parametrize("mode", ["in order", "checked"])
@pytest.mark.parametrize(
    "dtype, parameter", [*((d, d) for d in DTYPES[1:]), *((d, DTYPES[2]) for d in DTYPES[:2])]
)
def test_types(
    emulated: Callable[..., Library], dtype: torch.dtype, parameter: torch.dtype, mode: str
) -> None:
    """Parameters in float32 beside half inputs are read as what they are."""
    for shape in ((1, 12, 5, 3), (1, 12, 4, 3)):
        weight, bias = parameters(12, parameter)
        check(emulated("group_norm_silu", **MODES[mode]), images(*shape, dtype=dtype), weight, bias, 3)


@pytest.mark.parametrize("given", ["neither", "weight", "bias"])
def test_parameters_are_optional(emulated: Callable[..., Library], given: str) -> None:
    weight, bias = parameters(12, torch.float32)
    check(
        emulated("group_norm_silu", checked=True),
        images(2, 12, 3, 3, dtype=torch.float16),
        weight if given == "weight" else None,
        bias if given == "bias" else None,
        4,
    )


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("first, by", [(0, 0), (8, 0), (3, 0), (0, 1), (0, 4)])
def test_views(emulated: Callable[..., Library], first: int, by: int, last: bool) -> None:
    """Slices of channels and storage that begins late: strides and offsets of their own."""
    x = offset(images(2, 24, 6, 4, dtype=torch.float16), by)
    if last:
        x = x.to(memory_format=torch.channels_last)
    weight, bias = parameters(16, x.dtype)
    check(emulated("group_norm_silu", checked=True), x[:, first : first + 16], weight, offset(bias, by), 4)


def test_any_axes_after_the_channels(emulated: Callable[..., Library]) -> None:
    for shape in ((2, 6, 17), (1, 6, 2, 3, 4), (3, 6)):
        x = images(*shape, dtype=torch.float32)
        if x.numel() // 6 // shape[0] * 3 > 1:
            check(emulated("group_norm_silu"), x, *parameters(6, x.dtype), 2)


def test_a_mean_far_from_zero(emulated: Callable[..., Library]) -> None:
    """E[x^2] - E[x]^2 in float32 would leave nothing of a standard deviation of 0.01 beside a mean of 100."""
    x = images(1, 8, 16, 16, dtype=torch.float32) * 0.005 + 100.0
    check(emulated("group_norm_silu"), x, None, None, 2)


def test_a_plane_goes_on_when_another_is_not_finite(emulated: Callable[..., Library]) -> None:
    for value in (float("nan"), float("inf")):
        x = images(2, 8, 5, 5, dtype=torch.float32)
        x[1, 3, 2, 2] = value
        check(emulated("group_norm_silu"), x, *parameters(8, x.dtype), 4)


def test_invariance_to_scale_and_shift(emulated: Callable[..., Library]) -> None:
    """With eps = 0 the norm of a x + b is that of x, for a > 0."""
    x = images(1, 8, 6, 6, dtype=torch.float32)
    one, two = poisoned_like(x), poisoned_like(x)
    launch.group_norm_silu(emulated("group_norm_silu"), x, None, None, 2, 0.0, one)
    launch.group_norm_silu(emulated("group_norm_silu"), 4 * x + 2, None, None, 2, 0.0, two)
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
