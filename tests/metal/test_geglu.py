"""geglu.metal, emulated, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from clearway.ops import _metal_launch as launch
from metal.accuracy import DTYPES, MODES, assert_accurate, assert_sound, poisoned
from metal.emulator import Library


def check(library: Library, x: Tensor) -> None:
    value, gate = x.chunk(2, -1)
    out = poisoned(*value.shape, dtype=x.dtype)
    launch.geglu(library, x, out)
    assert_accurate(out, value.double() * gelu(gate.double()), value * gelu(gate))
    assert_sound(library, {1: out})


def rows(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1280, 75])
def test_widths(emulated: Callable[..., Library], width: int, dtype: torch.dtype, mode: str) -> None:
    check(emulated("geglu", **MODES[mode]), rows(2, 3, 2 * width, dtype=dtype))


@pytest.mark.parametrize("by", [0, 2])
def test_strided_rows(emulated: Callable[..., Library], by: int) -> None:
    check(emulated("geglu", checked=True), rows(4, 48, dtype=torch.float16)[:, by : by + 40])


def test_gelu_over_its_whole_range(emulated: Callable[..., Library]) -> None:
    """In float32, finely: the fit of erf, its tail, and where it underflows."""
    gate = torch.linspace(-14, 14, 20001)
    out = poisoned(20001, 1, dtype=torch.float32)
    launch.geglu(emulated("geglu"), torch.stack([torch.ones_like(gate), gate], 1), out)
    exact = gelu(gate.double())
    assert (out[:, 0].double() - exact).abs().max().item() <= 5e-7
    middle = gate.abs() < 5
    relative = (out[:, 0].double() / exact - 1).abs()[middle & (gate != 0)].max().item()
    assert relative <= 3e-6


def test_what_is_not_finite(emulated: Callable[..., Library]) -> None:
    odd = [float("nan"), float("inf"), -float("inf"), 1.0, 0.0]
    x = torch.tensor([[value, gate] for value in odd for gate in odd])
    check(emulated("geglu"), x)
