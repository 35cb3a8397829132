"""Convolution without bias: the formula, and where which implementation is preferred."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearway.ops import attention_torch
from clearway.ops.contract import REFERENCE
from clearway.ops.convolution import convolution, inputs


def direct(x: Tensor, weight: Tensor) -> Tensor:
    """Pixel by pixel in float64: y[o, r, s] = sum over taps of weight * x[r + i - 1, s + j - 1]."""
    batch, _, height, width = x.shape
    out = torch.zeros(batch, weight.shape[0], height, width, dtype=torch.float64)
    middle = weight.shape[-1] // 2
    for row in range(height):
        for column in range(width):
            for i in range(weight.shape[2]):
                for j in range(weight.shape[3]):
                    r, s = row + i - middle, column + j - middle
                    if 0 <= r < height and 0 <= s < width:
                        out[:, :, row, column] += x[:, :, r, s].double() @ weight[:, :, i, j].double().T
    return out


@pytest.mark.parametrize("side", [1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_matches_the_formula(side: int, last: bool) -> None:
    x, weight = (arg.double() for arg in inputs(2, 3, 4, 3, 5, side=side, last=last))
    y = convolution(x, weight)
    torch.testing.assert_close(y, direct(x, weight))
    assert y.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (10, 0), None])
def test_off_the_gpu_it_is_pytorchs(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_torch, "capability", lambda tensor: capability)
    x, weight = (arg.half() for arg in inputs(1, 64, 160, 8, 8))
    assert convolution.defaults["cuda"](x, weight) == REFERENCE
    assert convolution.route(x, weight).name == REFERENCE
