"""Heun's method: Euler's step, corrected with the slope at its end."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from clearway.sampling.registry import Steps, register_sampler
from clearway.sampling.stochastic import churn
from clearway.types import Denoise, Noise

if TYPE_CHECKING:
    from torch import Tensor


@register_sampler(
    "Heun",
    aliases=("k_heun",),
    order=2,
    second_order=True,
    source="Karras et al. 2022 (arXiv:2206.00364), algorithm 2",
)
def heun(
    denoise: Denoise,
    x: Tensor,
    sigmas: list[float],
    noise: Noise,
    *,
    s_churn: float = 0.0,
    s_tmin: float = 0.0,
    s_tmax: float = math.inf,
    s_noise: float = 1.0,
) -> Steps:
    """Two calls a step, one where the step ends at 0; second order. Churn as in Euler."""
    steps = len(sigmas) - 1
    for sigma, sigma_next in pairwise(sigmas):
        x, sigma_hat = churn(
            x, sigma, steps, noise, s_churn=s_churn, s_tmin=s_tmin, s_tmax=s_tmax, s_noise=s_noise
        )
        denoised = denoise(x, sigma_hat)
        predicted = denoised.lerp(x, sigma_next / sigma_hat)
        if sigma_next > 0:
            slope = (x - denoised) / sigma_hat
            slope_next = (predicted - denoise(predicted, sigma_next)) / sigma_next
            x = x.add(slope + slope_next, alpha=(sigma_next - sigma_hat) / 2)
        else:
            x = predicted
        yield x, denoised
