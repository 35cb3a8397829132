"""linear_row.metal, emulated, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from clearway.ops import _metal_launch as launch
from metal.accuracy import DTYPES, MODES, assert_accurate, assert_sound, offset, poisoned
from metal.emulator import Library


def operands(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(inputs)
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )


def check(library: Library, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    out = poisoned(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    launch.linear_row(library, x, weight, bias, out)
    double = None if bias is None else bias.double()
    assert_accurate(out, linear(x.double(), weight.double(), double), linear(x, weight, bias))
    assert_sound(library, {3: out})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows, inputs, outputs", [(1, 320, 40), (2, 75, 9), (1, 1, 1), (1, 1280, 20)])
def test_sizes_in_half(
    emulated: Callable[..., Library], rows: int, inputs: int, outputs: int, mode: str
) -> None:
    check(emulated("linear_row", **MODES[mode]), *operands(rows, inputs, outputs, torch.float16))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("inputs", [64, 33])
def test_types(emulated: Callable[..., Library], inputs: int, dtype: torch.dtype) -> None:
    check(emulated("linear_row", checked=True), *operands(1, inputs, 10, dtype))


def test_without_bias(emulated: Callable[..., Library]) -> None:
    x, weight, _ = operands(1, 64, 10, torch.float16)
    check(emulated("linear_row", checked=True), x, weight, None)


@pytest.mark.parametrize("by", [0, 1, 4])
def test_views(emulated: Callable[..., Library], by: int) -> None:
    """Some columns of a wider weight, everything from an offset, and an axis of 1 more."""
    x, weight, bias = operands(1, 40, 12, torch.float16)
    x = offset(x[:, :32].contiguous(), by)[None]
    check(emulated("linear_row", checked=True), x, weight[:, by : by + 32], offset(bias, by))


def test_what_is_not_finite(emulated: Callable[..., Library]) -> None:
    x, weight, bias = operands(1, 40, 6, torch.float32)
    weight[1, 3], weight[2, 0], bias[3] = float("nan"), float("inf"), -float("inf")
    check(emulated("linear_row"), x, weight, bias)
