"""Linear layers of one input at once: against each alone, and the table that says where weights lie."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from clearway.ops import grouped_linear as module
from clearway.ops.grouped_linear import COLUMNS, grouped_linear, inputs, sizes


def test_products_follow_each_other() -> None:
    x, weights = inputs(24, (8, 40, 3), 2, 5)
    flat = grouped_linear(x, weights)
    parts = torch.split(flat, sizes(x, weights))
    for part, weight in zip(parts, weights, strict=True):
        assert torch.equal(part.view(2, 5, -1), F.linear(x, weight))
    assert flat.shape == (10 * 51,)


def test_the_table_names_each_tile_of_each_weight_once() -> None:
    _, weights = inputs(16, (COLUMNS + 8, 8, 2 * COLUMNS), 3)
    table = module._table(weights).tolist()
    tiles = {}
    for address, before, first, columns in table:
        tiles.setdefault((address, before, columns), []).append(first)
    before = 0
    for weight in weights:
        expected = list(range(0, len(weight), COLUMNS))
        assert tiles.pop((weight.data_ptr(), before, len(weight))) == expected
        before += len(weight)
    assert not tiles


def test_tables_are_kept_by_where_weights_lie_and_are_not_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_tables", type(module._tables)())
    monkeypatch.setattr(module, "TABLES", 2)
    several = [inputs(16, (8,), 1)[1] for _ in range(3)]
    first = module._table(several[0])
    assert module._table(several[0]) is first
    weight = several[0][0]
    weight.data = weight.clone()
    moved = module._table(several[0])
    assert moved is not first
    assert moved[0, 0] == weight.data_ptr()
    module._table(several[1])
    assert module._table(several[0]) is moved
    module._table(several[2])  # in place of the one unused for longest
    assert module._table(several[0]) is moved
    assert len(module._tables) == 2


def test_gradients_pass_through_it() -> None:
    x, weights = inputs(16, (8, 24), 4)
    for one in (x, *weights):
        one.requires_grad_()
    grouped_linear(x, weights).square().sum().backward()
    expected = sum(F.linear(x, weight).square().sum() for weight in weights)
    for one, grad in zip((x, *weights), torch.autograd.grad(expected, (x, *weights)), strict=True):
        torch.testing.assert_close(one.grad, grad)
