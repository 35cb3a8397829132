"""The network's convention turned into x0, checked against formulas in float64."""

import bisect
import math

import pytest
import torch

from clearway.models.denoiser import UNetDenoiser
from clearway.models.noise_levels import scaled_linear
from clearway.types import Embedding

SIGMAS = scaled_linear()
CONTEXT = Embedding(torch.zeros(2, 77, 4))


class Oracle:
    """A perfect network: knows x0 and noise, answers in the convention asked for."""

    def __init__(self, prediction: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x0 = torch.randn(2, 4, 3, 3, generator=generator, dtype=torch.float64)
        self.noise = torch.randn(2, 4, 3, 3, generator=generator, dtype=torch.float64)
        self.prediction = prediction
        self.seen: list[tuple[torch.Tensor, float]] = []

    def __call__(self, x, timesteps, **kwargs):
        self.seen.append((x, timesteps[0].item()))
        sigma = SIGMAS[round(timesteps[0].item())].item()
        alpha, beta = 1 / math.sqrt(1 + sigma**2), sigma / math.sqrt(1 + sigma**2)
        v = alpha * self.noise - beta * self.x0  # Salimans and Ho 2022, appendix D
        return (self.noise if self.prediction == "epsilon" else v,)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("index", [0, 10, 500, 999])
def test_a_perfect_network_gives_x0(prediction: str, index: int) -> None:
    oracle = Oracle(prediction)
    denoise = UNetDenoiser(oracle, SIGMAS, prediction, torch.float64)
    sigma = SIGMAS[index].item()
    x = oracle.x0 + sigma * oracle.noise
    torch.testing.assert_close(denoise(x, sigma, CONTEXT), oracle.x0, atol=1e-9, rtol=1e-9)
    scaled, timestep = oracle.seen[0]
    assert timestep == index
    torch.testing.assert_close(scaled, x / math.sqrt(1 + sigma**2))


def test_timesteps_between_are_interpolated_in_log_sigma() -> None:
    denoise = UNetDenoiser(lambda *a, **k: None, SIGMAS, "epsilon", torch.float32)
    low, high = SIGMAS[300].item(), SIGMAS[301].item()
    assert denoise.timestep(math.sqrt(low * high)) == pytest.approx(300.5, abs=1e-4)
    assert denoise.timestep(1e-6) == 0.0
    assert denoise.timestep(1e6) == 999.0


def test_timesteps_are_to_the_bit_those_of_all_logarithms() -> None:
    """Also beside an entry, where a sigma and that entry may have one logarithm."""
    denoise = UNetDenoiser(lambda *a, **k: None, SIGMAS, "epsilon", torch.float32)
    logs = [math.log(sigma) for sigma in SIGMAS.tolist()]
    entries = SIGMAS[::7].tolist()
    drawn = torch.rand(2000, generator=torch.Generator().manual_seed(0)).mul(20).add(1e-3).tolist()
    beside = [math.nextafter(sigma, end) for sigma in entries for end in (0, math.inf)]
    for sigma in (*entries, *drawn, *beside):
        low = min(max(bisect.bisect_right(logs, math.log(sigma)) - 1, 0), len(logs) - 2)
        share = (math.log(sigma) - logs[low]) / (logs[low + 1] - logs[low])
        assert denoise.timestep(sigma) == low + min(max(share, 0.0), 1.0)


def test_the_result_has_the_dtype_of_x() -> None:
    denoise = UNetDenoiser(lambda x, *a, **k: (x,), SIGMAS, "epsilon", torch.bfloat16)
    assert denoise(torch.ones(1, 4, 2, 2), 1.0, Embedding(torch.zeros(1, 77, 4))).dtype == torch.float32
