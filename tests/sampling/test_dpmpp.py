"""DPM-Solver++ against the papers' update in lambda = -log(sigma), float64, and its special cases."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from clearway.sampling import brownian_noise, sample, schedule


def test_2m_is_the_multistep_update(table, toy, start, no_noise) -> None:
    sigmas = schedule("Karras", 9, table)
    x = start.double() * 14
    expected, levels, old, h_last = x, sigmas.double().tolist(), None, 0.0
    for sigma, sigma_next in pairwise(levels):
        denoised = toy(expected, sigma)
        if sigma_next == 0:
            expected = denoised
            break
        h = math.log(sigma) - math.log(sigma_next)
        r = h_last / h
        d = denoised if old is None else (1 + 1 / (2 * r)) * denoised - old / (2 * r)
        expected = sigma_next / sigma * expected - math.expm1(-h) * d
        old, h_last = denoised, h
    torch.testing.assert_close(sample("DPM++ 2M", toy, x, sigmas, noise=no_noise), expected)


def test_2m_of_one_step_is_euler(table, toy, start, no_noise) -> None:
    for sigmas in (schedule("Karras", 1, table), torch.tensor([14.0, 3.0])):
        runs = [sample(name, toy, start * 14, sigmas, noise=no_noise) for name in ("DPM++ 2M", "Euler")]
        assert torch.equal(*runs)


@pytest.mark.parametrize("options", [{}, {"eta": 0.0}, {"eta": 0.5, "s_noise": 0.9}, {"r": 0.3}, {"r": 1.0}])
def test_sde_is_two_ancestral_half_steps(table, toy, start, options: dict[str, float]) -> None:
    given = {"eta": 1.0, "s_noise": 1.0, "r": 0.5} | options
    sigmas = schedule("Exponential", 6, table)
    x = start.double() * 14
    noise = brownian_noise(x, sigmas, [9])

    def part(base, mean, sigma: float, target: float):
        up = given["eta"] * target * (1 - (target / sigma) ** 2) ** 0.5
        down = (target**2 - up**2) ** 0.5
        moved = down / sigma * base - math.expm1(math.log(down / sigma)) * mean
        return moved + noise(sigma, target) * given["s_noise"] * up

    expected, levels = x, sigmas.double().tolist()
    for sigma, sigma_next in pairwise(levels):
        denoised = toy(expected, sigma)
        if sigma_next == 0:
            expected = denoised
            break
        middle = sigma ** (1 - given["r"]) * sigma_next ** given["r"]
        second = toy(part(expected, denoised, sigma, middle), middle)
        share = 1 / (2 * given["r"])
        expected = part(expected, (1 - share) * denoised + share * second, sigma, sigma_next)
    out = sample("DPM++ SDE", toy, x, sigmas, noise=noise, **options)
    # Not closer: queries are rounded to float32 as in k-diffusion, and paths move by 1e-3 over 1e-6 in sigma.
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_sde_asks_for_overlapping_noise_and_calls_twice_but_for_the_last_step(table, start) -> None:
    sigmas, calls, asked = schedule("Karras", 5, table), [], []

    def denoise(x: torch.Tensor, sigma: float) -> torch.Tensor:
        calls.append(sigma)
        return x / 2

    def noise(sigma: float, sigma_next: float) -> torch.Tensor:
        asked.append((sigma, sigma_next))
        return torch.zeros_like(start)

    sample("DPM++ SDE", denoise, start, sigmas, noise=noise)
    assert len(calls) == 9 and len(asked) == 8
    for step in range(4):
        (start_1, middle), (start_2, end) = asked[2 * step : 2 * step + 2]
        assert start_1 == start_2 == pytest.approx(float(sigmas[step]), rel=1e-6)
        assert end == pytest.approx(float(sigmas[step + 1]), rel=1e-6)
        assert middle == calls[2 * step + 1] == pytest.approx(math.sqrt(start_1 * end), rel=1e-6)


def test_sde_without_eta_draws_nothing(table, toy, start, no_noise) -> None:
    sample("DPM++ SDE", toy, start, schedule("Karras", 5, table), noise=no_noise, eta=0.0)
