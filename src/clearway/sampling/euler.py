"""Euler's method, plain and ancestral.

A step along the straight line from x to denoised is `denoised.lerp(x, sigma_next / sigma)`: one kernel.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from clearway.sampling.registry import Steps, register_sampler
from clearway.sampling.stochastic import ancestral_step, churn
from clearway.types import Denoise, Noise

if TYPE_CHECKING:
    from torch import Tensor


@register_sampler(
    "Euler",
    aliases=("k_euler",),
    source="Karras et al. 2022 (arXiv:2206.00364), algorithm 2 without its second-order part",
)
def euler(
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
    """One call a step, first order. s_churn adds noise before steps that start in s_tmin … s_tmax."""
    steps = len(sigmas) - 1
    for sigma, sigma_next in pairwise(sigmas):
        x, sigma_hat = churn(
            x, sigma, steps, noise, s_churn=s_churn, s_tmin=s_tmin, s_tmax=s_tmax, s_noise=s_noise
        )
        denoised = denoise(x, sigma_hat)
        x = denoised.lerp(x, sigma_next / sigma_hat)
        yield x, denoised


@register_sampler(
    "Euler a",
    aliases=("k_euler_a", "k_euler_ancestral"),
    noise="ancestral",
    source="k-diffusion, sample_euler_ancestral; Song et al. 2020 (arXiv:2010.02502), eq. 16",
)
def euler_ancestral(
    denoise: Denoise, x: Tensor, sigmas: list[float], noise: Noise, *, eta: float = 1.0, s_noise: float = 1.0
) -> Steps:
    """One call a step, first order: Euler to below the next sigma, then noise up to it. eta 0 is Euler."""
    for sigma, sigma_next in pairwise(sigmas):
        denoised = denoise(x, sigma)
        down, up = ancestral_step(sigma, sigma_next, eta)
        x = denoised.lerp(x, down / sigma)
        if up > 0:
            x = x.add(noise(sigma, sigma_next), alpha=up * s_noise)
        yield x, denoised
