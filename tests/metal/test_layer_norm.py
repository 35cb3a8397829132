"""layer_norm.metal, emulated, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from clearway.ops import _metal_launch as launch
from metal.accuracy import DTYPES, MODES, assert_accurate, assert_sound, offset, poisoned_like
from metal.emulator import Library


def rows(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    library: Library,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    summed: bool = False,
) -> None:
    out, total = poisoned_like(x), poisoned_like(x) if summed else None
    launch.layer_norm(library, x, weight, bias, 1e-5, out, residual, total)
    s = x if residual is None else x + residual
    width = x.shape[-1:]
    double = [None if tensor is None else tensor.double() for tensor in (weight, bias)]
    plain = [None if tensor is None else tensor.to(x.dtype) for tensor in (weight, bias)]
    assert_accurate(out, layer_norm(s.double(), width, *double, 1e-5), layer_norm(s, width, *plain, 1e-5))
    if total is not None:
        assert torch.equal(total, s)
    assert_sound(library, {4: out} if total is None else {4: out, 5: total})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [320, 77, 1, 1030])
def test_widths_in_half(emulated: Callable[..., Library], width: int, mode: str) -> None:
    """9 rows: the last threadgroup of 8 simdgroups has one."""
    x = rows(3, 3, width, dtype=torch.float16)
    weight, bias = rows(2, width, dtype=torch.float16, seed=1).unbind()
    check(emulated("layer_norm", **MODES[mode]), x, weight, offset(bias, 0))


@pytest.mark.parametrize("mode", ["in order", "checked"])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("width", [64, 33])
def test_residual(emulated: Callable[..., Library], width: int, summed: bool, mode: str) -> None:
    x, residual = (rows(5, width, dtype=torch.float16, seed=seed) for seed in (0, 1))
    weight = rows(width, dtype=torch.float32, seed=2)
    check(emulated("layer_norm", **MODES[mode]), x, weight, None, residual, summed)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("width", [64, 33])
def test_types(emulated: Callable[..., Library], width: int, dtype: torch.dtype) -> None:
    x, residual = (rows(2, width, dtype=dtype, seed=seed) for seed in (0, 1))
    check(
        emulated("layer_norm"),
        x,
        rows(width, dtype=dtype, seed=2),
        rows(width, dtype=dtype, seed=3),
        residual,
        True,
    )
    if dtype is torch.bfloat16:
        check(emulated("layer_norm"), x, None, rows(width, dtype=torch.float32, seed=3))


@pytest.mark.parametrize("by", [0, 1, 4])
def test_strided_rows(emulated: Callable[..., Library], by: int) -> None:
    """Columns of a wider matrix: rows at a stride, from an offset."""
    wide = rows(6, 48, dtype=torch.float16)
    check(emulated("layer_norm", checked=True), wide[:, by : by + 32])


def test_rows_of_small_variance(emulated: Callable[..., Library]) -> None:
    """Where PyTorch's one-pass variance on MPS went wrong: a deviation of 1e-2 beside a mean of 1e3."""
    x = 1000.0 + rows(4, 256, dtype=torch.float32) * 1e-2
    check(emulated("layer_norm"), x)


def test_what_is_not_finite_stays_in_its_row(emulated: Callable[..., Library]) -> None:
    x = rows(4, 40, dtype=torch.float32)
    x[1, 7], x[2, 0] = float("nan"), float("inf")
    check(emulated("layer_norm"), x)
