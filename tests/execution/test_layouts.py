"""Another dtype, shape or order of the same memory is seen in any mode, with torch's own help and without."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from clearway.execution.layouts import Layouts


def tensors() -> list[Any]:
    return [nn.Parameter(torch.ones(4, 4)), torch.ones(3, dtype=torch.float16), torch.ones(2, 2).to_sparse()]


@pytest.fixture(params=[True, False], ids=["torch's", "one by one"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("asked", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_they_hold_until_one_lies_otherwise(asked: Any) -> None:
    given = tensors()
    found = Layouts(given)
    with asked():
        assert found.hold() and found.hold()
        for number, other in (
            (0, given[0].data.t()),
            (1, given[1].view(torch.bfloat16)),
            (0, given[0].data[:2]),
        ):
            before = given[number].data
            given[number].data = other
            assert not found.hold()
            given[number].data = before
            assert found.hold()
        given[0].data.mul_(2)
        given[0].data = torch.zeros(4, 4)  # elsewhere, but alike
        assert found.hold()


def test_what_is_no_layout_is_none() -> None:
    """Whether a gradient is wanted, or nobody counts changes."""
    given = tensors()
    found = Layouts(given)
    for number in range(20):
        given[0].requires_grad_(number % 2 == 0)
        assert found.hold()
    with torch.inference_mode():
        other = torch.ones(4, 4)
    given[0].data = other
    for _ in range(20):
        assert found.hold()
