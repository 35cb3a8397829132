"""One-row linear: the reference against a sum of products."""

from __future__ import annotations

import torch

from clearway.ops.linear_row import inputs, linear_row


def test_matches_the_formula_in_float64() -> None:
    x, weight, bias = (arg.double() for arg in inputs(19, 7, 1))
    torch.testing.assert_close(linear_row(x, weight, bias), (weight * x).sum(1)[None] + bias)
    torch.testing.assert_close(linear_row(x, weight, None), (weight * x).sum(1)[None])


def test_keeps_leading_axes() -> None:
    for leading in ((), (1,), (1, 1)):
        x, weight, bias = inputs(8, 5, *leading)
        assert linear_row(x, weight, bias).shape == (*leading, 5)
