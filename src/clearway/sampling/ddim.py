"""DDIM, of A1111's timestep family, written in sigma space."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from clearway.sampling.registry import Steps, register_sampler
from clearway.sampling.stochastic import ancestral_step
from clearway.types import Denoise, Noise

if TYPE_CHECKING:
    from torch import Tensor


@register_sampler(
    "DDIM",
    aliases=("ddim",),
    own_schedule="Timesteps",
    source="Song et al. 2020 (arXiv:2010.02502), eq. 12 and 16; A1111 v1.10.1's timesteps",
)
def ddim(denoise: Denoise, x: Tensor, sigmas: list[float], noise: Noise, *, eta: float = 0.0) -> Steps:
    """One call a step, first order; eta 0 is deterministic, 1 is DDPM.

    In x / sqrt(1 + sigma²) this is DDIM as published; without that scaling it is an ancestral Euler step. Its
    own schedule ends above 0: `finish` gives the scaled latents that A1111 decodes.
    """
    for sigma, sigma_next in pairwise(sigmas):
        denoised = denoise(x, sigma)
        down, up = ancestral_step(sigma, sigma_next, eta)
        x = denoised.lerp(x, down / sigma)
        if up > 0:
            x = x.add(noise(sigma, sigma_next), alpha=up)
        yield x, denoised
