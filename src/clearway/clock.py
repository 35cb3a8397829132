"""Stage times of one generation: host clock, the device waited for at the end of each stage only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from clearway.device import Device, synchronize
from clearway.types import OnEvent, StageDone


class Clock:
    """Adds up the milliseconds of named stages and tells `on_event` when each ends."""

    def __init__(self, device: Device, on_event: OnEvent | None = None) -> None:
        self.timings_ms: dict[str, float] = {}
        self._device = device
        self._on_event = on_event

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times its body as stage `name`; a body that raises is not counted."""
        begun = time.perf_counter()
        yield
        synchronize(self._device)
        seconds = time.perf_counter() - begun
        self.timings_ms[name] = self.timings_ms.get(name, 0.0) + seconds * 1000
        if self._on_event:
            self._on_event(StageDone(name, seconds))
