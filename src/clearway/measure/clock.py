"""Honest clocks: arms that take turns, warmed until stable, compared by pairs, never below the noise floor.

Every call is timed from an idle device to an idle device: host seconds, and device seconds from events where
the device has them. Slow drift (a machine getting warm) is shared by the arms of a round, so it cancels in
their ratio; runs one after the other would charge it to whoever came last.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from clearway import device as machine
from clearway.device import Device
from clearway.errors import Cancelled
from clearway.measure.signed_rank import ALPHA, locate

Arm = Callable[[int], Any]
FEWEST = 6  # rounds below which there is no 95 % interval, so that no difference can be called
STABLE_CALLS = 3
STABLE_WITHIN = 0.05
MOST_WARM_UPS = 12
WARM_UP_S = 10.0  # that calls after the cold one may take, from three calls on: long calls hide what settles


class Timer(Protocol):
    """What tells the time: `HostTimer`, or a fake in tests."""

    def now(self) -> float:
        """Seconds, from any zero."""
        ...

    def synchronize(self) -> None:
        """Waits until the device is idle."""
        ...

    def event(self) -> Any:
        """A device event recorded now; None where the device has none."""
        ...

    def between(self, begun: Any, ended: Any) -> float | None:
        """Device seconds between two events of a synchronised device; None where there are none."""
        ...


class HostTimer:
    """The host's performance counter and the events of `device`; the CPU has no events."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def now(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        machine.synchronize(self.device)

    def event(self) -> Any:
        if self.device.kind == "cpu":
            return None
        import torch

        if self.device.kind == "mps":
            event: Any = torch.mps.Event(enable_timing=True)
            event.record()
            return event
        backend = getattr(torch, self.device.kind)
        event = backend.Event(enable_timing=True)
        event.record(backend.current_stream(str(self.device)))
        return event

    def between(self, begun: Any, ended: Any) -> float | None:
        return None if begun is None or ended is None else begun.elapsed_time(ended) / 1000


@dataclass(frozen=True)
class Samples:
    """One arm's times in seconds, one a round; `device_s` is None where the device has no events.

    `first_s` is the cold call, the first of `warm_ups`; `stable` is whether the warm-up settled.
    """

    wall_s: tuple[float, ...]
    device_s: tuple[float, ...] | None
    first_s: float
    warm_ups: int
    stable: bool

    def p(self, percent: float) -> float:
        """The wall time that `percent` (0..100) of the calls do not exceed, interpolated between samples."""
        return quantile(self.wall_s, percent)

    @property
    def p20(self) -> float:
        return self.p(20)

    @property
    def p50(self) -> float:
        return self.p(50)

    @property
    def p80(self) -> float:
        return self.p(80)

    @property
    def device_p50(self) -> float | None:
        return None if self.device_s is None else quantile(self.device_s, 50)

    def outliers(self) -> int:
        """How many wall times lie beyond the median ± 3 · 1.4826 · MAD; they are counted, never dropped."""
        middle = statistics.median(self.wall_s)
        away = [abs(value - middle) for value in self.wall_s]
        limit = 3 * 1.4826 * statistics.median(away)
        return sum(value > limit for value in away)


@dataclass(frozen=True)
class Failed:
    """An arm that raised, with when ("warm-up 1", "round 3"); it takes no further turns."""

    arm: str
    error: Exception
    when: str


@dataclass(frozen=True)
class Comparison:
    """How arm b's time relates to arm a's, paired by round.

    `ratio` is b over a (below 1: b is faster) within the 95 % interval `low`..`high`, which is 0..inf below 6
    rounds. `floor` is the |log ratio| under which nothing is called a difference; `verdict` is b's.
    """

    ratio: float
    low: float
    high: float
    floor: float
    verdict: str  # "faster" | "slower" | "no difference" | "too few rounds"
    p_value: float
    n: int
    test: str


def interleave(
    arms: Mapping[str, Arm],
    timer: Timer,
    *,
    rounds: int,
    limit_s: float | None = None,
    seed: int = 0,
    on_round: Callable[[int, int], None] | None = None,
    on_warm: Callable[[str, Sequence[float]], None] | None = None,
    on_samples: Callable[[Mapping[str, Samples]], None] | None = None,
) -> dict[str, Samples | Failed]:
    """Each arm's times after `rounds` rounds (at least 1) in which every arm runs once.

    Every arm is first called until its last 3 calls lie within 5 % of each other, at most 12 times. The order
    of a round is shuffled by `seed`; the next round runs it backwards, so that no arm is favoured by its
    place. An arm gets the round's number from 0 (in warm-up: numbers from `rounds` on, so that nothing
    measured was seen before). `on_round` hears (rounds done, rounds), `on_warm` each arm's name and the
    seconds of its warm-up calls, `on_samples` all times so far, after each round. After `limit_s` seconds no
    further round is begun; half of them are for warming up, in equal parts; one call and one round of each
    arm are always run.

    An arm that raises becomes `Failed`; a stop by the user and a fault of the device itself are passed on.
    """
    if rounds < 1:
        raise ValueError(f"{rounds} rounds: at least one is needed")
    begun, found = timer.now(), dict[str, Samples | Failed]()
    limit = math.inf if limit_s is None else limit_s
    warm: dict[str, list[float]] = {}
    for place, (name, arm) in enumerate(arms.items(), 1):
        calls: list[float] = []
        while len(calls) < MOST_WARM_UPS and not _stable(calls):
            if calls and timer.now() - begun > limit / 2 * place / len(arms):
                break
            if len(calls) >= STABLE_CALLS and sum(calls[1:]) > WARM_UP_S:
                break
            taken = _timed(name, arm, rounds + len(calls), timer, f"warm-up {len(calls) + 1}")
            if isinstance(taken, Failed):
                found[name] = taken
                break
            calls.append(taken[0])
        warm[name] = calls
        if on_warm and calls:
            on_warm(name, calls)
    times: dict[str, list[tuple[float, float | None]]] = {name: [] for name in arms if name not in found}
    order, shuffle, number = list(times), random.Random(seed), 0
    while number < rounds and order and (number == 0 or timer.now() - begun <= limit):
        if number % 2:
            order.reverse()
        else:
            shuffle.shuffle(order)
        for name in tuple(order):
            taken = _timed(name, arms[name], number, timer, f"round {number + 1}")
            if isinstance(taken, Failed):
                found[name] = taken
                order.remove(name)
            else:
                times[name].append(taken)
        number += 1
        if on_round:
            on_round(number, rounds)
        if on_samples:
            on_samples({name: _samples(times[name], warm[name]) for name in order})
    for name, pairs in times.items():
        if name not in found:
            found[name] = _samples(pairs, warm[name])
    return {name: found[name] for name in arms}


def _samples(pairs: Sequence[tuple[float, float | None]], warm: Sequence[float]) -> Samples:
    device_s = tuple(value for _, value in pairs if value is not None)
    return Samples(
        wall_s=tuple(wall for wall, _ in pairs),
        device_s=device_s if len(device_s) == len(pairs) else None,
        first_s=warm[0],
        warm_ups=len(warm),
        stable=_stable(warm),
    )


def compare(a: Samples, b: Samples, floor: float) -> Comparison:
    """Whether b is faster or slower than a, from the rounds' log ratios of wall time.

    The two-sided Wilcoxon signed-rank test at 5 % and its Hodges-Lehmann interval (`signed_rank` says what
    they assume). A difference is called only if the test finds one, the interval excludes 1 and the estimate
    lies beyond `floor`, a |log ratio| as `noise_floor` gives it. With noise of 1 % and every 20th call 30 %
    longer, a change of 2 % is found by 30 rounds in 96 of 100 simulated runs, by 40 in 99 (`tests/measure`).
    """
    if len(a.wall_s) != len(b.wall_s) or not a.wall_s:
        raise ValueError(f"{len(a.wall_s)} and {len(b.wall_s)} rounds cannot be paired")
    if min(*a.wall_s, *b.wall_s) <= 0:
        raise ValueError("a call took no time: the clock is too coarse for it")
    found = locate([math.log(y / x) for x, y in zip(a.wall_s, b.wall_s, strict=True)])
    excludes_one = found.low > 0 or found.high < 0
    called = excludes_one and found.p_value <= ALPHA and abs(found.estimate) > floor
    verdict = "no difference" if not called else "slower" if found.estimate > 0 else "faster"
    if len(a.wall_s) < FEWEST:
        verdict = "too few rounds"
    return Comparison(
        ratio=math.exp(found.estimate),
        low=math.exp(found.low),
        high=math.exp(found.high),
        floor=floor,
        verdict=verdict,
        p_value=found.p_value,
        n=len(a.wall_s),
        test=found.test,
    )


def noise_floor(
    arm: Arm,
    timer: Timer,
    rounds: int,
    *,
    limit_s: float | None = None,
    seed: int = 0,
    on_round: Callable[[int, int], None] | None = None,
) -> float:
    """The larger |log| bound of the interval of `arm` against itself: what cannot be told apart here now.

    Infinite below 6 rounds; `on_round` is that of `interleave`. An arm that raises raises here.
    """
    found = interleave(
        {"a": arm, "b": arm}, timer, rounds=rounds, limit_s=limit_s, seed=seed, on_round=on_round
    )
    a, b = found["a"], found["b"]
    for one in (a, b):
        if isinstance(one, Failed):
            raise one.error
    assert isinstance(a, Samples) and isinstance(b, Samples)
    both = compare(a, b, floor=0.0)
    return math.inf if both.low == 0 else max(abs(math.log(both.low)), abs(math.log(both.high)))


def quantile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` (0..100) of `values` do not exceed, linear between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _stable(calls: Sequence[float]) -> bool:
    last = calls[-STABLE_CALLS:]
    return len(last) == STABLE_CALLS and max(last) <= min(last) * (1 + STABLE_WITHIN)


def _timed(name: str, arm: Arm, number: int, timer: Timer, when: str) -> tuple[float, float | None] | Failed:
    """(host seconds, device seconds or None) of one call, the device idle before and after."""
    try:
        timer.synchronize()
        begun, first = timer.now(), timer.event()
        arm(number)
        last = timer.event()
        timer.synchronize()
        return timer.now() - begun, timer.between(first, last)
    except Exception as error:
        torch = sys.modules.get("torch")
        if isinstance(error, (Cancelled, getattr(torch, "AcceleratorError", Cancelled))):
            raise  # after a fault of the device nothing measured on it means anything
        traceback.clear_frames(error.__traceback__)  # else an arm out of memory would keep what it had
        return Failed(name, error, when)
