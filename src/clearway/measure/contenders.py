"""Contenders: ways to do a scenario's work, each prepared as an arm that the harness times and checks.

Whole means prompt string in, PNG bytes out, in every arm, the text encoders included; Clearway writes PNGs by
its own writer, Diffusers' arms by Pillow as Diffusers' users do, and records tell what that took. Each arm
has module objects of its own over shared weights (`isolated`), so that what one does to its model is not done
to another's; a memory layout of its own costs a copy of what is laid out. To add a contender: one entry in
CONTENDERS. A choice of Clearway's needs none: "clearway:executor=cuda_graph,layout=channels_last" names it on
the spot.
"""

from __future__ import annotations

import copy
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from clearway.device import KINDS
from clearway.errors import RequestError, UnavailableError, nearest
from clearway.models import Model, chosen
from clearway.ops import state
from clearway.types import Choices, Event, StepDone

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from clearway.measure.scenario import Scenario

OWN = "clearway"
CUDA = ("cuda",)


@dataclass(frozen=True, slots=True)
class Probe:
    """What one untimed call gave: uint8 (B, H, W, 3), final latents (B, C, h, w) where they can be had.

    In a network's scenario `latents` is the network's output and `images` None. `calls` counts UNet calls.
    """

    images: np.ndarray | None
    latents: Tensor | None
    calls: int | None = None


@dataclass(slots=True, kw_only=True)
class Arm:
    """A contender ready to run.

    `call(round, side_px)` does one round's work, `side_px` wider than the scenario; `probe(round)` does it
    once more and keeps what can be compared. `proof()` says why the intended path did not run, or None;
    `routes()` what ran, both since `settle()`, which is called once the arm is warm: what captures or
    compiles may run otherwise at first. `intended()` is what was to run, as JSON values. `png_s` holds the
    seconds that each call since then took to write its PNGs, where it makes any.
    """

    call: Callable[..., Any]
    probe: Callable[[int], Probe]
    proof: Callable[[], str | None]
    routes: Callable[[], Mapping[str, int]]
    intended: Callable[[], dict[str, Any]]
    work: str = "same"
    settle: Callable[[], None] = field(default=lambda: None)
    png_s: list[float] = field(default_factory=list)
    close: Callable[[], None] = field(default=lambda: None)


Prepare = Callable[["Scenario", Model], Arm]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the work; `usual` are the kinds of device where it runs without being named."""

    name: str
    title: str
    prepare: Prepare
    usual: tuple[str, ...] = ()


def find(name: str) -> Contender:
    """The contender called `name`; RequestError where there is none."""
    if name in CONTENDERS:
        return CONTENDERS[name]
    own, sign, text = name.partition(":")
    if own == OWN and sign:
        choices = parse_choices(text)
        return Contender(name, f"Clearway with {text}", lambda s, m: clearway_arm(s, m, choices))
    raise RequestError(
        f"contender {name!r} is not known; nearest: {nearest(name, CONTENDERS)} "
        f"(or {OWN}:executor=…,layout=…,ops=a+b)"
    )


def usual(kind: str) -> list[str]:
    """What runs on a device of `kind` where no contender is named."""
    return [name for name, one in CONTENDERS.items() if kind in one.usual]


def parse_choices(text: str) -> Choices:
    """Choices from "executor=eager,ops=geglu+attention,routes=attention/sdpa"; RequestError for others."""
    values: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, sign, value = pair.partition("=")
        if key not in Choices.__slots__ or not sign:
            raise RequestError(f"choice {pair!r} is not known; it is one of {', '.join(Choices.__slots__)}")
        values[key] = value
    for key, names in _known().items():
        for name in filter(None, values.get(key, "").split("+")):
            if name not in names:
                raise RequestError(f"{key} {name!r} is not known; nearest: {nearest(name, names)}")
    for key in ("ops", "routes"):
        if key in values:
            values[key] = tuple(filter(None, values[key].split("+")))
    if "routes" in values:
        pairs = [one.partition("/") for one in values["routes"]]
        values["routes"] = tuple((op, implementation) for op, _, implementation in pairs)
    if "packed_qkv" in values:
        if values["packed_qkv"] not in ("true", "false"):
            raise RequestError(f"packed_qkv is true or false, not {values['packed_qkv']!r}")
        values["packed_qkv"] = values["packed_qkv"] == "true"
    return Choices(**values)


def _known() -> dict[str, tuple[str, ...]]:
    """What choices may be, by field."""
    from clearway.execution import EXECUTORS
    from clearway.models.accelerate import LAYOUTS, OPS, ROWS
    from clearway.ops import discover

    routes = (
        f"{op.name}/{one.name}" for op in discover().values() for one in (*op.implementations, op.reference)
    )
    return {"executor": EXECUTORS, "layout": LAYOUTS, "rows": ROWS, "ops": OPS, "routes": tuple(routes)}


def isolated(module: Any) -> Any:
    """A copy of a module whose parameters are new objects over the same memory, its buffers the same."""
    import torch

    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = torch.nn.Parameter(parameter.data, requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer
    return copy.deepcopy(module, memo)


def isolated_model(model: Model) -> Model:
    """The model with isolated networks: what is done to its modules is not done to the original's."""
    return replace(
        model,
        unet=isolated(model.unet),
        vae=isolated(model.vae),
        text_encoders=tuple(isolated(one) for one in model.text_encoders),
    )


def clearway_arm(scenario: Scenario, model: Model, choices: Choices | None) -> Arm:
    """Clearway itself, through `clearway.generate`; `choices` None: what was selected for this machine."""
    own, note = isolated_model(model), None
    if choices is None:
        own = chosen.applied(own, scenario.width, scenario.height)
    else:
        own, note = _with_choices(own, choices)
    wanted = own.choices if choices is None else choices
    intended = {"engine": "clearway", "choices": asdict(wanted), "precision": asdict(model.precision)}
    if scenario.what == "whole":
        intended["png"] = "Clearway's writer"
    if note:
        intended["note"] = note
    if scenario.what != "whole":
        from clearway.measure.networks import clearway_network

        return clearway_network(scenario, own, intended, note)
    tuned = None if choices is not None else chosen.tuned(own, scenario.width, scenario.height)
    return _Whole(scenario, own, wanted, note, tuned).arm(intended)


@dataclass(slots=True)
class _Whole:
    """Clearway's whole generation as an arm's parts; `seen` are the routes and notes of every call."""

    scenario: Scenario
    model: Model
    wanted: Choices
    note: str | None
    tuned: Mapping[str, Mapping[str, str]] | None = None
    seen: Counter[str] = field(default_factory=Counter)
    notes: set[str] = field(default_factory=set)
    png_s: list[float] = field(default_factory=list)

    def arm(self, intended: dict[str, Any]) -> Arm:
        return Arm(
            call=self.call,
            probe=self.probe,
            proof=self.proof,
            routes=lambda: dict(self.seen),
            intended=lambda: intended,
            work=self.scenario.work,
            settle=self.settle,
            png_s=self.png_s,
        )

    def settle(self) -> None:
        self.seen.clear()
        self.png_s.clear()

    def call(self, round: int, side_px: int = 0, on_event: Any = None) -> np.ndarray:
        """Draws one round's pictures and makes them PNG bytes."""
        from clearway.image import encode
        from clearway.pipeline import generate

        tables = nullcontext() if self.tuned is None else state.trying(self.tuned)
        with chosen.set_aside(), tables:  # the arm says itself how it runs
            result = generate(self.scenario.request(round, side_px), self.model, on_event)
        begun = time.perf_counter()
        for image, text in zip(result.images, result.infotexts, strict=True):
            encode(image, "PNG", text)
        self.png_s.append(time.perf_counter() - begun)
        self.seen.update(result.routes)
        self.notes.update(result.notes)
        return result.images

    def probe(self, round: int) -> Probe:
        import torch

        last: dict[int, Any] = {}

        def listen(event: Event) -> None:
            if isinstance(event, StepDone):
                last[event.group] = event.denoised

        before = _unet_calls(self.seen)
        images = self.call(round, on_event=listen)
        calls = _unet_calls(self.seen) - before
        ends_at_zero = _ends_at_zero(self.scenario, self.model)
        latents = torch.cat([one.float() for one in last.values()]) if ends_at_zero else None
        joined = self.wanted.rows == "joined" or self.scenario.cfg_scale == 1.0
        return Probe(images, latents, calls if joined else None)

    def proof(self) -> str | None:
        return self.note or misrouted(self.wanted, self.seen, ("unet", "vae")) or changed_dtype(self.notes)


def misrouted(wanted: Choices, seen: Mapping[str, int], parts: tuple[str, ...]) -> str | None:
    """Why these routes are not what `wanted` means, or None."""
    for part in parts:
        ran = {
            route.partition("/")[2] for route, count in seen.items() if count and route.startswith(f"{part}/")
        }
        if not any(name.startswith(wanted.executor) for name in ran):
            return f"{part} was to run by {wanted.executor} and ran by {', '.join(sorted(ran)) or 'nothing'}"
        if wanted.executor != "eager" and "eager" in ran:
            return f"{part} was to run by {wanted.executor} and {seen[f'{part}/eager']} calls ran eagerly"
    for op, implementation in wanted.routes:
        if not seen.get(f"{op}/{implementation}"):
            return f"{op} was to run by {implementation} and never did"
    return None


def changed_dtype(notes: set[str]) -> str | None:
    """The pipeline's note that a part ran again in another dtype, which no arm may do unseen."""
    return next((note for note in sorted(notes) if "ran again" in note), None)


def _unet_calls(seen: Mapping[str, int]) -> int:
    return sum(count for route, count in seen.items() if route.startswith("unet/"))


def _ends_at_zero(scenario: Scenario, model: Model) -> bool:
    """Whether the last step's estimate of x0 is what the VAE gets: not for schedules that end above zero."""
    from clearway import sampling

    sampler, schedule = sampling.resolve(scenario.sampler, scenario.schedule)
    return float(sampling.sigmas_for(sampler, schedule, scenario.steps, model.sigmas)[-1]) == 0


def _with_choices(model: Model, wanted: Choices) -> tuple[Model, str | None]:
    """The model run as `wanted`, and why it is not."""
    if wanted == Choices():
        return replace(model, choices=wanted), None
    if importlib.util.find_spec("clearway.models.accelerate") is None:
        return model, "this Clearway has no accelerate, so every choice but the plain one runs eagerly"
    from clearway.models import accelerate

    return accelerate.apply(model, wanted), None


def _diffusers(name: str, title: str, usual: tuple[str, ...] = KINDS, **how: Any) -> Contender:
    def prepare(scenario: Scenario, model: Model) -> Arm:
        if scenario.what == "ops":
            raise UnavailableError("Diffusers has no ops of its own to time")
        from clearway.measure import diffusers_arms

        return diffusers_arms.arm(scenario, model, **how)

    return Contender(name, title, prepare, usual)


def _clearway(name: str, title: str, usual: tuple[str, ...] = KINDS, **how: Any) -> Contender:
    """Clearway with the choices in `how`, the selected ones where there are none; ops "all" is every op."""

    def prepare(scenario: Scenario, model: Model) -> Arm:
        if how.get("ops") == "all":
            from clearway.models import accelerate

            return clearway_arm(scenario, model, Choices(**{**how, "ops": accelerate.OPS}))
        return clearway_arm(scenario, model, Choices(**how) if how else None)

    return Contender(name, title, prepare, usual)


def _default(name: str, title: str, kind: str, **change: Any) -> Contender:
    """Clearway as it runs on devices of `kind` where nothing was selected, with `change` made to that."""

    def prepare(scenario: Scenario, model: Model) -> Arm:
        from clearway.models import accelerate

        choices = Choices(**{"ops": accelerate.OPS, **chosen.DEFAULTS[kind]})
        return clearway_arm(scenario, model, replace(choices, **change))

    return Contender(name, title, prepare, (kind,))


CONTENDERS: dict[str, Contender] = {
    one.name: one
    for one in (
        _clearway(OWN, "Clearway as it is chosen for this machine"),
        _clearway("clearway-eager", "Clearway, every network called as it is", executor="eager"),
        _clearway("clearway-graph", "Clearway, CUDA graphs", CUDA, executor="cuda_graph"),
        _default("clearway-fused", "what CUDA runs by default, without graphs", "cuda", executor="eager"),
        _default("clearway-fused-graph", "what CUDA runs by default, whatever was selected", "cuda"),
        _clearway(
            "clearway-compiled",
            "Clearway, torch.compile of UNet and VAE decoder, channels last",
            (),
            executor="compiled",
            layout="channels_last",
        ),
        _diffusers("diffusers", "Diffusers' pipeline as its documentation shows it"),
        _diffusers("diffusers-clearway", "the same after clearway.accelerate(pipe)", CUDA, accelerated=True),
        _diffusers("diffusers-channels-last", "the same, UNet and VAE channels last", layout="channels_last"),
        _diffusers(
            "diffusers-compile-regional",
            "torch.compile of the UNet's repeated blocks",
            CUDA,
            layout="channels_last",
            scope="regional",
        ),
        _diffusers(
            "diffusers-compile",
            "torch.compile of UNet and VAE decoder, full graph, reduce-overhead on CUDA",
            CUDA,
            layout="channels_last",
            scope="full",
            mode="reduce-overhead",
        ),
        _diffusers(
            "diffusers-compile-dynamic",
            "torch.compile of UNet and VAE decoder, full graph, dynamic shapes",
            (),
            layout="channels_last",
            scope="full",
            dynamic=True,
        ),
        _diffusers(
            "diffusers-compile-max-autotune",
            "torch.compile of UNet and VAE decoder, full graph, max-autotune",
            (),
            layout="channels_last",
            scope="full",
            mode="max-autotune",
        ),
    )
}
