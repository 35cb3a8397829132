"""Convolution with a packed weight: never a stale one, and no more memory than is stated."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clearway.ops import conv2d as module
from clearway.ops.contract import use
from clearway.ops.conv2d import conv2d, inputs

pytestmark = pytest.mark.skipif(module._absent() is not None, reason=str(module._absent()))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(), use(conv2d="packed"):
        yield


def close(x: torch.Tensor, layer: nn.Conv2d) -> None:
    found = conv2d(x, layer.weight, layer.bias, [1, 1], [1, 1], [1, 1], 1)
    torch.testing.assert_close(found, F.conv2d(x, layer.weight, layer.bias, padding=1), rtol=1e-4, atol=1e-5)


def test_the_formula() -> None:
    x, weight, bias, *rest = inputs(1, 3, 4, 5, 6)
    columns = F.unfold(x.double(), 3, padding=1)
    expected = weight.double().flatten(1) @ columns + bias.double()[:, None]
    found = conv2d(x, weight, bias, *rest)
    torch.testing.assert_close(found.double(), expected.view(1, 4, 5, 6), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["in place", "by data", "another tensor", "one adapter after another"])
def test_a_changed_weight_is_seen(change: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(6, 5, 3, padding=1), torch.randn(2, 6, 7, 8)
    close(x, layer)
    close(x, layer)
    delta = torch.randn_like(layer.weight)
    if change == "in place":
        layer.weight.mul_(2)
    elif change == "by data":
        layer.weight.data += delta  # as adapters are merged: no new version
    elif change == "another tensor":
        layer.weight.data = delta
    else:
        for _ in range(3):
            layer.weight.data += torch.randn_like(delta)
            close(x, layer)
    close(x, layer)


@pytest.mark.parametrize("part", ["channels", "taps", "outputs"])
def test_a_change_by_data_of_a_part_is_seen(part: str) -> None:
    """Shapes of powers of two, where an even sample would read one channel and one tap alone."""
    layer, x = nn.Conv2d(64, 64, 3, padding=1), torch.randn(1, 64, 4, 4)
    close(x, layer)
    where = {"channels": layer.weight.data[:, 32:], "taps": layer.weight.data[:, :, 1:]}
    where.get(part, layer.weight.data[32:]).add_(1.0)
    close(x, layer)


def test_as_many_shapes_are_kept_as_stated_and_nothing_outlives_the_weight() -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1)
    before = len(module._packed)
    for side in range(3, 10):
        close(torch.randn(1, 4, side, side), layer)
    assert len(module._packed) == before + 1
    assert len(module._packed[layer.weight].shapes) == module.KEPT
    module.forget(layer.weight)
    assert len(module._packed) == before
    close(torch.randn(1, 4, 3, 3), layer)
    del layer
    gc.collect()
    assert len(module._packed) == before


def test_layouts_of_x_give_the_same() -> None:
    layer, x = nn.Conv2d(4, 8, 3, padding=1), torch.randn(2, 4, 6, 5)
    for view in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3)):
        close(view, layer)


def test_switched_off_means_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_enabled", lambda: False)
    assert "switched off" in str(module._refuse(*inputs(1, 3, 4, 5, 6)))
