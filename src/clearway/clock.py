"""Stage times of one generation, without making the host wait for a CUDA device between stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from clearway.device import Device, between, mark, synchronize
from clearway.types import OnEvent, StageDone

_waiting: ContextVar[bool] = ContextVar("clearway_clock_waiting", default=False)


@contextmanager
def waiting() -> Iterator[None]:
    """Within it each stage ends when the device has done it, on CUDA too: for who watches from outside."""
    token = _waiting.set(True)
    try:
        yield
    finally:
        _waiting.reset(token)


class Clock:
    """Adds up the milliseconds of named stages and tells `on_event` when each ends.

    On CUDA a stage is marked in the device's own work and nothing is waited for: what the host prepares for
    one stage, it prepares while the device is at the one before. Elsewhere the end of a stage waits for the
    device.
    """

    def __init__(self, device: Device, on_event: OnEvent | None = None) -> None:
        self._ms: dict[str, float] = {}
        self._marks: list[tuple[str, Any, Any]] = []
        self._device = device
        self._on_event = on_event
        self._waits = device.kind != "cuda" or _waiting.get()

    @property
    def timings_ms(self) -> dict[str, float]:
        """Milliseconds by stage, on CUDA of the device's time; waits until the last stage is done."""
        for name, first, last in self._marks:
            self._add(name, between(first, last))
        self._marks.clear()
        return self._ms

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times its body as stage `name`; a body that raises is not counted."""
        begun = time.perf_counter()
        first = None if self._waits else mark(self._device)
        yield
        if self._waits:
            synchronize(self._device)
            seconds = time.perf_counter() - begun
            self._add(name, seconds)
        else:
            self._marks.append((name, first, mark(self._device)))
            seconds = time.perf_counter() - begun
        if self._on_event:
            self._on_event(StageDone(name, seconds))

    def _add(self, name: str, seconds: float) -> None:
        self._ms[name] = self._ms.get(name, 0.0) + seconds * 1000
