"""The real evaluator: whole generations of the user's scenario, from the prompt's words to the PNG's bytes.

Each arm has modules of its own around the same weights, so that arms can take turns without undoing one
another; only what lays weights out anew holds them twice.
"""

from __future__ import annotations

import copy
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from clearway import device as machine
from clearway.execution import forget
from clearway.image import encode
from clearway.measure import shapes
from clearway.measure.candidates import Change, changed_precision
from clearway.measure.clock import HostTimer
from clearway.measure.memory import Meter
from clearway.measure.trial import TimeUp
from clearway.models import chosen
from clearway.models.accelerate import OPS, apply
from clearway.models.model import Model
from clearway.ops import state
from clearway.pipeline import generate
from clearway.request import Request
from clearway.types import Choices, Precision

if TYPE_CHECKING:
    import numpy as np

    from clearway.result import Result

PROMPTS = ("a red apple", "a cat", "a blue car", "a lighthouse by the sea")
"""Where the user gives none."""


class Generations:
    """Generations of `request` by `model`, over `prompts` and seeds counted from the request's (else 1).

    `load` gives the same model in other dtypes. Generation `number` has prompt number % len(prompts).
    """

    def __init__(
        self,
        model: Model,
        request: Request,
        prompts: Sequence[str] = PROMPTS,
        load: Callable[[Precision], Model] | None = None,
    ) -> None:
        self.model, self.prompts, self.load = model, tuple(prompts), load
        self.request = request if request.seed >= 0 else replace(request, seed=1)
        self.timer = HostTimer(model.device)
        self.plain_calls: int | None = None
        self._models = {model.precision: model}
        self._peaks: dict[str, int] = {}

    def order(self, number: int, change: Change) -> Request:
        """The request of generation `number`, changed."""
        seed = self.request.seed + number // len(self.prompts) * self.request.count
        prompt = self.prompts[number % len(self.prompts)]
        return replace(self.request, prompt=prompt, seed=seed, **change.request)

    def label(self, number: int) -> str:
        """Prompt and seed of generation `number`."""
        order = self.order(number, Change())
        return f"{order.prompt}, seed {order.seed}"

    def arm(self, change: Change) -> Run:
        """The change on modules of its own; raises what `accelerate.apply` and loading raise."""
        precision = changed_precision(self.model.precision, change)
        if precision not in self._models:
            assert self.load is not None, "a changed precision needs a way to load"
            self._models[precision] = self.load(precision)
        begun = time.perf_counter()
        source = self._models[precision]
        own = replace(source, unet=_twin(source.unet), vae=_twin(source.vae), choices=Choices())
        model = apply(own, change.choices())
        machine.synchronize(model.device)
        return Run(self, change, model, time.perf_counter() - begun)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Raises TimeUp after `seconds`, by an alarm, which only a Unix process's main thread can have."""
        here = threading.current_thread() is threading.main_thread()
        if not (here and hasattr(signal, "setitimer") and math.isfinite(seconds)):
            yield
            return

        def up(number: int, frame: Any) -> None:
            raise TimeUp(f"{seconds:.0f} s have passed")

        before = signal.signal(signal.SIGALRM, up)
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def micro(self, limit_s: float) -> list[dict[str, Any]]:
        """Every op's implementations at the shapes that one generation of this scenario runs."""
        run = self.arm(Change(ops=OPS))
        try:
            with shapes.listening() as heard:
                run(0)
            return shapes.timed(heard, self.timer, str(self.model.device), limit_s)
        finally:
            run.close()

    def peak(self, run: Run) -> int:
        """The driver's peak during a generation of this change, measured once."""
        key = json.dumps(run.change.as_dict(), sort_keys=True)
        if key not in self._peaks:
            machine.release_memory(self.model.device)
            with Meter(self.model.device) as meter:
                run(0)
                machine.synchronize(self.model.device)
            self._peaks[key] = meter.driver_peak_bytes
        return self._peaks[key]


class Run:
    """One change ready to run: see `trial.Prepared`."""

    def __init__(self, of: Generations, change: Change, model: Model, ready_s: float) -> None:
        self.of, self.change, self.model, self.ready_s = of, change, model, ready_s
        self.last: Result | None = None

    def __call__(self, number: int) -> np.ndarray:
        """Generation `number`: images uint8 (B, H, W, 3)."""
        with chosen.set_aside(), state.trying(self.change.tuned):
            self.last = generate(self.of.order(number, self.change), self.model)
        for image, text in zip(self.last.images, self.last.infotexts, strict=True):
            encode(image, "PNG", text)
        if self.change == Change():
            self.of.plain_calls = _calls(self.last)
        return self.last.images

    def proof(self) -> str | None:
        """Why the last generation did not run as the change says; None where it did."""
        change, result = self.change, self.last
        if result is None:
            return "nothing has run yet"
        ran = set(result.routes)
        executor = change.executor or "eager"
        if f"unet/{executor}" not in ran:
            return f"the UNet was not run by {executor} but by {_of('unet', ran)}"
        if executor == "eager":  # what is compiled or captured counts its ops in its own way
            ops = [op for op in change.ops if op != "cross_kv"]  # attention's processor does its work
            idle = [op for op in ops if not any(route.startswith(f"{op}/") for route in ran)]
            if idle and (len(ops) <= 2 or idle == ops):  # of many some may have no place in a model
                return f"this model has no layer that {idle[0]} is put in place of"
            for op, table in change.tuned.items():
                for name in set(table.values()):
                    if f"{op}/{name}" not in ran:
                        return f"{op} was not run by {name} but by {_of(op, ran)}"
        calls, plain = _calls(result), self.of.plain_calls
        fewer = plain is None or change.request or calls > plain
        if change.rows == "separate" and not fewer:
            return "guidance's rows were not separate: there were as many UNet calls as without"
        modules = list(self.model.unet.modules())
        if change.packed_qkv and not any(getattr(_processor(one), "packed", False) for one in modules):
            return "this model has no attention whose projections can be one"
        if change.layout == "channels_last" and not any(map(_last, self.model.unet.parameters())):
            return "no weight of the UNet lies channels last"
        wrong = [note for note in result.notes if "ran again in float32" in note]
        return wrong[0] if wrong and change.precision else None

    def peak_bytes(self) -> int:
        """The driver's peak during a generation."""
        return self.of.peak(self)

    def close(self) -> None:
        """Drops what executors built and gives unused memory back."""
        for part in (self.model.unet, self.model.vae):
            forget(part)
        self.last = None
        machine.release_memory(self.model.device)


def _twin(module: nn.Module) -> nn.Module:
    """A copy of the modules around the same weights: a layout changed in it leaves the original's alone."""
    shared: dict[int, Any] = {
        id(one): nn.Parameter(one.data, requires_grad=one.requires_grad) for one in module.parameters()
    }
    shared |= {id(one): one for one in module.buffers()}
    return copy.deepcopy(module, shared)


def _calls(result: Result) -> int:
    return sum(count for route, count in result.routes.items() if route.startswith("unet/"))


def _of(part: str, ran: set[str]) -> str:
    names = sorted(route.partition("/")[2] for route in ran if route.startswith(f"{part}/"))
    return ", ".join(names) or "nothing"


def _processor(module: nn.Module) -> Any:
    return module.__dict__.get("processor")


def _last(weight: torch.Tensor) -> bool:
    return (
        weight.dim() == 4
        and not weight.is_contiguous()
        and weight.is_contiguous(memory_format=torch.channels_last)
    )
