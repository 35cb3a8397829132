"""Upsampling with its convolution: against the formula, its phases, and which pixels are read."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from clearway.ops.contract import use
from clearway.ops.upsample_conv import inputs, phases_of, upsample_conv


def direct(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Pixel by pixel in float64: y[o, r, s] = bias + sum over taps of weight * x[(r + i - 1) // 2, …]."""
    batch, _, height, width = x.shape
    out = bias.double().reshape(1, -1, 1, 1).repeat(batch, 1, 2 * height, 2 * width)
    for row in range(2 * height):
        for column in range(2 * width):
            for i in range(3):
                for j in range(3):
                    r, s = row + i - 1, column + j - 1
                    if 0 <= r < 2 * height and 0 <= s < 2 * width:
                        taps = weight[:, :, i, j].double()
                        out[:, :, row, column] += x[:, :, r // 2, s // 2].double() @ taps.T
    return out


@pytest.mark.parametrize("name", ["reference", "phases"])
@pytest.mark.parametrize("last", [False, True])
def test_matches_the_formula(name: str, last: bool) -> None:
    x, weight, bias = (arg.double() for arg in inputs(2, 3, 4, 3, 5, last=last))
    with use(upsample_conv=name):
        torch.testing.assert_close(upsample_conv(x, weight, bias), direct(x, weight, bias))


def test_a_constant_image_sees_all_taps_away_from_the_border() -> None:
    weight = torch.randn(2, 3, 3, 3, dtype=torch.float64)
    with use(upsample_conv="phases"):
        y = upsample_conv(torch.ones(1, 3, 4, 4, dtype=torch.float64), weight)
    torch.testing.assert_close(y[0, :, 1:-1, 1:-1], weight.sum((1, 2, 3))[:, None, None].expand(2, 6, 6))


def test_phases_keep_the_sum_of_the_taps_and_the_layout() -> None:
    weight = torch.randn(4, 5, 3, 3, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    made = phases_of(weight)
    assert made.shape == (16, 5, 2, 2) and made.is_contiguous(memory_format=torch.channels_last)
    for phase in made.split(4):
        torch.testing.assert_close(phase.sum((2, 3)), weight.sum((2, 3)))


def test_gradients_of_phases() -> None:
    args = [arg.double().requires_grad_() for arg in inputs(1, 2, 2, 3, 2)]

    def run(*given: torch.Tensor) -> torch.Tensor:
        with use(upsample_conv="phases"):
            return upsample_conv(*given)

    assert torch.autograd.gradcheck(run, args)


def test_half_precision_is_no_further_off_than_upsampling_first() -> None:
    x, weight, bias = (arg.bfloat16() for arg in inputs(1, 64, 64, 8, 8))
    exact = F.conv2d(F.interpolate(x.double(), scale_factor=2.0), weight.double(), bias.double(), padding=1)
    with use(upsample_conv="phases"):
        found = (upsample_conv(x, weight, bias).double() - exact).norm()
    with use(upsample_conv="reference"):
        first = (upsample_conv(x, weight, bias).double() - exact).norm()
    assert found < 2 * first


def test_kept_phases_give_the_same_bits() -> None:
    x, weight, bias = inputs(1, 6, 5, 4, 4)
    with use(upsample_conv="phases"):
        assert torch.equal(upsample_conv(x, weight, bias), upsample_conv(x, weight, bias, phases_of(weight)))
