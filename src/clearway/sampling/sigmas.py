"""Schedules: sequences of sigmas from a model's training sigmas, on the CPU in float32 as in A1111."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from clearway.errors import RequestError
from clearway.sampling.registry import (
    AUTOMATIC,
    Sampler,
    checked_options,
    find_schedule,
    register_schedule,
    resolve,
)

if TYPE_CHECKING:
    from torch import Tensor


def schedule(name: str, steps: int, table: Tensor, **options: float | None) -> Tensor:
    """The sigmas of schedule `name` for `steps` steps: float32 on the CPU, descending, most ending in 0.

    `table` holds the model's training sigmas, ascending: sqrt((1 - a) / a) of its cumulative alphas (SD:
    1000). Options that are None count as not given. Raises RequestError for an unknown name, an option that
    the schedule does not take, steps below 1 and tables or options that give no finite, descending sigmas.
    """
    import torch

    found = find_schedule(name)
    what = f"schedule {found.label!r}"
    given = checked_options(what, found.options, options)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise RequestError(f"steps must be a whole number from 1, found {steps!r}")
    if given.get("rho") == 0:
        raise RequestError("rho 0 is out of range; it must be above 0 (the usual value is 7)")
    table = _checked_table(table)
    if {"sigma_min", "sigma_max"} & set(found.options):
        low, high = given.get("sigma_min", float(table[0])), given.get("sigma_max", float(table[-1]))
        if not 0 < low < high:
            raise RequestError(
                f"sigma_min {low:g} and sigma_max {high:g} do not fit; 0 < sigma_min < sigma_max is needed"
            )
    try:
        sigmas = found.make(steps, table, **given)
    except OverflowError:
        sigmas = torch.tensor([math.inf])
    if not bool(sigmas.isfinite().all()) or bool((sigmas.diff() > 0).any()):
        values = ", ".join(f"{key} {value:g}" for key, value in given.items()) or "this model"
        raise RequestError(f"{what} gives no finite, descending sigmas for {steps} steps with {values}")
    return sigmas


def sigmas_for(
    sampler: str | Sampler, schedule_label: str | None, steps: int, table: Tensor, **options: float | None
) -> Tensor:
    """The sigmas that `sampler` runs on for this choice of schedule (see `resolve`): what a pipeline calls.

    Beyond `schedule`: a timestep sampler's "Automatic" is its own step rule, and a sampler that discards the
    next-to-last sigma gets one more computed and that one dropped, so that `steps` steps remain.
    """
    import torch

    found, label = resolve(sampler, schedule_label)
    if label == AUTOMATIC and found.own_schedule is not None:
        return schedule(found.own_schedule, steps, table, **options)
    if not found.discard_next_to_last:
        return schedule(label, steps, table, **options)
    sigmas = schedule(label, steps + 1, table, **options)
    return torch.cat([sigmas[:-2], sigmas[-1:]])


@register_schedule(AUTOMATIC, source="k-diffusion, DiscreteSchedule.get_sigmas")
def automatic(steps: int, table: Tensor) -> Tensor:
    """The model's own spacing, the same as "Uniform"."""
    return uniform(steps, table)


@register_schedule("Uniform", source="k-diffusion, DiscreteSchedule.get_sigmas")
def uniform(steps: int, table: Tensor) -> Tensor:
    """Sigmas at evenly spaced timesteps from the last to the first, then 0; log-linear between entries."""
    import torch

    timesteps = torch.linspace(len(table) - 1, 0, steps)
    logs, below, share = table.log(), timesteps.floor().long(), timesteps.frac()
    above = timesteps.ceil().long()
    return _then_zero(((1 - share) * logs[below] + share * logs[above]).exp())


@register_schedule("Karras", source="Karras et al. 2022 (arXiv:2206.00364), eq. 5")
def karras(
    steps: int,
    table: Tensor,
    *,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
    rho: float = 7.0,
) -> Tensor:
    """Sigmas whose rho-th roots are evenly spaced from sigma_max to sigma_min, then 0."""
    import torch

    low, high = _ends(table, sigma_min, sigma_max)
    low, high = low ** (1 / rho), high ** (1 / rho)
    return _then_zero((high + torch.linspace(0, 1, steps) * (low - high)) ** rho)


@register_schedule("Exponential", source="k-diffusion, get_sigmas_exponential")
def exponential(
    steps: int, table: Tensor, *, sigma_min: float | None = None, sigma_max: float | None = None
) -> Tensor:
    """Sigmas whose logarithms are evenly spaced from sigma_max to sigma_min, then 0."""
    import torch

    low, high = _ends(table, sigma_min, sigma_max)
    return _then_zero(torch.linspace(math.log(high), math.log(low), steps).exp())


@register_schedule("DDIM", source="A1111 v1.10.1, the scheduler labelled DDIM (from ComfyUI)")
def ddim(steps: int, table: Tensor) -> Tensor:
    """Table entries 1, 1 + n, 1 + 2n, … descending, then 0; n = length // steps, at least 1.

    The number of steps is what the stride gives: 20 for 20, but 31 for 30 and 63 for 60.
    """
    stride = max(len(table) // steps, 1)
    return _then_zero(table[1::stride].flip(0))


@register_schedule("Timesteps", source="A1111 v1.10.1, the step rule of its DDIM, PLMS and UniPC samplers")
def timesteps(steps: int, table: Tensor) -> Tensor:
    """Table entries 1, 1 + n, 1 + 2n, … descending, no 0 at the end; n = length // steps.

    What "Automatic" means for DDIM. With 1000 entries 20 steps make 19 denoiser calls, 30 make 30, 28 make 28
    and 60 make 62, as in A1111. An index past the end becomes the last one. One step goes from the last entry
    to entry 1 (A1111: no call, plain noise). Raises RequestError for more steps than entries.
    """
    import torch

    if steps > len(table):
        raise RequestError(f"steps {steps} is out of range; this schedule has {len(table)} timesteps")
    if steps == 1:
        return table[[len(table) - 1, 1]]
    indices = torch.arange(1, len(table) + 1, len(table) // steps).clamp(max=len(table) - 1)
    return table[indices].flip(0)


def _ends(table: Tensor, sigma_min: float | None, sigma_max: float | None) -> tuple[float, float]:
    low = float(table[0]) if sigma_min is None else sigma_min
    high = float(table[-1]) if sigma_max is None else sigma_max
    return low, high


def _then_zero(sigmas: Tensor) -> Tensor:
    import torch

    return torch.cat([sigmas, sigmas.new_zeros(1)])


def _checked_table(table: Tensor) -> Tensor:
    import torch

    table = table.detach().to(device="cpu", dtype=torch.float32)
    fine = table.ndim == 1 and len(table) > 1 and bool(table.isfinite().all())
    if not (fine and bool(table[0] > 0) and bool((table.diff() > 0).all())):
        raise RequestError(
            f"the model's training sigmas (shape {tuple(table.shape)}) cannot be used; "
            "they must be a list of finite, ascending numbers above 0"
        )
    return table
