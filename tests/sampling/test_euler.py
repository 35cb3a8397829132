"""Euler and Euler a against a plain reading of their papers in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from clearway.sampling import sample, schedule


def queue(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda sigma, sigma_next: torch.randn(1, 4, 8, 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    "options", [{}, {"s_churn": 6.0}, {"s_churn": 3.0, "s_tmin": 0.1, "s_tmax": 9.0, "s_noise": 1.1}]
)
def test_euler_is_the_derivative_form(table, toy, start, options: dict[str, float]) -> None:
    sigmas = schedule("Karras", 8, table)
    given = {"s_churn": 0.0, "s_tmin": 0.0, "s_tmax": math.inf, "s_noise": 1.0} | options
    noise, x = queue(1), start.double() * 14
    expected, levels = x, sigmas.double().tolist()
    for sigma, sigma_next in pairwise(levels):
        drawn = noise(0, 0)
        inside = given["s_tmin"] <= sigma <= given["s_tmax"]
        hat = sigma * (1 + min(given["s_churn"] / 8, 2**0.5 - 1) * inside)
        expected = expected + drawn * given["s_noise"] * (hat**2 - sigma**2) ** 0.5
        expected = expected + (expected - toy(expected, hat)) / hat * (sigma_next - hat)
    torch.testing.assert_close(sample("Euler", toy, x, sigmas, noise=queue(1), **options), expected)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_euler_a_is_a_step_down_and_noise(table, toy, start, eta: float) -> None:
    sigmas = schedule("Exponential", 8, table)
    noise, x = queue(2), start.double() * 14
    expected, levels = x, sigmas.double().tolist()
    for sigma, sigma_next in pairwise(levels):
        up = eta * sigma_next * (1 - (sigma_next / sigma) ** 2) ** 0.5
        down = (sigma_next**2 - up**2) ** 0.5
        expected = expected + (expected - toy(expected, sigma)) / sigma * (down - sigma)
        if sigma_next > 0:
            expected = expected + noise(0, 0) * up * 0.9
    out = sample("Euler a", toy, x, sigmas, noise=queue(2), eta=eta, s_noise=0.9)
    torch.testing.assert_close(out, expected)


def test_euler_a_without_eta_is_euler_and_draws_nothing(table, toy, start, no_noise) -> None:
    sigmas = schedule("Uniform", 6, table)
    plain = sample("Euler", toy, start * 14, sigmas, noise=no_noise)
    assert torch.equal(sample("Euler a", toy, start * 14, sigmas, noise=no_noise, eta=0.0), plain)
