"""What samplers and schedules exist, and how a name finds one. Each registers beside its own function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from clearway.errors import RequestError, nearest

if TYPE_CHECKING:
    from torch import Tensor

AUTOMATIC = "Automatic"
NoiseKind = Literal["none", "ancestral", "brownian"]
Steps = Iterator[tuple["Tensor", "Tensor"]]
"""After each step: (latents after it, the step's first estimate of x0)."""
Run = Callable[..., Steps]
"""(denoise, x, sigmas: list[float], noise, *, options) -> Steps; options are its keyword-only parameters."""
Rule = Callable[..., "Tensor"]
"""(steps, table, *, options) -> sigmas, where `table` is checked, float32 and on the CPU."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """A stepping rule with A1111's label and facts.

    `noise` says what the default options draw: nothing, independent N(0, 1) per call ("ancestral"), or
    increments of a Brownian path; s_churn and eta can make a "none" sampler draw independent noise.
    `second_order` (A1111's flag) doubles the calls that prompt timing counts. `default_schedule` is what
    "Automatic" means for it, None the model's own, except that `own_schedule` (A1111's timestep family) names
    a rule which goes with the sampler. `discard_next_to_last`: one sigma more is computed and the one before
    the last dropped.
    """

    label: str
    aliases: tuple[str, ...]
    default_schedule: str | None
    order: int
    second_order: bool
    noise: NoiseKind
    options: tuple[str, ...]
    source: str
    run: Run = field(repr=False, compare=False)
    own_schedule: str | None = None
    discard_next_to_last: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """A rule for sigmas with A1111's label; `options` are what it takes besides steps and the table."""

    label: str
    aliases: tuple[str, ...]
    options: tuple[str, ...]
    source: str
    make: Rule = field(repr=False, compare=False)


_samplers: dict[str, Sampler] = {}
_schedules: dict[str, Schedule] = {}


def register_sampler(
    label: str,
    *,
    aliases: Sequence[str] = (),
    default_schedule: str | None = None,
    order: int = 1,
    second_order: bool = False,
    noise: NoiseKind = "none",
    source: str,
    own_schedule: str | None = None,
    discard_next_to_last: bool = False,
) -> Callable[[Run], Run]:
    """A decorator that lists its function as sampler `label`; its keyword-only parameters are its options."""

    def register(run: Run) -> Run:
        _samplers[label] = Sampler(
            label=label,
            aliases=tuple(aliases),
            default_schedule=default_schedule,
            order=order,
            second_order=second_order,
            noise=noise,
            options=_option_names(run),
            source=source,
            run=run,
            own_schedule=own_schedule,
            discard_next_to_last=discard_next_to_last,
        )
        return run

    return register


def register_schedule(label: str, *, aliases: Sequence[str] = (), source: str) -> Callable[[Rule], Rule]:
    """A decorator that lists a function as schedule `label`; keyword-only parameters are the options."""

    def register(make: Rule) -> Rule:
        _schedules[label] = Schedule(label, tuple(aliases), _option_names(make), source, make)
        return make

    return register


def samplers() -> tuple[Sampler, ...]:
    """All samplers by label."""
    return tuple(sorted(_samplers.values(), key=lambda one: one.label))


def schedules() -> tuple[Schedule, ...]:
    """All schedules, "Automatic" (the model's own) first."""
    return tuple(_schedules.values())


def find_sampler(name: str) -> Sampler:
    """The sampler with this label or alias, whatever its case. Raises RequestError naming the nearest."""
    found = _sampler_names().get(_key(name))
    if found is None:
        labels = nearest(name, _samplers)
        raise RequestError(f"sampler {name!r} is not known; nearest: {labels} (all: clearway samplers)")
    return found


def find_schedule(name: str) -> Schedule:
    """The schedule with this label or alias, whatever its case. Raises RequestError naming the nearest."""
    found = _schedule_names().get(_key(name))
    if found is None:
        labels = nearest(name, _schedules)
        raise RequestError(f"schedule {name!r} is not known; nearest: {labels} (all: clearway samplers)")
    return found


def resolve(sampler: str | Sampler, schedule: str | None = None) -> tuple[Sampler, str]:
    """The sampler and the label of the schedule it runs on.

    A schedule's name may trail the sampler's ("DPM++ 2M Karras"). None or "Automatic" is that trailing name,
    else the sampler's default, else "Automatic": the model's own sigmas, or the sampler's own step rule.
    Raises RequestError for unknown names and for two different schedules. Source: A1111 v1.10.1's naming;
    unlike there nothing unknown becomes DPM++ 2M, aliases and any case work, and "Automatic" does not undo a
    trailing name.
    """
    found, trailing = (sampler, AUTOMATIC) if isinstance(sampler, Sampler) else _split(sampler)
    label = AUTOMATIC if schedule is None else find_schedule(schedule).label
    if label == AUTOMATIC:
        label = trailing
    elif trailing not in (AUTOMATIC, label):
        raise RequestError(
            f"sampler {sampler!r} names schedule {trailing!r} and {schedule!r} was asked for; give one"
        )
    if label == AUTOMATIC:
        label = found.default_schedule or AUTOMATIC
    return found, label


def checked_options(what: str, taken: Sequence[str], options: Mapping[str, float | None]) -> dict[str, float]:
    """The options that were given (those not None), as floats.

    `what` names the taker: "sampler 'Euler'" or "schedule 'Karras'". Raises RequestError for an option that
    is not taken and for what is no number from 0 (only s_tmax is unbounded).
    """
    given: dict[str, float] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name not in taken:
            raise RequestError(f"{what} takes no {name}; it takes {', '.join(taken) or 'no options'}")
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise RequestError(f"{name} must be a number, found {value!r}")
        if value < 0 or (math.isinf(value) and name != "s_tmax"):
            raise RequestError(f"{name} {value:g} is out of range; it is a finite number from 0")
        given[name] = float(value)
    return given


def check_options(sampler: Sampler, schedule_label: str, options: Mapping[str, float | None]) -> None:
    """Raises RequestError for an option that neither this sampler nor this schedule takes (see `resolve`)."""
    of_schedules = {name for one in schedules() for name in one.options}
    label = schedule_label
    if label == AUTOMATIC and sampler.own_schedule is not None:
        label = sampler.own_schedule
    schedule = find_schedule(label)
    for what, taken, chosen in (
        (f"sampler {sampler.label!r}", sampler.options, options.keys() - of_schedules),
        (f"schedule {schedule.label!r}", schedule.options, options.keys() & of_schedules),
    ):
        checked_options(what, taken, {name: options[name] for name in sorted(chosen)})


def _split(name: str) -> tuple[Sampler, str]:
    """A sampler's name, with or without a schedule's behind it -> the sampler and that schedule's label."""
    known, key = _sampler_names(), _key(name)
    if key not in known:  # a whole name first: "DDIM" is a sampler and a schedule
        for ending, schedule in sorted(_schedule_names().items(), key=lambda item: -len(item[0])):
            front = key.removesuffix(" " + ending)
            if front != key and front in known:
                return known[front], schedule.label
    return find_sampler(name), AUTOMATIC


def _sampler_names() -> dict[str, Sampler]:
    return {_key(name): one for one in samplers() for name in (one.label, *one.aliases)}


def _schedule_names() -> dict[str, Schedule]:
    return {_key(name): one for one in schedules() for name in (one.label, *one.aliases)}


def _key(name: str) -> str:
    return " ".join(name.lower().split())


def _option_names(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)
