"""How noise enters a step: the ancestral split of a step, and churn before one. Python numbers only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from clearway.types import Noise

if TYPE_CHECKING:
    from torch import Tensor

MAX_CHURN = math.sqrt(2) - 1


def ancestral_step(sigma: float, sigma_next: float, eta: float = 1.0) -> tuple[float, float]:
    """(down, up): step to `down`, then add noise of `up`; down² + up² = sigma_next², up from 0 to sigma_next.

    eta 1 is the ancestral (DDPM) step, 0 the deterministic one. Source: Song et al. 2020 (DDIM,
    arXiv:2010.02502), eq. 16, in terms of sigma.
    """
    variance = sigma_next**2 * max(sigma**2 - sigma_next**2, 0.0) / sigma**2
    up = min(sigma_next, eta * math.sqrt(variance))
    down = math.sqrt(max(sigma_next**2 - up**2, 0.0)) if up > 0 else sigma_next
    return down, up


def churn(
    x: Tensor,
    sigma: float,
    steps: int,
    noise: Noise,
    *,
    s_churn: float,
    s_tmin: float,
    s_tmax: float,
    s_noise: float,
) -> tuple[Tensor, float]:
    """x with noise added, and the higher sigma it is then at; both unchanged outside s_tmin … s_tmax.

    With s_churn above 0 noise is drawn at every step, used or not, so that the order of draws is
    k-diffusion's.
    Source: Karras et al. 2022 (arXiv:2206.00364), algorithm 2, lines 4 to 6.
    """
    if s_churn <= 0:
        return x, sigma
    gamma = min(s_churn / steps, MAX_CHURN) if s_tmin <= sigma <= s_tmax else 0.0
    higher = sigma * (1 + gamma)
    drawn = noise(sigma, higher)
    if gamma == 0:
        return x, sigma
    return x.add(drawn, alpha=s_noise * math.sqrt(higher**2 - sigma**2)), higher
