"""generate(request, model) -> Result: words in, pictures with their parameters out, in eight steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from clearway import __version__, infotext, sampling
from clearway import device as machine
from clearway.clock import Clock
from clearway.conditioning import encode
from clearway.device import Device
from clearway.errors import RequestError, UnavailableError
from clearway.execution import executor
from clearway.guidance import Guided, below
from clearway.image.decode import to_uint8
from clearway.models import Decoded, Model, UNetDenoiser, chosen, decode, foreseen, load, place
from clearway.ops import budget, state, verdicts
from clearway.ops.contract import recording
from clearway.prompt import plan, unbuilt
from clearway.request import Request
from clearway.result import Result, joined
from clearway.types import MIXED, Choices, OnEvent, PicturesDone, Precision, StepDone

SAMPLER_OPTIONS = ("eta", "s_noise", "s_churn", "s_tmin", "s_tmax")
SCHEDULE_OPTIONS = ("sigma_min", "sigma_max", "rho")
NAMES = {
    "text_encoder": "the text encoder",
    "text_encoder_2": "the second text encoder",
    "unet": "the UNet",
    "vae": "the VAE",
}
"""What notes call a part of a model."""

ASKED_FIRST = {"geglu_linear": "geglu"}
"""Ops that run, and are counted, only where they have a way of their own; else the one named runs."""


@torch.inference_mode()
def generate(
    request: Request, model: Model | str | Path = "embedded", on_event: OnEvent | None = None
) -> Result:
    """The pictures that `request` asks for, drawn by `model` (a loaded one, or what `load` takes).

    `on_event` hears of stages, steps and finished groups of pictures; it may raise `Cancelled` at a step.
    Raises RequestError for an unknown sampler, schedule or option, or arguments of another kind, and
    UnavailableError for want of memory.
    """
    if not isinstance(request, Request):
        raise RequestError(
            f"a Request was to be drawn and {type(request).__name__} was given; "
            'clearway.Request(prompt="...") makes one'
        )
    model = model if isinstance(model, Model) else load(model)
    request = _resolved(check(chosen.filled(request, model)), model)
    with chosen.in_use(model, request.width, request.height) as run:
        return _drawn(request, run, on_event, model)


def _drawn(request: Request, model: Model, on_event: OnEvent | None, given: Model) -> Result:
    """The eight steps, for a request with nothing left open.

    `given` is the model as the caller has it, which keeps its hash for the next generation.
    """
    sampler, schedule = sampling.resolve(str(request.sampler), request.schedule)
    width, height, steps, cfg_scale = request.width, request.height, request.steps, request.cfg_scale
    assert width and height and steps and cfg_scale is not None  # resolved() leaves nothing open
    clock, routes, results = Clock(model.device, on_event), Counter[str](), list[Result]()
    dtype = machine.dtype(model.precision.sampling)
    hashing = _hashing(given)
    placed = place(model, request)
    seeds, size = request.seeds(), placed.batch
    groups = [seeds[start : start + size] for start in range(0, len(seeds), size)]

    tuned = chosen.tuned(model, width, height)
    run = _Runner(model.choices, routes, placed.executor)
    unet, vae = run(model.unet, "unet"), run(model.vae.decode, "vae")

    with (
        machine.capped(model.device, model.memory_limit_bytes),
        verdicts.leaving(placed.spare_bytes),
        machine.tf32(model.device, model.precision.tf32),
        nullcontext() if tuned is None else state.trying(tuned),
        recording(routes),
        budget.sampled(model.device, request.memory_budget_bytes) as memory,
        _memory_errors(request, model.device),
    ):
        # 1. the words: which text at which denoiser call, with which weights
        with clock.stage("prompt"):
            words = plan(request.prompt, request.negative_prompt)
            unread = tuple(
                f"{form} is not built yet: it was read as text" for form in unbuilt(request.prompt)
            )
        # 2. what the network reads; the first time its kernels are begun to be built beside it
        with clock.stage("text"), placed.at("text"):
            if not placed.moves:
                sides = height // model.latent_factor, width // model.latent_factor
                halves = 1 if cfg_scale == 1 or placed.rows(model.choices.rows) == "separate" else 2
                foreseen.begin(model.unet, model.vae, *sides, halves * len(groups[0]))
            positive, negative = encode(
                words, model, width=width, height=height, clip_skip=request.clip_skip, run=run
            )
        # 3. the noise levels, which stay on the CPU
        with clock.stage("schedule"):
            sigmas = sampling.sigmas_for(
                sampler, schedule, steps, model.sigmas, **_given(request, SCHEDULE_OPTIONS)
            )
        for number, group in enumerate(groups, 1):
            # 4. the starting noise, one generator a picture
            with clock.stage("noise"):
                noise = sampling.ImageNoise(
                    group,
                    (model.latent_channels, height // model.latent_factor, width // model.latent_factor),
                    drawn_on=machine.noise_device(model.device, request.rng),
                    device=str(model.device),
                    dtype=dtype,
                )
                x = noise.initial() * sampling.initial_scale(sampler, sigmas)
                step_noise = sampling.noise_for(sampler, noise, x, sigmas)
            # 5. the network as a function of (x, sigma), guidance bound to it
            network = UNetDenoiser(unet, model.sigmas, model.prediction, model.dtype)
            skip = below(request.ngms, request.ngms_all_steps)
            rows = placed.rows(model.choices.rows)
            denoise = Guided(network, positive, negative, cfg_scale, skip, rows)
            # 6. the loop: nothing in it waits for the device
            with clock.stage("sampling"), placed.at("unet"):
                x = sampling.sample(
                    sampler.label,
                    denoise,
                    x,
                    sigmas,
                    noise=step_noise,
                    on_step=_teller(on_event, number, len(groups)),
                    **_given(request, SAMPLER_OPTIONS),
                )
                latents = sampling.finish(x, sigmas)
            # 7. pixels, one picture at a time
            with clock.stage("vae"), placed.at("vae"):
                decoded = decode(model, latents, vae, placed.tiled)
                images = to_uint8(decoded.pixels)
            # 8. the result, with everything that repeats it
            if hashing is not None:
                hashing.join()
            results.append(
                Result(
                    images=images,
                    seeds=group,
                    infotexts=tuple(
                        _infotext(request, seed, given, schedule, denoise.skipped > 0, memory, decoded, index)
                        for index, seed in enumerate(group)
                    ),
                    request=request,
                    timings_ms=dict(clock.timings_ms),
                    routes=dict(routes),
                    notes=(
                        *unread,
                        *placed.notes,
                        *decoded.notes,
                        *run.sentences(),
                        *_losses(routes, model.precision),
                    ),
                    choices=model.choices,
                )
            )
            if on_event:
                on_event(PicturesDone(results[-1]))
    return joined(results, told=on_event is not None)


def check(request: Request) -> Request:
    """The request under its sampler's and schedule's own names, once they and their options exist.

    Cheap, no model: what a request leaves open is checked again when the model has filled it in. Raises
    RequestError in one sentence.
    """
    if request.sampler is not None:
        sampler, schedule = sampling.resolve(request.sampler, request.schedule)
        sampling.check_options(sampler, schedule, _given(request, (*SAMPLER_OPTIONS, *SCHEDULE_OPTIONS)))
        # the WebUI takes any name it does not know for DPM++ 2M: pictures carry the names it knows
        request = replace(request, sampler=sampler.label, schedule=schedule)
    elif request.schedule is not None:
        sampling.resolve("Euler", request.schedule)
    if request.sigma_min and request.sigma_max and request.sigma_min >= request.sigma_max:
        raise RequestError(f"sigma_min {request.sigma_min:g} must be below sigma_max {request.sigma_max:g}")
    return request


def _losses(routes: Mapping[str, int], precision: Precision) -> tuple[str, ...]:
    """What this machine lost that concerns a generation: of the ops that it used, in a dtype that it uses.

    Other work in the process may have lost more. float32 is always one: parts are raised to it.
    """
    used = {precision.unet, precision.text_encoder, precision.vae, precision.sampling, "float32"}
    if precision.vae == MIXED:
        used.add("float16")
    ops = {key.partition("/")[0] for key in routes}
    return state.losses(ops | {first for first, op in ASKED_FIRST.items() if op in ops}, used)


def _infotext(
    request: Request,
    seed: int,
    model: Model,
    schedule: str,
    ngms_used: bool,
    memory: budget.Sample,
    decoded: Decoded,
    index: int,
) -> str:
    """The parameters of one picture as text; the memory budget where it decided how attention ran, and the
    VAE as it really decoded this one."""
    decided = memory.pinned or not math.isinf(memory.smallest_refused)
    values = infotext.parameters(
        request,
        seed=seed,
        version=__version__,
        model_name=model.name,
        model_hash=model.hash,
        schedule_label=schedule,
        precision=replace(model.precision, vae=decoded.dtypes[index]),
        ngms_used=ngms_used,
        memory_budget_bytes=int(memory.limit_bytes) if decided else None,
        vae_tiling=decoded.tiles[index],
    )
    return infotext.build(request.prompt, request.negative_prompt, values)


def _hashing(model: Model) -> Thread | None:
    """Computes the model's hash beside the drawing, unless it is there: the first time it reads through
    gigabytes."""
    if model.hash_is_known:
        return None

    def work() -> None:
        with suppress(Exception):  # whoever asks for it gets the error
            model.hash  # noqa: B018

    thread = Thread(target=work, name="clearway-hash", daemon=True)
    thread.start()
    return thread


def _resolved(request: Request, model: Model) -> Request:
    """The request with the model's defaults in it; RequestError naming the model where those do not exist."""
    try:
        return check(request.resolved(model.defaults))
    except RequestError as error:
        raise RequestError(f"the defaults of model {model.name!r} do not fit: {error}") from error


@dataclass(slots=True)
class _Runner:
    """Makes the executors of one generation: a model's parts as its choices run them.

    `placed(part, name)` is the executor that memory leaves for it. Conditionings are never changed in place.
    A text encoder is not compiled: it runs once a prompt, and compiling costs more than all those calls.
    """

    choices: Choices
    routes: Counter[str]
    placed: Callable[[str, str], str]
    made: dict[str, Any] = field(default_factory=dict)

    def __call__(self, run: Callable[..., Any], part: str) -> Callable[..., Any]:
        name, fixed = self.choices.executor, self.choices.routes
        if name == "compiled" and part.startswith("text_encoder"):
            name = "eager"
        name = self.placed(part, name)
        promised = ("encoder_hidden_states",)
        made = executor(name, run, part, self.routes, fixed=fixed, promised=promised)
        self.made[part] = made
        return made

    def sentences(self) -> tuple[str, ...]:
        """What did not run as it was meant to, and why."""
        return tuple(told for part, run in self.made.items() for told in run.sentences(NAMES[part]))


def _given(request: Request, names: tuple[str, ...]) -> dict[str, float]:
    """Those of the request's named options that it does not leave open."""
    return {name: value for name in names if (value := getattr(request, name)) is not None}


def _teller(on_event: OnEvent | None, group: int, groups: int) -> sampling.OnStep | None:
    if on_event is None:
        return None

    def tell(step: int, steps: int, x: torch.Tensor, sigma: float, denoised: torch.Tensor) -> None:
        on_event(StepDone(step, steps, sigma, denoised, group, groups))

    return tell


@contextmanager
def _memory_errors(request: Request, device: Device) -> Iterator[None]:
    """Turns running out of memory into a sentence that says what would fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not machine.is_out_of_memory(error):
            raise
        machine.release_memory(device)
        free = machine.memory(device).available_bytes / 2**30
        raise UnavailableError(
            f"{request.width} x {request.height} in a batch of {request.batch_size} needs more memory than "
            f"{device} has ({free:.1f} GiB free); a smaller size, batch size 1 or float16 would need less"
        ) from error
