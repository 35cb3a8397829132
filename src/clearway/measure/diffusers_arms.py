"""Diffusers' own pipelines as contenders, on the same weights, noise and noise levels as Clearway.

The scheduler is Diffusers' own class for the sampler. Its sigmas and timesteps are replaced by the scenario's
(Diffusers rounds the timesteps of DPM++ 2M to whole ones), and the SDE scheduler's Brownian path by the one
that Clearway draws from, so that pictures can be compared; neither adds work, and that path takes the host a
third of the time of torchsde's, which Diffusers would have. Latents are in the UNet's dtype, as Diffusers has
them, and the VAE's dtype is the scenario's (`force_upcast` is off). PNGs are written by Pillow as it comes,
which is what a user of Diffusers has. Its pictures are rounded where the WebUI's and Clearway's are cut off,
so equal pixels differ by up to 1/255.
"""

from __future__ import annotations

import functools
import io
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clearway import device as machine
from clearway import sampling
from clearway.errors import UnavailableError
from clearway.execution import automatic
from clearway.measure.compiled import Compiled, once
from clearway.measure.contenders import Arm, Probe, isolated
from clearway.models import Model, UNetDenoiser, library
from clearway.models._mixed import halves, whole
from clearway.models._report import Report
from clearway.models.accelerate import accelerate
from clearway.prompt import plan
from clearway.types import MIXED

if TYPE_CHECKING:
    from torch import Tensor

    from clearway.measure.scenario import Scenario

SCHEDULERS = {
    "Euler": "EulerDiscreteScheduler",
    "DPM++ 2M": "DPMSolverMultistepScheduler",
    "DPM++ SDE": "DPMSolverSDEScheduler",
}


def arm(scenario: Scenario, model: Model, *, accelerated: bool = False, **how: Any) -> Arm:
    """A Diffusers arm; `how` is what `Compiled` takes, `accelerated` is by `clearway.accelerate(pipe)`."""
    if model.precision.vae == MIXED and scenario.what in ("whole", "vae"):
        raise UnavailableError(
            "Diffusers has no VAE of mixed precision; its figures are those of a float32 or float16 VAE"
        )
    if accelerated and scenario.what != "whole":
        raise UnavailableError(
            f"clearway.accelerate is measured with whole pipelines, and {scenario.name} calls one network"
        )
    setup = Pipeline(scenario, model, Compiled(**how), accelerated=accelerated)
    if scenario.what == "whole":
        return setup.arm()
    from clearway.measure.networks import diffusers_network

    return diffusers_network(scenario, model, setup.parts, setup.compiled)


def reference(scenario: Scenario, model: Model, place: str) -> Pipeline:
    """The eager pipeline in float32 on `place` ("cpu" or a device): what every arm is checked against."""
    return Pipeline(scenario, model, Compiled(), dtype="float32", place=place)


@dataclass(slots=True)
class Parts:
    """The networks of one arm, its own module objects."""

    unet: Any
    vae: Any
    texts: tuple[Any, ...]
    place: str
    compiled: Any = None
    """The UNet as it was compiled, where it was; the VAE's decoder is in its place in `vae`."""


class Pipeline:
    """A Diffusers pipeline over a model's weights; UnavailableError where it cannot do the same work."""

    def __init__(
        self,
        scenario: Scenario,
        model: Model,
        compiled: Compiled,
        *,
        dtype: str | None = None,
        place: str | None = None,
        accelerated: bool = False,
    ) -> None:
        self.scenario, self.model, self.compiled = scenario, model, compiled
        self.accelerated, self.report, self.png_s = accelerated, Report(), list[float]()
        if scenario.what == "whole":
            _check(scenario, model)
        self.parts = self._parts(dtype, place or str(model.device))
        self.calls = 0
        self._brownian: Callable[[Any, Any], Tensor] | None = None

    def _parts(self, dtype: str | None, place: str) -> Parts:
        """This arm's networks as they are to lie in memory; a compiled arm's can be an earlier scenario's."""

        def make() -> tuple[Parts, Model]:  # with the model, whose id stands in the key
            made = _parts(self.model, dtype, place)
            self.compiled.laid_out(made)
            return made, self.model

        one, how = self.scenario, self.compiled
        if how.scope is None:
            return make()[0]
        work = id(self.model), one.width, one.height, one.batch_size, one.cfg_scale == 1
        key = dtype, place, how.layout, how.scope, how.mode, how.dynamic
        parts: Parts = once(work, key, make)[0]
        how.placed(place)  # and not laid out again: a graph reads its weights where they lie
        return parts

    def arm(self) -> Arm:
        """The whole generation as an arm."""
        self._make()
        return Arm(
            call=self.compiled.watched(self.call),
            probe=self.probe,
            proof=self.proof,
            routes=self.routes,
            intended=self.intended,
            settle=self.settle,
            png_s=self.png_s,
            close=self.compiled.close,
        )

    def pipe(self) -> Any:
        """The pipeline itself, with the scenario's scheduler in it."""
        self._make()
        return self._pipe

    def settle(self) -> None:
        """Forgets what ran so far, and why: graphs are captured in the first calls."""
        self.png_s.clear()
        for ran in self.report.ran.values():
            ran.calls.clear()
            ran.reasons.clear()

    def routes(self) -> dict[str, int]:
        """How often what ran: of the pipeline as it is counted by the steps of its probe."""
        ran = {key: count for one in self.report.ran.values() for key, count in one.calls.items()}
        return ran or {f"unet/diffusers {self.compiled.label}": self.calls}

    def intended(self) -> dict[str, Any]:
        """What is to run, in JSON values."""
        import diffusers

        return {
            "engine": f"diffusers {diffusers.__version__}",
            "pipeline": type(self._pipe).__name__,
            "scheduler": f"{type(self._pipe.scheduler).__name__} with the scenario's sigmas",
            "latents": str(self.parts.unet.dtype).removeprefix("torch."),
            "precision": asdict(self.model.precision),
            "png": "Pillow",
            **self.compiled.intended(),
            **self._placed(),
        }

    def _placed(self) -> dict[str, Any]:
        """What `clearway.accelerate` put in place, by how many modules have it, and what it left alone."""
        if not self.accelerated:
            return {}
        placed = {what: len(names) for what, names in self.report.placed.items()}
        left = {why: len(names) for why, names in self.report.left.items()}
        layout = {"layout": "channels_last"} if "channels_last" in placed else {}
        return {**layout, "accelerated": placed, "left": left}

    def call(self, round: int, side_px: int = 0, on_step: Callable[..., Any] | None = None) -> np.ndarray:
        """Draws one round's pictures and makes them PNG bytes; uint8 (B, H, W, 3)."""
        with machine.tf32(self.model.device, self.model.precision.tf32):
            return self._draw(round, side_px, on_step)

    def _draw(self, round: int, side_px: int, on_step: Callable[..., Any] | None) -> np.ndarray:
        request = self.scenario.request(round, side_px)
        seeds, size = request.seeds(), request.batch_size or 1
        pictures: list[Any] = []
        for start in range(0, len(seeds), size):
            group = seeds[start : start + size]
            latents = self._start(group, request.width or 0, request.height or 0)
            more: dict[str, Any] = {"callback_on_step_end": on_step} if on_step else {}
            pictures += self._pipe(
                prompt=request.prompt,
                negative_prompt=request.negative_prompt or None,
                width=request.width,
                height=request.height,
                num_inference_steps=request.steps,
                guidance_scale=request.cfg_scale,
                num_images_per_prompt=len(group),
                latents=latents,
                **more,
            ).images
        begun = time.perf_counter()
        for picture in pictures:
            picture.save(io.BytesIO(), "PNG")
        self.png_s.append(time.perf_counter() - begun)
        return np.stack([np.asarray(picture) for picture in pictures])

    def probe(self, round: int) -> Probe:
        """One round's pictures, final latents and how many UNet calls they took."""
        self._make()
        steps: list[Tensor] = []
        finals: list[Tensor] = []
        timesteps = len(self._timesteps)

        def listen(pipe: Any, index: int, timestep: Any, given: Mapping[str, Any]) -> dict[str, Any]:
            steps.append(timestep)
            if index == timesteps - 1:
                finals.append(given["latents"].float().clone())
            return {}

        images = self.call(round, on_step=listen)
        self.calls += len(steps)
        return Probe(images, torch.cat(finals), len(steps))

    def proof(self) -> str | None:
        """Why the intended path did not run; None where it did."""
        for part, wanted in (("unet", self.model.precision.unet), ("vae", self.model.precision.vae)):
            found = str(getattr(self.parts, part).dtype).removeprefix("torch.")
            if found != wanted:
                return f"the {part} was to run in {wanted} and is in {found}"
        return self.compiled.proof() or self._unaccelerated()

    def _unaccelerated(self) -> str | None:
        """Why what `clearway.accelerate` put in place did not run; None where it did or was not asked for."""
        if not self.accelerated:
            return None
        if not self.report.placed:
            return "clearway.accelerate found nothing in this pipeline to put an op in place of"
        wanted = "flat" if "flat" in self.report.placed else automatic(self.model.device.kind)
        for part in ("unet", "vae.decoder") if wanted != "eager" else ():
            ran = self.report.ran.get(part)
            if ran is None:
                return f"{part} was to run by {wanted}, and no executor is in place at it"
            others = sum(count for key, count in ran.calls.items() if not key.endswith(f"/{wanted}"))
            if others or not sum(ran.calls.values()):
                why = "; ".join(ran.reasons) or "nothing says why"
                return f"{part} was to run by {wanted} and ran {others} times by something else: {why}"
        return None

    @functools.cached_property
    def _sigmas(self) -> Tensor:
        sampler, schedule = sampling.resolve(self.scenario.sampler, self.scenario.schedule)
        return sampling.sigmas_for(sampler, schedule, self.scenario.steps, self.model.sigmas)

    def _make(self) -> None:
        """Builds the pipeline, and compiles what is to be compiled."""
        if hasattr(self, "_pipe"):
            return
        from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

        parts, model = self.parts, self.model
        tokenizers = [_tokenizer(model, index) for index in range(len(parts.texts))]
        shared = {
            "vae": parts.vae,
            "unet": parts.unet,
            "scheduler": self._scheduler(),
            "text_encoder": parts.texts[0],
            "tokenizer": tokenizers[0],
        }
        self._pipe: Any
        if model.family.name == "sdxl":
            self._pipe = StableDiffusionXLPipeline(
                **shared, text_encoder_2=parts.texts[1], tokenizer_2=tokenizers[1], add_watermarker=False
            )
        else:
            self._pipe = StableDiffusionPipeline(
                **shared, safety_checker=None, feature_extractor=None, requires_safety_checker=False
            )
        self._pipe.set_progress_bar_config(disable=True)
        self.compiled.compile(self._pipe, parts)
        if self.accelerated:
            self.report = accelerate(self._pipe)
        if parts.vae.dtype != parts.unet.dtype:
            inner = self._pipe.vae.decode
            # the pipeline gives the VAE latents in the UNet's dtype and would fail on a float32 VAE
            self._pipe.vae.decode = lambda latents, **more: inner(latents.to(parts.vae.dtype), **more)

    def _scheduler(self) -> Any:
        """Diffusers' scheduler for the sampler, with this schedule and this noise put in."""
        import diffusers

        model, levels = self.model, [float(sigma) for sigma in self._sigmas]
        kept = 1 / (1 + model.sigmas.double() ** 2)  # the cumulative alphas
        betas = 1 - kept / torch.cat([torch.ones(1, dtype=kept.dtype), kept[:-1]])
        made: Any = getattr(diffusers, SCHEDULERS[self._sampler.label])(
            num_train_timesteps=len(betas),
            trained_betas=betas.tolist(),
            prediction_type=model.prediction,
            timestep_spacing="linspace",
            steps_offset=1,
        )
        table = UNetDenoiser(lambda *_: None, model.sigmas, model.prediction, torch.float32)
        sigmas, times = self._sigmas.clone(), levels[:-1]
        if self._sampler.second_order:  # two calls a step, the second half-way in log sigma; one at the end
            sigmas = torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2), sigmas[-1:]])
            middles = [math.sqrt(a * b) for a, b in pairwise(levels[:-1])]
            times = [time for pair in zip(levels, middles, strict=False) for time in pair] + levels[-2:-1]
        self._timesteps = [table.timestep(sigma) for sigma in times]
        stock = made.set_timesteps

        def set_timesteps(*given: Any, device: Any = None, **more: Any) -> None:
            stock(*given, device=device, **more)
            made.sigmas = sigmas
            made.timesteps = torch.tensor(self._timesteps, dtype=torch.float32, device=device)
            made.noise_sampler = self._brownian

        made.set_timesteps = set_timesteps
        return made

    @property
    def _sampler(self) -> sampling.Sampler:
        return sampling.resolve(self.scenario.sampler, self.scenario.schedule)[0]

    def _start(self, seeds: tuple[int, ...], width: int, height: int) -> Tensor:
        """The starting latents, scaled as the pipeline expects them; draws what Clearway draws."""
        model, place = self.model, self.parts.place
        drawn_on = machine.noise_device(model.device, "GPU")
        shape = (model.latent_channels, height // model.latent_factor, width // model.latent_factor)
        noise = sampling.ImageNoise(seeds, shape, drawn_on=drawn_on, device=str(model.device))
        first = noise.initial()
        if self._sampler.noise == "brownian":
            path = sampling.noise_for(self._sampler, noise, first, self._sigmas)
            self._brownian = lambda sigma, after: path(float(sigma), float(after)).to(
                place, self.parts.unet.dtype
            )
        return (first * self._scale).to(place, self.parts.unet.dtype)

    @functools.cached_property
    def _scale(self) -> float:
        """What N(0, 1) is multiplied by before the pipeline multiplies it by the scheduler's own factor."""
        scheduler, start = self._scheduler(), sampling.initial_scale(self._sampler, self._sigmas)
        scheduler.set_timesteps(self.scenario.steps)
        if type(scheduler).__name__ == "DPMSolverMultistepScheduler":  # x / sqrt(1 + sigma²) in its terms
            start /= math.sqrt(1 + float(self._sigmas[0]) ** 2)
        return start / float(scheduler.init_noise_sigma)


def _check(scenario: Scenario, model: Model) -> None:
    """UnavailableError where Diffusers' pipeline would do other work than the scenario asks for."""
    from diffusers.utils import is_torchsde_available

    sampler, schedule = sampling.resolve(scenario.sampler, scenario.schedule)
    if sampler.label not in SCHEDULERS:
        raise UnavailableError(
            f"no Diffusers scheduler is matched to {sampler.label!r}; those for {', '.join(SCHEDULERS)} are"
        )
    if sampler.noise == "brownian" and not is_torchsde_available():
        raise UnavailableError(
            f"Diffusers' {SCHEDULERS[sampler.label]} needs torchsde, and it is not here: pip install torchsde"
        )
    if float(sampling.sigmas_for(sampler, schedule, scenario.steps, model.sigmas)[-1]) != 0:
        raise UnavailableError(f"Diffusers' schedulers end at sigma 0, and {schedule!r} does not")
    if scenario.ngms:
        raise UnavailableError(
            f"Diffusers has no NGMS, so it would do more work; its figures are in the twin, {scenario.twin}"
        )
    words = plan(scenario.prompt, scenario.negative)
    pieces = [piece for side in (words.positive, words.negative) for span in side for piece in span.pieces]
    counts = [len(model.tokenizers[0].encode(text)) for text in (scenario.prompt, scenario.negative)]
    spans = len(words.positive) + len(words.negative)
    if spans > 2 or max(counts) > 75 or any(one.weight != 1 or one.is_break for one in pieces):
        raise UnavailableError(
            "Diffusers reads neither stress nor timing in a prompt, nor more than 75 tokens: other work"
        )


def _parts(model: Model, dtype: str | None, place: str) -> Parts:
    """The model's networks as modules of their own; with `dtype` or another `place` they are copies."""

    def own(module: Any) -> Any:
        found = isolated(module)
        if module is model.vae and halves(module):
            whole(found)  # with the weights that were read
        if dtype is not None:  # Diffusers' own `to` prints advice
            torch.nn.Module.to(found, device=place, dtype=machine.dtype(dtype))
        return found

    vae = own(model.vae)
    vae.register_to_config(force_upcast=False)  # the scenario says the VAE's dtype, for every arm
    return Parts(own(model.unet), vae, tuple(own(one) for one in model.text_encoders), place)


def _tokenizer(model: Model, index: int) -> Any:
    """transformers' tokenizer of one text encoder: the model's own folder's, else CLIP's vocabulary."""
    from transformers import CLIPTokenizer

    own = model.path / ("tokenizer_2" if index else "tokenizer")
    folder = own if own.is_dir() else library.embedded_folder() / "tokenizer"
    pad = {"pad_token": "!"} if model.family.text_encoders[index].pad == "zero" else {}
    return CLIPTokenizer.from_pretrained(str(folder), **pad)
