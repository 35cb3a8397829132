"""A change of a weight is noticed however it is made."""

from typing import Any

import pytest
import torch
from torch import nn

from clearway.execution.unchanged import Unchanged, refuse


def in_place(weight: Any) -> None:
    with torch.no_grad():
        weight.add_(1)


def in_inference(weight: Any) -> None:
    with torch.inference_mode():
        weight.mul_(2)


def one_element(weight: Any) -> None:
    with torch.no_grad():
        weight.view(-1)[3] = 9


def through_data(weight: Any) -> None:
    weight.data += torch.ones_like(weight.data)


def through_numpy(weight: Any) -> None:
    weight.detach().numpy()[...] = 3


@pytest.mark.parametrize("change", [in_place, in_inference, one_element, through_data, through_numpy])
def test_a_change_is_noticed(change: Any) -> None:
    weights = [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(7))]
    guard = Unchanged(weights)
    assert guard.holds() and guard.holds()
    change(weights[0])
    assert not guard.holds()
    assert Unchanged(weights).holds()


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(3, 4, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(6, 8)[:, ::2],
        torch.tensor(2.0),
        torch.randn(20, dtype=torch.bfloat16),
        torch.arange(30),
        torch.full((9,), torch.nan),
        torch.randn(5, 1, 1)[2:],
        torch.empty(0),
    ],
)
def test_every_layout_and_dtype_holds_until_it_changes(weight: torch.Tensor) -> None:
    guard = Unchanged([weight])
    assert guard.holds()
    weight.data.copy_(torch.ones_like(weight) * 7)
    assert guard.holds() == (weight.numel() == 0)


def test_weights_without_a_version_are_refused() -> None:
    with torch.inference_mode():
        weight = torch.randn(3)
    assert "inference_mode" in str(refuse([weight]))
    assert refuse([torch.randn(3)]) is None
