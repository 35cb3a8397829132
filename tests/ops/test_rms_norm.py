"""RMSNorm's reference against its formula."""

from __future__ import annotations

import torch

from clearway.ops.rms_norm import inputs, rms_norm


def test_matches_the_formula_in_float64() -> None:
    x, weight, eps = inputs(3, 5, 24)
    x, weight = x.double(), weight.double()
    expected = weight * x / ((x**2).mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, eps), expected)
    torch.testing.assert_close(rms_norm(x, None, eps), expected / weight)


def test_is_blind_to_scale_and_odd() -> None:
    x = torch.randn(4, 64, dtype=torch.float64)
    torch.testing.assert_close(rms_norm(7 * x, None, 0.0), rms_norm(x, None, 0.0))
    assert torch.equal(rms_norm(-x, None, 1e-6), -rms_norm(x, None, 1e-6))


def test_squares_of_half_precision_do_not_overflow() -> None:
    x = torch.full((2, 64), 1000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, None, 1e-6), torch.ones(2, 64, dtype=torch.float16))
