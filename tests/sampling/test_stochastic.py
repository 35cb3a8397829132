"""The ancestral split and churn: variances that must add up, and the order of draws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearway.sampling.stochastic import ancestral_step, churn

levels = st.floats(0.01, 100.0)


@given(a=levels, b=levels, eta=st.floats(0.0, 3.0))
def test_the_two_parts_make_the_next_level(a: float, b: float, eta: float) -> None:
    sigma, sigma_next = max(a, b), min(a, b)
    down, up = ancestral_step(sigma, sigma_next, eta)
    assert 0 <= down <= sigma_next * (1 + 1e-12) and 0 <= up <= sigma_next
    assert math.hypot(down, up) == pytest.approx(sigma_next)


@given(sigma=levels, share=st.floats(0.0, 1.0))
def test_limits(sigma: float, share: float) -> None:
    assert ancestral_step(sigma, sigma * share, 0.0) == (sigma * share, 0.0)
    assert ancestral_step(sigma, 0.0) == (0.0, 0.0)
    assert ancestral_step(sigma, sigma) == (sigma, 0.0)


def test_the_split_is_ddpm_s_posterior() -> None:
    """eta 1: the variance of x(next) given x and x0, where x is x(next) with independent noise added."""
    sigma, sigma_next = 3.0, 1.25
    added = sigma**2 - sigma_next**2
    assert ancestral_step(sigma, sigma_next)[1] ** 2 == pytest.approx(1 / (1 / sigma_next**2 + 1 / added))


@pytest.mark.parametrize(
    ("sigma", "s_churn", "ratio"),
    [(2.0, 1.0, 1.1), (2.0, 100.0, math.sqrt(2)), (2.0, 0.0, 1.0), (0.5, 1.0, 1.0), (9.0, 1.0, 1.0)],
)
def test_churn_raises_sigma_within_its_range(sigma: float, s_churn: float, ratio: float) -> None:
    x, drawn = torch.zeros(2, 2), []

    def noise(a: float, b: float) -> torch.Tensor:
        drawn.append((a, b))
        return torch.ones(2, 2)

    out, higher = churn(x, sigma, 10, noise, s_churn=s_churn, s_tmin=1.0, s_tmax=5.0, s_noise=0.5)
    assert higher == pytest.approx(sigma * ratio)
    torch.testing.assert_close(out, torch.full((2, 2), 0.5 * math.sqrt(higher**2 - sigma**2)))
    assert len(drawn) == (
        s_churn > 0
    )  # with churn on, one draw a step even outside the range, as k-diffusion
