"""Which of cuBLASLt's choices a linear layer takes: found once on a machine, kept, and the same ever after.

A shape met for the first time is tried: its first choices beside F.linear, timed as _linear_trial.py says.
One that is faster by more than GAIN is taken and kept as its bytes, else F.linear, which is kept too. What is
kept is one file of products/ in the state folder for each device, version of cuBLASLt, dtype and shape,
which one process creates and no other replaces: all make the same choice, so that pictures stay the same bit
for bit. The values it was first met with have no part in it. A file that is damaged, or names a choice that
the heuristic does not have, is as none.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway import home
from clearway.ops import _cublaslt, _linear_trial, state
from clearway.ops._cublaslt import Choice, Failed, Shape
from clearway.ops._linear_trial import Call

FOLDER, SCHEMA = "products", 2
PLACES = 8
"""Files that may be damaged before nothing is kept of a shape any more."""
MOST = 12
"""Choices that are tried."""
GAIN = 0.03
"""Less than this, as a part of F.linear's time, is no reason to leave it."""
LINEAR = -1
"""F.linear's number among what is tried."""
_UNKNOWN = Choice(LINEAR, b"", 0)


class Binding(Protocol):
    """What _cublaslt.CublasLt does; a test gives one of its own."""

    def version(self) -> int:
        """The library's."""

    def choices(self, shape: Shape, most: int) -> list[Choice]:
        """At most so many, in the heuristic's order."""

    def run(self, shape: Shape, choice: Choice, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product by a choice, (rows, outputs); Failed where it is not to be had."""


def on_device(index: int) -> str:
    """A CUDA device by name and multiprocessors, of which a part of a device has fewer."""
    about = torch.cuda.get_device_properties(index)
    return f"{about.name}, {about.multi_processor_count} multiprocessors"


class Choices:
    """What is known of shapes in this process."""

    def __init__(
        self,
        binding: Binding,
        times: Callable[[Mapping[int, Sequence[Call]]], dict[int, float]] = _linear_trial.times,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        on_device: Callable[[int], str] = on_device,
        cache_bytes: Callable[[int], int] = _linear_trial.cache_bytes,
        current: Callable[[int], AbstractContextManager[Any]] = torch.cuda.device,
        settle: Callable[[], None] = _linear_trial.settle,
    ) -> None:
        self.binding = binding
        self._times, self._capturing = times, capturing
        self._on_device, self._cache_bytes = on_device, cache_bytes
        self._current, self._settle = current, settle
        self._held: dict[Shape, Choice | None] = {}
        self._lock = threading.RLock()

    def of(self, shape: Shape, device: torch.device) -> Choice | None:
        """What the shape takes on its device, found by a trial if need be; None where that is F.linear.

        While a graph is captured nothing is tried: F.linear it is, for this call. Within a self-test what is
        not known is the heuristic's first choice. Whatever goes wrong in a trial, want of memory too, it is
        F.linear in this process; only a fault of the device is raised.
        """
        try:
            return self._held[shape]
        except KeyError:
            with self._lock, self._current(shape.device):
                return self._found(shape, device)

    def _found(self, shape: Shape, device: torch.device) -> Choice | None:
        if shape in self._held:  # by another thread meanwhile
            return self._held[shape]
        if state.trusted():
            known, _ = self._read(shape)
            return next(iter(self.binding.choices(shape, 1)), None) if known is _UNKNOWN else known
        capturing = self._capturing()
        try:
            known, place = self._read(shape)
            if known is _UNKNOWN and not capturing:
                known = self._tried(shape, device, place)
        except (RuntimeError, MemoryError):
            known = None
            if not capturing:
                self._settle()
        if known is _UNKNOWN:
            return None
        self._held[shape] = known
        return known

    @torch.no_grad()
    def _tried(self, shape: Shape, device: torch.device, place: str) -> Choice | None:
        """The fastest, kept for processes to come; where another has kept one meanwhile, that."""
        x, weight, bias = _inputs(shape, device)
        expected = F.linear(x, weight, bias)
        offered = self.binding.choices(shape, MOST)
        fit = [one for one in offered if self._fits(shape, one, x, weight, bias, expected)]
        times = self._timed(shape, fit, x, weight, bias) if fit else {}
        best = min(times, key=times.__getitem__, default=LINEAR)
        chosen = None
        if best != LINEAR and times[best] < (1 - GAIN) * times[LINEAR]:
            chosen = next(one for one in fit if one.number == best)
        tried_at = ""
        while place != tried_at:  # the same again: the disk keeps nothing, it holds for this process
            if self._keep(shape, chosen, times, place):
                return chosen
            tried_at = place
            theirs, place = self._read(shape)
            if theirs is not _UNKNOWN:
                return theirs
        return chosen

    def _fits(
        self, shape: Shape, choice: Choice, x: Tensor, weight: Tensor, bias: Tensor | None, expected: Tensor
    ) -> bool:
        """Whether it can be run, gives the same bits again, and what F.linear gives but for rounding."""
        try:
            out, again = (self.binding.run(shape, choice, x, weight, bias) for _ in range(2))
        except Failed:
            return False
        apart = (out - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(out.dtype).tiny)
        return torch.equal(out, again) and float(apart) <= 2 * torch.finfo(out.dtype).eps

    def _timed(
        self, shape: Shape, fit: Sequence[Choice], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> dict[int, float]:
        """Milliseconds of F.linear and of each choice."""
        sets = _linear_trial.copies((x, weight), self._cache_bytes(shape.device))
        calls: dict[int, list[Call]] = {LINEAR: [functools.partial(F.linear, x, w, bias) for x, w in sets]}
        for choice in fit:
            run = functools.partial(self.binding.run, shape, choice)
            calls[choice.number] = [functools.partial(run, x, w, bias) for x, w in sets]
        return self._times(calls)

    def _key(self, shape: Shape) -> dict[str, Any]:
        """All that a choice depends on."""
        return {
            "device": self._on_device(shape.device),
            "cublaslt": self.binding.version(),
            "dtype": state.dtype_name(shape.dtype),
            "rows": shape.rows,
            "outputs": shape.outputs,
            "inputs": shape.inputs,
            "bias": shape.bias,
        }

    def _read(self, shape: Shape) -> tuple[Choice | None, str]:
        """What is kept for a shape: a choice, or None for F.linear; _UNKNOWN where there is nothing to be
        believed, and the name of the file that is to say it.

        A file that is not believed stays where it is and another stands in for it, which again one process
        creates: if each replaced it, several could end with several choices.
        """
        key = self._key(shape)
        for number in range(PLACES):
            place = _name(key, number)
            content = home.read_json(FOLDER, place)
            if content.get("schema") == SCHEMA and content.get("key") == key and "algorithm" in content:
                wanted = content["algorithm"]
                if wanted is None:
                    return None, place
                for one in self.binding.choices(shape, MOST):
                    if one.algorithm.hex() == wanted:
                        return one, place
            elif not os.path.lexists(home.path(FOLDER, place)):
                break
        return _UNKNOWN, place

    def _keep(self, shape: Shape, choice: Choice | None, times: Mapping[int, float], place: str) -> bool:
        """Whether it was this process that has said what the shape takes."""
        us = {"linear" if name == LINEAR else str(name): round(1e3 * ms, 3) for name, ms in times.items()}
        content = {
            "schema": SCHEMA,
            "key": self._key(shape),
            "number": None if choice is None else choice.number,
            "algorithm": None if choice is None else choice.algorithm.hex(),
            "us": us,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        return home.create_json(content, FOLDER, place)


def _inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """A layer of unit gain on normal values, the same each time: what is chosen must not hang on the values
    that a shape is first met with. Drawn by a generator of its own."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=shape.dtype, device=device, generator=generator)

    weight = normal(shape.outputs, shape.inputs).mul_(shape.inputs**-0.5)
    return normal(shape.rows, shape.inputs), weight, normal(shape.outputs) if shape.bias else None


def _name(key: Mapping[str, Any], number: int = 0) -> str:
    """Of the file for a key, or of those that stand in for it."""
    whole = [SCHEMA, key, number]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16] + ".json"


@functools.cache
def choices() -> Choices:
    """Those of this process; Failed where there is no cuBLASLt."""
    return Choices(_cublaslt.binding())
