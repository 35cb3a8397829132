"""Denoiser, sigmas and noise -> latents. Samplers see sigmas only: no model, no guidance, no device.

Adding a sampler: one decorated generator function in its family's file (see `euler.py`), that file imported
here, and a row in docs/samplers.md. Adding a schedule: one decorated function in `sigmas.py`.
"""

from clearway.sampling import ddim, dpmpp, euler, heun  # noqa: F401 - importing a family registers it
from clearway.sampling.loop import OnStep, finish, initial_scale, sample
from clearway.sampling.noise import ImageNoise, brownian_noise, noise_for
from clearway.sampling.registry import Sampler, Schedule, check_options, resolve, samplers, schedules
from clearway.sampling.sigmas import schedule, sigmas_for

__all__ = [
    "ImageNoise",
    "OnStep",
    "Sampler",
    "Schedule",
    "brownian_noise",
    "check_options",
    "finish",
    "initial_scale",
    "noise_for",
    "resolve",
    "sample",
    "samplers",
    "schedule",
    "schedules",
    "sigmas_for",
]
