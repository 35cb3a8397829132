"""Heun against the trapezoid rule in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from clearway.sampling import sample, schedule


@pytest.mark.parametrize("s_churn", [0.0, 5.0])
def test_heun_averages_the_slopes_at_both_ends(table, toy, start, s_churn: float) -> None:
    sigmas = schedule("Karras", 7, table)
    drawn = [
        torch.randn(1, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i in range(7)
    ]
    x = start.double() * 14
    expected, levels = x, sigmas.double().tolist()
    for step, (sigma, sigma_next) in enumerate(pairwise(levels)):
        hat = sigma * (1 + min(s_churn / 7, 2**0.5 - 1))
        expected = expected + drawn[step] * (hat**2 - sigma**2) ** 0.5
        slope = (expected - toy(expected, hat)) / hat
        ahead = expected + slope * (sigma_next - hat)
        if sigma_next > 0:
            slope = (slope + (ahead - toy(ahead, sigma_next)) / sigma_next) / 2
        expected = expected + slope * (sigma_next - hat)
    queue = iter(drawn)
    out = sample("Heun", toy, x, sigmas, noise=lambda a, b: next(queue), s_churn=s_churn)
    torch.testing.assert_close(out, expected)


def test_the_last_step_to_zero_takes_one_call(table, start) -> None:
    calls = []
    denoise = lambda x, sigma: calls.append(sigma) or x / 2  # noqa: E731
    sample("Heun", denoise, start, schedule("Karras", 4, table), noise=lambda a, b: start)
    assert len(calls) == 7
