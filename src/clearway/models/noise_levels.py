"""Training noise levels from betas: sqrt((1 - ᾱ) / ᾱ), ascending, float32 on the CPU, computed in float64.

Source: Ho et al. 2020 for ᾱ; Lin et al. 2023 (arXiv 2305.08891), algorithm 1, for zero terminal SNR.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BETA_START, BETA_END, TIMESTEPS = 0.00085, 0.012, 1000
LAST_ALPHA_BAR = 4.8973451890853435e-08  # ComfyUI's stand-in for the zero at the end; sigma 4518.76


def scaled_linear(
    start: float = BETA_START,
    end: float = BETA_END,
    timesteps: int = TIMESTEPS,
    *,
    zero_terminal_snr: bool = False,
) -> Tensor:
    """Noise levels (timesteps,) of betas whose roots are evenly spaced: SD 1.x, 2.x and SDXL by default."""
    betas = torch.linspace(math.sqrt(start), math.sqrt(end), timesteps, dtype=torch.float64) ** 2
    return _sigmas(betas, zero_terminal_snr)


def linear(start: float, end: float, timesteps: int, *, zero_terminal_snr: bool = False) -> Tensor:
    """Noise levels (timesteps,) of evenly spaced betas."""
    return _sigmas(torch.linspace(start, end, timesteps, dtype=torch.float64), zero_terminal_snr)


def from_betas(betas: Sequence[float], *, zero_terminal_snr: bool = False) -> Tensor:
    """Noise levels of these betas."""
    return _sigmas(torch.tensor(betas, dtype=torch.float64), zero_terminal_snr)


def _sigmas(betas: Tensor, zero_terminal_snr: bool) -> Tensor:
    alpha_bar = torch.cumprod(1 - betas, 0)
    if zero_terminal_snr:
        root = alpha_bar.sqrt()
        alpha_bar = ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2
        alpha_bar[-1] = LAST_ALPHA_BAR
    return ((1 - alpha_bar) / alpha_bar).sqrt().float()
