"""DDIM against the published update in scaled (variance-preserving) space, float64."""

from __future__ import annotations

import pytest
import torch

from clearway.sampling import finish, initial_scale, sample, sigmas_for


@pytest.mark.parametrize("steps", [1, 4, 20, 28])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_in_scaled_space_it_is_the_paper_s_ddim(alphas_cumprod, table, start, steps: int, eta: float) -> None:
    sigmas = sigmas_for("DDIM", None, steps, table).double()
    drawn = [
        torch.randn(1, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i in range(40)
    ]

    def predicted_noise(scaled: torch.Tensor, alpha: float) -> torch.Tensor:
        return torch.sin(scaled) * (1 - alpha) + 0.3 * scaled

    # The paper's eq. 12 over A1111's timesteps.
    timesteps = [1, 999] if steps == 1 else [min(t + 1, 999) for t in range(0, 1000, 1000 // steps)]
    expected = start.double()
    for call, index in enumerate(range(len(timesteps) - 1, 0, -1)):
        now, after = (float(alphas_cumprod[timesteps[at]]) for at in (index, index - 1))
        spread = eta * ((1 - after) / (1 - now) * (1 - now / after)) ** 0.5
        e = predicted_noise(expected, now)
        x0 = (expected - (1 - now) ** 0.5 * e) / now**0.5
        expected = after**0.5 * x0 + (1 - after - spread**2) ** 0.5 * e + spread * drawn[call]

    def denoise(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return x - sigma * predicted_noise(x / (1 + sigma**2) ** 0.5, 1 / (1 + sigma**2))

    queue = iter(drawn)
    x = start.double() * initial_scale("DDIM", sigmas)
    out = sample("DDIM", denoise, x, sigmas, noise=lambda a, b: next(queue), eta=eta)
    torch.testing.assert_close(finish(out, sigmas), expected, rtol=1e-5, atol=1e-5)


def test_it_is_deterministic_by_default(table, toy, start, no_noise) -> None:
    sigmas = sigmas_for("DDIM", None, 6, table)
    out = sample("DDIM", toy, start * 14, sigmas, noise=no_noise)
    assert torch.equal(out, sample("Euler", toy, start * 14, sigmas, noise=no_noise))


def test_a_schedule_that_ends_in_zero_needs_no_scaling(table, toy, start, no_noise) -> None:
    sigmas = sigmas_for("DDIM", "DDIM", 6, table)
    out = sample("DDIM", toy, start * 14, sigmas, noise=no_noise)
    assert finish(out, sigmas) is out
