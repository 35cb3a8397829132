"""A clock for tests that moves only when told, and arms with the noise of a real machine."""

import math
import random
from collections.abc import Callable


class FakeTimer:
    """`clearway.measure.clock.Timer`: `spend` moves it; with `events` it also has device times."""

    def __init__(self, events: bool = False) -> None:
        self.seconds = 0.0
        self.device_seconds = 0.0
        self.waits = 0
        self._events = events

    def spend(self, seconds: float, device_seconds: float | None = None) -> None:
        self.seconds += seconds
        self.device_seconds += seconds if device_seconds is None else device_seconds

    def now(self) -> float:
        return self.seconds

    def synchronize(self) -> None:
        self.waits += 1

    def event(self) -> float | None:
        return self.device_seconds if self._events else None

    def between(self, begun: float | None, ended: float | None) -> float | None:
        return None if begun is None or ended is None else ended - begun


def noisy(
    timer: FakeTimer,
    seconds: float,
    rng: random.Random,
    *,
    jitter: float = 0.01,
    outliers: float = 0.05,
    drift_per_s: float = 0.0,
) -> Callable[[int], None]:
    """An arm of `seconds`, log-normal `jitter`, 30 % longer in a share `outliers` of its calls.

    The machine gets slower with time by `drift_per_s`, whichever arm runs.
    """

    def call(number: int) -> None:
        slow = 1.3 if rng.random() < outliers else 1.0
        timer.spend(seconds * slow * math.exp(rng.gauss(0, jitter)) * (1 + drift_per_s * timer.now()))

    return call
