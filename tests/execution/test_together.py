"""Products of one input are made together: the values that each would have alone, in one piece of memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.execution import together
from clearway.execution.kept import Frame, Kept, within
from clearway.ops import contract
from clearway.ops.grouped_linear import inputs


class Projections:
    """Keys and values of one input by layers of these widths; counts how often one computed its own."""

    def __init__(self, width: int, outputs: list[int], *leading: int) -> None:
        self.source, weights = inputs(width, [count for count in outputs for _ in range(2)], *leading)
        self.layers = list(zip(weights[::2], weights[1::2], strict=True))
        self.kepts = [Kept() for _ in self.layers]
        self.calls = 0

    def all(self, products: bool = True) -> list[Tensor]:
        found: list[Tensor] = []
        for kept, layer in zip(self.kepts, self.layers, strict=True):

            def compute(layer: tuple[Tensor, Tensor] = layer) -> tuple[Tensor, Tensor]:
                self.calls += 1
                return F.linear(self.source, layer[0]), F.linear(self.source, layer[1])

            found += kept.get(self.source, layer, compute, False, products)
        return found


def gathered(given: Projections, products: bool = True) -> tuple[Frame, list[Tensor], int]:
    """A frame as a capture leaves it, the values that a graph would read, and how many groups there are."""
    frame = Frame((given.source,))
    with within(frame):
        given.all(products)
        count = frame.gather()
        return frame, given.all(products), count


def right(given: Projections) -> list[Tensor]:
    return [F.linear(given.source.double(), weight.double()) for layer in given.layers for weight in layer]


def assert_right(found: list[Tensor], given: Projections) -> None:
    for one, exact in zip(found, right(given), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)


def test_they_are_what_each_is_alone_for_every_input() -> None:
    given = Projections(24, [8, 16, 40], 2, 5)
    frame, values, count = gathered(given)
    assert (count, len({value.untyped_storage().data_ptr() for value in values})) == (1, 1)
    assert_right(values, given)
    assert all(value.is_contiguous() for value in values)
    calls, routes = given.calls, dict[str, int]()
    for seed in (1, 2):
        given.source.copy_(inputs(24, (8,), 2, 5)[0] * seed)
        with contract.recording(routes):
            assert frame.refresh([given.source]) == 3
        assert_right(values, given)
    assert (given.calls, routes) == (calls, {"grouped_linear/reference": 2})


def test_a_weight_that_changes_is_seen_by_all_of_its_group() -> None:
    given = Projections(16, [8, 8, 24], 1, 7)
    frame, values, _ = gathered(given)
    assert frame.refresh() == 0
    given.layers[1][0].add_(1)
    assert (frame.refresh(), frame.refresh()) == (1, 0)
    assert_right(values, given)
    given.layers[2][1].data = given.layers[2][1] * 2
    assert (frame.refresh(), frame.refresh()) == (1, 0)
    assert_right(values, given)
    given.kepts[0].forget()
    assert (frame.refresh(), frame.refresh()) == (1, 0)


def test_what_is_no_product_stays_alone() -> None:
    given = Projections(16, [8, 8], 1, 7)
    frame, values, count = gathered(given, products=False)
    assert count == 0
    calls = given.calls
    assert frame.refresh([given.source]) == 2
    assert given.calls == calls + 2
    assert_right(values, given)


def test_one_layer_stays_as_it_is() -> None:
    assert gathered(Projections(16, [8], 1, 7))[2] == 0


@pytest.mark.parametrize("change", ("shape", "dtype", "count", "strides"))
def test_values_that_cannot_be_the_products_are_not_taken_together(change: str) -> None:
    source, weights = inputs(16, (8, 8), 1, 7)
    values = [F.linear(source, weight) for weight in weights]
    other = {
        "shape": values[1][:, :3],
        "dtype": values[1].double(),
        "strides": values[1].mT.contiguous().mT,
    }
    if change == "count":
        given = [("one", weights, values), ("other", weights, values[:1])]
    else:
        given = [("one", weights, values), ("other", weights, [values[0], other[change]])]
    assert together.groups(source, given) == ([], {})


def test_a_group_has_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Projections(16, [8] * 5, 1, 7)
    monkeypatch.setattr(together, "LIMIT_BYTES", 2 * 2 * 7 * 8 * 4)  # two layers of two products
    frame, values, count = gathered(given)
    assert count == 2  # the fifth stays alone
    given.source.mul_(3)
    assert frame.refresh([given.source]) == 5
    assert_right(values, given)


def test_what_fails_half_way_is_made_anew_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Projections(16, [8, 8], 1, 7)
    frame, values, _ = gathered(given)
    frame.refresh()
    make = together.Together.make

    def fails(group: together.Together) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(together.Together, "make", fails)
    given.layers[0][0].add_(1)
    with pytest.raises(RuntimeError, match="no"):
        frame.refresh()
    monkeypatch.setattr(together.Together, "make", make)
    assert frame.refresh() == 1
    assert_right(values, given)


def test_what_is_gathered_again_stays_in_its_group() -> None:
    given = Projections(16, [8, 8], 1, 7)
    frame, values, count = gathered(given)
    assert frame.gather() == count == 1
    given.source.mul_(2)
    frame.refresh([given.source])
    assert_right(values, given)
