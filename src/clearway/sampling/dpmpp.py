"""DPM-Solver++ (Lu et al. 2022, arXiv:2211.01095): exponential integrators in lambda = -log(sigma).

With exp(-h) = sigma_next / sigma a first-order step is `denoised.lerp(x, sigma_next / sigma)`; the second
order replaces `denoised` by an estimate for the middle of the step.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from clearway.sampling.registry import Steps, register_sampler
from clearway.sampling.stochastic import ancestral_step
from clearway.types import Denoise, Noise

if TYPE_CHECKING:
    from torch import Tensor


@register_sampler(
    "DPM++ 2M",
    aliases=("k_dpmpp_2m",),
    default_schedule="Karras",
    order=2,
    source="Lu et al. 2022 (arXiv:2211.01095), algorithm 2; first and last step of first order (k-diffusion)",
)
def dpmpp_2m(denoise: Denoise, x: Tensor, sigmas: list[float], noise: Noise) -> Steps:
    """One call a step, second order through the previous step's estimate; `noise` is not called."""
    previous: Tensor | None = None
    width_before = 0.0
    for sigma, sigma_next in pairwise(sigmas):
        denoised = denoise(x, sigma)
        width = math.log(sigma / sigma_next) if sigma_next > 0 else math.inf
        if previous is None or sigma_next == 0 or width_before == 0:
            middle = denoised
        else:
            middle = previous.lerp(denoised, 1 + width / (2 * width_before))
        x = middle.lerp(x, sigma_next / sigma)
        previous, width_before = denoised, width
        yield x, denoised


@register_sampler(
    "DPM++ SDE",
    aliases=("k_dpmpp_sde",),
    default_schedule="Karras",
    order=2,
    second_order=True,
    noise="brownian",
    source="Lu et al. 2022 (arXiv:2211.01095), algorithm 1, with noise as in k-diffusion's sample_dpmpp_sde",
)
def dpmpp_sde(
    denoise: Denoise,
    x: Tensor,
    sigmas: list[float],
    noise: Noise,
    *,
    eta: float = 1.0,
    s_noise: float = 1.0,
    r: float = 0.5,
) -> Steps:
    """Two calls a step, one where the step ends at 0 (an Euler step); second order where eta is 0.

    The second call is `r` of the way in lambda. Both parts are ancestral steps (see `ancestral_step`) from
    the step's start; `noise` is asked for (start, middle) and (start, end), which overlap, so it must be a
    Brownian path for the parts to fit.
    """
    rounded = _float32_levels(sigmas, r)
    for (sigma, sigma_next), (start, middle, end) in zip(pairwise(sigmas), rounded, strict=True):
        denoised = denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            yield x, denoised
            continue
        down, up = ancestral_step(start, middle, eta)
        halfway = denoised.lerp(x, down / start)
        if up > 0:
            halfway = halfway.add(noise(start, middle), alpha=up * s_noise)
        combined = denoised.lerp(denoise(halfway, middle), 1 / (2 * r))
        down, up = ancestral_step(start, end, eta)
        x = combined.lerp(x, down / start)
        if up > 0:
            x = x.add(noise(start, end), alpha=up * s_noise)
        yield x, denoised


def _float32_levels(sigmas: list[float], r: float) -> list[tuple[float, float, float]]:
    """(start, middle, end) of each step in sigma, after going to lambda and back in float32.

    k-diffusion does so, and the Brownian tree sees it: it resolves 1e-6 in sigma, about float32's rounding at
    sigma 14, and a path moves by 1e-3 over that distance. Against k-diffusion's result for 5 Karras steps
    this differs by 8e-7, exact numbers by 1.5e-5 (CPU, float32, 1 x 4 x 8 x 8). Computed before the loop.
    """
    import torch

    lambdas = torch.tensor(sigmas, dtype=torch.float32).log().neg()
    starts, ends = lambdas[:-1], lambdas[1:]
    middles = starts + (ends - starts) * r
    parts = torch.stack([starts, middles, ends], dim=1).neg().exp()
    return [(start, middle, end) for start, middle, end in parts.tolist()]
