"""An evaluator for tests: planted times, pictures, memory and faults, on a clock that moves when told."""

import json
import math
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from clearway.errors import UnavailableError
from clearway.measure.candidates import SAME, Candidate, Change
from clearway.measure.trial import TimeUp
from fake_timer import FakeTimer

PLAIN_S = 1.0


@dataclass
class Plant:
    """What a candidate does: `factor` on time, levels added to pictures, GiB held, seconds to make ready."""

    factor: float = 1.0
    error: float = 0.0
    gib: float = 1.0
    ready_s: float = 0.0
    first_s: float = 0.0
    fault: str | None = None
    unproved: str | None = None
    absent: str | None = None


def candidate(
    name: str, section: str = SAME, slot: str | None = None, absent: str | None = None
) -> Candidate:
    """A candidate whose change is its name: an op for the same arithmetic."""
    change = Change(ops=(name,)) if section == SAME else Change(request={name: 1})
    return Candidate(name, section, change, frozenset({slot or name}), f"what {name} is", absent)


@dataclass
class Fake:
    """`together(names)` gives the factor of a combination; without it factors multiply."""

    plants: dict[str, Plant]
    together: dict[frozenset[str], float] = field(default_factory=dict)
    jitter: float = 0.005
    seed: int = 0
    die_at: int | None = None
    log: Path | None = None

    def __post_init__(self) -> None:
        self.timer = FakeTimer()
        self.rng = random.Random(self.seed)
        self.calls = 0
        self.findings: list[dict[str, object]] = []
        self.prepared: list[frozenset[str]] = []
        self.open = 0
        self.deadline = math.inf

    def arm(self, change: Change):
        names = frozenset((*change.ops, *change.request))
        for name in sorted(names):
            if self.plants[name].absent:
                raise UnavailableError(str(self.plants[name].absent))
        self.prepared.append(names)
        if self.log:
            with self.log.open("a") as file:
                file.write(json.dumps(sorted(names)) + "\n")
        made = Run(self, names)
        self.open += 1
        return made

    @contextmanager
    def within(self, seconds: float):
        before, self.deadline = self.deadline, self.timer.now() + seconds
        try:
            yield
        finally:
            self.deadline = before

    def spend(self, seconds: float) -> None:
        """Passes time; ends at the deadline, as an alarm would."""
        if self.timer.now() + seconds > self.deadline:
            self.timer.spend(max(0.0, self.deadline - self.timer.now()))
            raise TimeUp
        self.timer.spend(seconds)

    def micro(self, limit_s: float):
        self.timer.spend(1.0)
        return self.findings

    def label(self, number: int) -> str:
        return f"prompt {number % 2}, seed {number // 2}"

    def factor(self, names: frozenset[str]) -> float:
        return self.together.get(names, math.prod(self.plants[name].factor for name in names))


class Run:
    def __init__(self, of: Fake, names: frozenset[str]) -> None:
        self.of, self.plants = of, [of.plants[name] for name in names]
        self.names = names
        self.ready_s = sum(plant.ready_s for plant in self.plants)
        self.cold = True
        of.spend(self.ready_s)

    def __call__(self, number: int) -> np.ndarray:
        self.of.calls += 1
        if self.of.calls == self.of.die_at:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        for plant in self.plants:
            if plant.fault:
                raise RuntimeError(plant.fault)
        noise = math.exp(self.of.rng.gauss(0, self.of.jitter))
        first = sum(plant.first_s for plant in self.plants) if self.cold else 0.0
        self.cold = False
        self.of.spend(PLAIN_S * self.of.factor(self.names) * noise + first)
        pictures = np.random.default_rng(number).integers(64, 192, (1, 16, 16, 3)).astype(np.float64)
        return (pictures + sum(plant.error for plant in self.plants)).astype(np.uint8)

    def proof(self) -> str | None:
        return next((plant.unproved for plant in self.plants if plant.unproved), None)

    def peak_bytes(self) -> int:
        return int(max([1.0, *(plant.gib for plant in self.plants)]) * 2**30)

    def close(self) -> None:
        self.of.open -= 1
