"""softmax.metal, emulated, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearway.ops import _metal_launch as launch
from metal.accuracy import DTYPES, MODES, assert_accurate, assert_sound, poisoned, poisoned_like
from metal.emulator import Library


def rows(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)


def check(library: Library, x: Tensor) -> None:
    out = poisoned(*x.shape, dtype=x.dtype)
    launch.softmax(library, x, out)
    assert_accurate(out, x.double().softmax(-1), x.softmax(-1))
    assert_sound(library, {1: out})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [77, 4096, 1023, 1, 300])
def test_widths_in_half(emulated: Callable[..., Library], width: int, mode: str) -> None:
    check(emulated("softmax", **MODES[mode]), rows(2, 3, width, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("width", [64, 601])
def test_types(emulated: Callable[..., Library], width: int, dtype: torch.dtype) -> None:
    check(emulated("softmax", checked=True), rows(3, width, dtype=dtype))


@pytest.mark.parametrize("by", [0, 1, 4])
def test_strided_rows(emulated: Callable[..., Library], by: int) -> None:
    check(emulated("softmax", checked=True), rows(5, 400, dtype=torch.float16)[:, by : by + 320])


@pytest.mark.parametrize("nan_wins", [False, True], ids=["max ignores NaN", "max keeps NaN"])
@pytest.mark.parametrize("width", [40, 1001])
def test_what_is_not_finite(emulated: Callable[..., Library], width: int, nan_wins: bool) -> None:
    """A row with NaN or +inf, rows of -inf in part (a mask) and all, and an untouched one."""
    x = rows(6, width, dtype=torch.float32)
    x[0, 0], x[1, width - 1], x[2, 3] = float("nan"), float("nan"), float("inf")
    x[3, : width - 2] = -float("inf")
    x[4] = -float("inf")
    check(emulated("softmax", defines=["MSL_NAN_WINS"] if nan_wins else []), x)


def test_shift_invariance(emulated: Callable[..., Library]) -> None:
    """softmax(x + c) is softmax(x): with whole numbers exactly, up to values whose exponentials overflow."""
    x = rows(3, 500, dtype=torch.float32).round()
    plain, shifted = poisoned_like(x), poisoned_like(x)
    launch.softmax(emulated("softmax"), x, plain)
    launch.softmax(emulated("softmax"), x + 4096, shifted)
    assert torch.equal(plain, shifted)
