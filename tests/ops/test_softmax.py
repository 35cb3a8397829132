"""Softmax's reference against its formula."""

from __future__ import annotations

import torch

from clearway.ops.softmax import softmax


def test_matches_the_formula_in_float64() -> None:
    x = torch.randn(3, 5, 17, dtype=torch.float64) * 4
    powers = (x - x.amax(-1, keepdim=True)).exp()
    torch.testing.assert_close(softmax(x), powers / powers.sum(-1, keepdim=True))


def test_sums_to_one_and_ignores_an_offset() -> None:
    x = torch.randn(4, 1000, dtype=torch.float64)
    torch.testing.assert_close(softmax(x).sum(-1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(softmax(x + 300), softmax(x))


def test_masked_keys_get_nothing() -> None:
    x = torch.tensor([[0.0, -float("inf"), 0.0]])
    assert softmax(x).tolist() == [[0.5, 0.0, 0.5]]
