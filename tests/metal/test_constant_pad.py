"""constant_pad.metal, emulated: a copy, so exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad as torch_pad

from clearway.ops import _metal_launch as launch
from metal.accuracy import DTYPES, MODES, assert_sound, poisoned_like
from metal.emulator import Library


def check(library: Library, x: Tensor, pad: tuple[int, ...], value: float = 0.25) -> None:
    expected = torch_pad(x, pad, value=value)
    out = poisoned_like(expected)
    launch.constant_pad(library, x, pad, value, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert_sound(library, {1: out})


def numbers(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "shape, pad",
    [
        ((1, 2, 5, 7), (0, 1, 0, 1)),
        ((2, 3, 4, 3, 5), (1, 2, 3, 0, 0, 1)),
        ((2, 2, 2, 2, 2), (1, 0, 0, 1, 2, 0, 0, 2, 1, 1)),
        ((300,), (3, 4)),
        ((4, 6), (-1, 2, 3, -2)),
        ((2, 3), (0, 0)),
    ],
    ids=["downsampler", "rank 5", "every axis", "wider than a group", "cuts", "nothing"],
)
def test_shapes(
    emulated: Callable[..., Library], shape: tuple[int, ...], pad: tuple[int, ...], mode: str
) -> None:
    check(emulated("constant_pad", **MODES[mode]), numbers(*shape), pad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 0.1, -float("inf"), float("nan")])
def test_types_and_values(emulated: Callable[..., Library], dtype: torch.dtype, value: float) -> None:
    check(emulated("constant_pad"), numbers(2, 3, dtype=dtype), (1, 1), value)


def test_layouts(emulated: Callable[..., Library]) -> None:
    x = numbers(2, 3, 4, 5)
    check(
        emulated("constant_pad", checked=True), x.contiguous(memory_format=torch.channels_last), (1, 1, 1, 1)
    )
    check(emulated("constant_pad", checked=True), x.transpose(1, 3)[:, 1:, :, ::2], (1, 0))
    check(emulated("constant_pad", checked=True), x[:1].expand(3, 3, 4, 5), (0, 1))


def test_nothing_of_the_input_may_be_left(emulated: Callable[..., Library]) -> None:
    check(emulated("constant_pad"), numbers(2, 3), (-3, 4))


def test_more_axes_than_five_are_refused(emulated: Callable[..., Library]) -> None:
    with pytest.raises(ValueError, match="up to 5"):
        launch.constant_pad(emulated("constant_pad"), numbers(*(1,) * 6), (1, 1), 0.0, numbers(*(1,) * 5, 3))
