"""Which of cuBLASLt's choices a linear layer takes: found once on a machine, kept, and the same ever after.

A shape met for the first time is tried: its first choices beside F.linear, timed as _linear_trial.py says.
One that is faster by more than GAIN is taken and kept as its bytes, else F.linear, which is kept too. What is
kept is one file of products/ in the state folder for each device, version of cuBLASLt, dtype and shape;
processes after it make the same choice, so that pictures stay the same bit for bit. A file that is damaged,
or names a choice that the heuristic does not have, is as none.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway import device, home
from clearway.ops import _cublaslt, _linear_trial, state
from clearway.ops._cublaslt import Choice, Failed, Shape
from clearway.ops._linear_trial import Call

FOLDER, SCHEMA = "products", 1
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
    ) -> None:
        self.binding = binding
        self._times, self._capturing = times, capturing
        self._on_device, self._cache_bytes = on_device, cache_bytes
        self._held: dict[Shape, Choice | None] = {}
        self._lock = threading.RLock()

    def of(self, shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Choice | None:
        """What the shape takes, found by a trial with these tensors if need be; None where that is F.linear.

        While a graph is captured nothing is tried: F.linear it is, for this call. Within a self-test what is
        not known is the heuristic's first choice.
        """
        try:
            return self._held[shape]
        except KeyError:
            with self._lock:
                return self._found(shape, x, weight, bias)

    def _found(self, shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Choice | None:
        if shape in self._held:  # by another thread meanwhile
            return self._held[shape]
        known = self._read(shape)
        if known is _UNKNOWN:
            if state.trusted():
                return next(iter(self.binding.choices(shape, 1)), None)
            if self._capturing():
                return None
            known = self._tried(shape, x, weight, bias)
        self._held[shape] = known
        return known

    @torch.no_grad()
    def _tried(self, shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Choice | None:
        """The fastest, kept for processes to come; where another has kept one meanwhile, that."""
        try:
            expected = F.linear(x, weight, bias)
            if not expected.isfinite().all():  # nothing can be compared with it
                return None
            fit = [
                one for one in self.binding.choices(shape, MOST)
                if self._fits(shape, one, x, weight, bias, expected)
            ]  # fmt: skip
            times = self._timed(shape, fit, x, weight, bias) if fit else {}
        except RuntimeError as error:
            if not device.is_out_of_memory(error):
                raise
            return None  # for this process
        best = min(times, key=times.__getitem__, default=LINEAR)
        chosen = None
        if best != LINEAR and times[best] < (1 - GAIN) * times[LINEAR]:
            chosen = next(one for one in fit if one.number == best)
        theirs = self._read(shape)
        if theirs is not _UNKNOWN:
            return theirs
        self._keep(shape, chosen, times)
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

    def _read(self, shape: Shape) -> Choice | None:
        """What is kept for a shape: a choice, or None for F.linear; _UNKNOWN where there is nothing to be
        believed."""
        key = self._key(shape)
        content = home.read_json(FOLDER, _name(key))
        if content.get("schema") != SCHEMA or content.get("key") != key or "algorithm" not in content:
            return _UNKNOWN
        wanted = content["algorithm"]
        if wanted is None:
            return None
        found = (one for one in self.binding.choices(shape, MOST) if one.algorithm.hex() == wanted)
        return next(found, _UNKNOWN)

    def _keep(self, shape: Shape, choice: Choice | None, times: Mapping[int, float]) -> None:
        key = self._key(shape)
        us = {"linear" if name == LINEAR else str(name): round(1e3 * ms, 3) for name, ms in times.items()}
        content = {
            "schema": SCHEMA,
            "key": key,
            "number": None if choice is None else choice.number,
            "algorithm": None if choice is None else choice.algorithm.hex(),
            "us": us,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        home.write_json(content, FOLDER, _name(key))


def _name(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16] + ".json"


@functools.cache
def choices() -> Choices:
    """Those of this process; Failed where there is no cuBLASLt."""
    return Choices(_cublaslt.binding())
