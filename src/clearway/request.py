"""Request: frozen, validated, what every door fills in. What it leaves open comes from the model."""

from __future__ import annotations

import math
import numbers
import operator
import random
from dataclasses import dataclass, fields, replace
from typing import Any

from clearway.errors import RequestError
from clearway.types import Defaults

MAX_RANDOM_SEED = 4294967294  # the WebUI's own range for random seeds
MAX_SEED = 2**63 - 1
MAX_KNOB = 10000.0  # beyond it float32 arithmetic has no meaning left; SD's own largest sigma is 14.6
DEFAULT_BATCH = 4
RNGS = ("GPU", "CPU", "NV")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One order of pictures. None means: as the model's card or family says.

    Sizes are pixels and multiples of 8. `count` pictures get the seeds seed, seed + 1, …; `seed` -1 draws
    one. `batch_size` of them run together (None: up to 4); `exact_batch` runs them singly, which makes a
    picture independent of its neighbours to the last bit. `ngms` > 0 skips negative guidance below that sigma
    on every other denoiser call, with `ngms_all_steps` on every one. `rng` is where noise is made: "GPU" (the
    device's own generator, the WebUI's default), "CPU", or "NV" (on the CPU as an NVIDIA GPU would). `eta`,
    `s_noise`, `s_churn`, `s_tmin` and `s_tmax` are the samplers' usual knobs; `sigma_min`, `sigma_max` and
    `rho` the schedules'. `memory_budget_bytes` pins what attention may hold at once, so that a repeat routes
    as before (None: by what is free). `vae_tiling` has the VAE decode by tiles, or never (None: only where
    memory does not suffice for the whole).
    Raises RequestError for values that no model could take.
    """

    prompt: str = ""
    negative_prompt: str = ""
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    cfg_scale: float | None = None
    sampler: str | None = None
    schedule: str | None = None
    seed: int = -1
    count: int = 1
    batch_size: int | None = None
    exact_batch: bool = False
    ngms: float = 0.0
    ngms_all_steps: bool = False
    clip_skip: int = 1
    rng: str = "GPU"
    eta: float | None = None
    s_noise: float | None = None
    s_churn: float | None = None
    s_tmin: float | None = None
    s_tmax: float | None = None
    sigma_min: float | None = None
    sigma_max: float | None = None
    rho: float | None = None
    memory_budget_bytes: int | None = None
    vae_tiling: bool | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "negative_prompt"):
            if not isinstance(getattr(self, name), str):
                raise RequestError(f"{name} must be text, found {type(getattr(self, name)).__name__}")
        for name in ("sampler", "schedule"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise RequestError(f"{name} must be a name, found {getattr(self, name)!r}")
        _whole(self, "steps", 1, 1000)
        _whole(self, "count", 1, 10000)
        _whole(self, "batch_size", 1, 10000)
        _whole(self, "clip_skip", 1, 12)
        _whole(self, "seed", -1, MAX_SEED)
        _whole(self, "memory_budget_bytes", 1, 2**50)
        for name in ("width", "height"):
            _whole(self, name, 8, 16384)
        if (self.width or 8) % 8 or (self.height or 8) % 8:
            width, height = self.width or 8, self.height or 8
            near = f"{_to_eight(width)} x {_to_eight(height)}"
            raise RequestError(f"{width} x {height}: sides must be multiples of 8; nearest {near}")
        _number(self, "cfg_scale", 0.0, 1000.0)
        _number(self, "ngms", 0.0, 1000.0)
        for name in ("eta", "s_noise", "s_churn", "s_tmin", "sigma_min", "sigma_max"):
            _number(self, name, 0.0, MAX_KNOB)
        _number(self, "s_tmax", 0.0, math.inf)
        if self.seed + self.count - 1 > MAX_SEED:
            raise RequestError(
                f"seed {self.seed} with count {self.count} passes the largest seed, {MAX_SEED}"
            )
        _number(self, "rho", 0.01, 1000.0)
        if not (self.vae_tiling is None or isinstance(self.vae_tiling, bool)):
            raise RequestError(f"vae_tiling must be True, False or None, found {self.vae_tiling!r:.60}")
        if self.rng not in RNGS:
            raise RequestError(f"rng {self.rng!r} is not known; it is one of {', '.join(RNGS)}")

    def resolved(self, defaults: Defaults) -> Request:
        """The same request with nothing left open: the model's defaults filled in and a seed drawn."""
        open_fields = {
            name: getattr(defaults, name)
            for name in ("width", "height", "steps", "cfg_scale", "sampler")
            if getattr(self, name) is None
        }
        if self.schedule is None:  # a card's schedule belongs to the card's sampler
            open_fields["schedule"] = defaults.schedule if self.sampler is None else "Automatic"
        if self.seed == -1:
            open_fields["seed"] = random.SystemRandom().randrange(MAX_RANDOM_SEED)
        if self.batch_size is None or self.exact_batch:
            open_fields["batch_size"] = 1 if self.exact_batch else min(self.count, DEFAULT_BATCH)
        return replace(self, **open_fields)

    def seeds(self) -> tuple[int, ...]:
        """The seed of each picture; only of a request whose seed has been drawn."""
        if self.seed < 0:
            raise RequestError("seed -1 has not been drawn yet; use the seeds of the result")
        return tuple(self.seed + index for index in range(self.count))

    @classmethod
    def from_infotext(cls, text: str) -> Request:
        """The request that a picture's parameters describe (Clearway's or the WebUI's). See `infotext.parse`.

        Raises RequestError where the text holds no parameters or values that cannot be read.
        """
        from clearway.infotext import request_fields

        return cls(**request_fields(text))

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _to_eight(side: int) -> int:
    return max(8, round(side / 8) * 8)


def _whole(request: Request, name: str, low: int, high: int) -> None:
    value = getattr(request, name)
    if value is None and name in ("steps", "batch_size", "width", "height", "memory_budget_bytes"):
        return
    try:
        whole = operator.index(value)  # NumPy's integers too
    except TypeError:
        whole = None
    if whole is None or isinstance(value, bool):
        raise RequestError(f"{name} must be a whole number, found {value!r:.60}")
    if not low <= whole <= high:
        raise RequestError(f"{name} {whole} is out of range; it goes from {low} to {high}")
    object.__setattr__(request, name, whole)


def _number(request: Request, name: str, low: float, high: float) -> None:
    value = getattr(request, name)
    if value is None and name != "ngms":
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        raise RequestError(f"{name} must be a number, found {value!r:.60}")
    number = float(value)
    if not low <= number <= high:
        raise RequestError(f"{name} {number:g} is out of range; it goes from {low:g} to {high:g}")
    object.__setattr__(request, name, number)
