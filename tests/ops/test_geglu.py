"""GEGLU's reference against its formula."""

from __future__ import annotations

import math

import pytest
import torch

from clearway.ops.geglu import geglu


def test_matches_the_formula_in_float64() -> None:
    h = torch.randn(3, 5, 14, dtype=torch.float64) * 3
    a, b = h[..., :7].tolist(), h[..., 7:].tolist()
    expected = [
        [
            [x * y * 0.5 * (1 + math.erf(y / math.sqrt(2))) for x, y in zip(*rows, strict=True)]
            for rows in zip(*m, strict=True)
        ]
        for m in zip(a, b, strict=True)
    ]
    torch.testing.assert_close(geglu(h), torch.tensor(expected, dtype=torch.float64))


def test_limits_of_the_gate() -> None:
    """Open for large gates, shut for very negative ones, linear in the values."""
    a = torch.randn(6, dtype=torch.float64)
    assert torch.equal(geglu(torch.cat((a, torch.full((6,), 50.0, dtype=torch.float64)))), 50 * a)
    assert torch.equal(geglu(torch.cat((a, torch.full((6,), -50.0, dtype=torch.float64)))), a * 0)
    b = torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(geglu(torch.cat((3 * a, b))), 3 * geglu(torch.cat((a, b))))


def test_is_contiguous_and_refuses_odd_widths() -> None:
    assert geglu(torch.randn(4, 8, 6).transpose(1, 2)).is_contiguous()
    with pytest.raises(ValueError, match="must be even"):
        geglu(torch.randn(2, 7))
