"""The sampling loop: sigmas leave their tensor once, before it, and are Python numbers from there on."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from clearway.errors import RequestError
from clearway.sampling.registry import Sampler, checked_options, find_sampler
from clearway.types import Denoise, Noise

if TYPE_CHECKING:
    from torch import Tensor

OnStep = Callable[[int, int, "Tensor", float, "Tensor"], None]
"""(step, steps, x, sigma, denoised); see `sample`."""


def sample(
    name: str | Sampler,
    denoise: Denoise,
    x: Tensor,
    sigmas: Tensor,
    *,
    noise: Noise,
    on_step: OnStep | None = None,
    **options: float | None,
) -> Tensor:
    """The latents at the last sigma, from `x` (B, C, h, w).

    x is at noise level sigmas[0]: x0 + sigma·noise (see `initial_scale`). `sigmas` is a CPU tensor,
    descending; only its last entry may be 0. `denoised` has x's shape, device and dtype. `on_step` is called
    once when a step has been issued: its number from 1, how many there are, the latents after it, the sigma
    it started from and the first x0 estimate made in it; what it raises ends the loop and passes through.
    Options are those the sampler takes (`Sampler.options`); None counts as not given. Nothing in the loop
    reads a tensor back or waits for the device. Raises RequestError for an unknown sampler, untaken options
    and bad sigmas.
    Source: each sampler's own (`Sampler.source`); results agree with k-diffusion's samplers.
    """
    import torch

    sampler = name if isinstance(name, Sampler) else find_sampler(name)
    given = checked_options(f"sampler {sampler.label!r}", sampler.options, options)
    if "r" in given and not 0 < given["r"] <= 1:
        raise RequestError(f"r {given['r']:g} is out of range; it is a part of the step, above 0 and up to 1")
    levels = _levels(sigmas)
    with torch.no_grad():
        for step, (x, denoised) in enumerate(sampler.run(denoise, x, levels, noise, **given), 1):  # noqa: B020
            if on_step is not None:
                on_step(step, len(levels) - 1, x, levels[step - 1], denoised)
    return x


def initial_scale(sampler: str | Sampler, sigmas: Tensor) -> float:
    """The factor from N(0, 1) to noise level sigmas[0]: sigma, or sqrt(1 + sigma²) for the timestep family.

    Source: A1111 v1.10.1; its timestep samplers start from plain noise in scaled space, where x is x / sqrt(1
    + sigma²).
    """
    found = sampler if isinstance(sampler, Sampler) else find_sampler(sampler)
    first = _levels(sigmas)[0]
    return first if found.own_schedule is None else math.sqrt(1 + first**2)


def finish(x: Tensor, sigmas: Tensor) -> Tensor:
    """x / sqrt(1 + sigma²) for the last sigma: what the VAE gets. x itself where that is 0.

    Source: A1111 v1.10.1; its timestep samplers end above 0, in scaled (variance-preserving) space.
    """
    last = _levels(sigmas)[-1]
    return x if last == 0 else x / math.sqrt(1 + last**2)


def _levels(sigmas: Tensor) -> list[float]:
    """The sigmas as Python floats, checked."""
    import torch

    if not isinstance(sigmas, torch.Tensor):
        raise RequestError(f"sigmas must be a CPU tensor, found {type(sigmas).__name__}")
    if sigmas.device.type != "cpu" or sigmas.ndim != 1 or len(sigmas) < 2:
        found = f"shape {tuple(sigmas.shape)} on {sigmas.device}"
        raise RequestError(f"sigmas must be one row of two or more numbers on the CPU, found {found}")
    levels = [float(value) for value in sigmas.tolist()]
    falling = all(after <= before for before, after in pairwise(levels))
    if not all(map(math.isfinite, levels)) or not falling or levels[-1] < 0 or levels[-2] == 0:
        raise RequestError("sigmas must be finite and descending, and only the last may be 0")
    return levels
