"""A scenario's contenders in one process: made ready, checked, timed in turns, and written down as records.

In this order, so that nothing disturbs what is measured: the reference; then each contender by itself (ready
time, cold call, memory, correctness); then the noise floor, one arm against itself; then the rounds, arms
taking turns; then each arm's picture again, and a size it has not seen. What did not run as intended, or gave
another picture, is refused with its reason; what failed says why; losses are records like wins.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from clearway import device as machine
from clearway.device import Device
from clearway.errors import Cancelled, ClearwayError, one_line
from clearway.measure import contenders as registry
from clearway.measure import verify
from clearway.measure.clock import (
    FEWEST,
    Failed,
    HostTimer,
    Samples,
    Timer,
    compare,
    interleave,
    noise_floor,
    quantile,
)
from clearway.measure.contenders import Arm, Probe
from clearway.measure.memory import Meter
from clearway.measure.provenance import provenance
from clearway.measure.random_model import SUFFIX, random_model
from clearway.measure.record import Record
from clearway.measure.scenario import Scenario
from clearway.models import Model, load

LEAST_S = 60.0  # that rounds may take beyond the limit: minutes of compiling are wasted on too few rounds
ROUNDS = 10
NEW_SIZE_PX = 64  # how much wider the size is that no arm has seen
QUIET_S = 10.0  # of rounds without a word
FLOOR_SHARE = 0.25  # of the time that is left, for the noise floor

Tell = Callable[[str], None]
OnPicture = Callable[[str, Any], None]
"""(whose, uint8 (B, H, W, 3)): a contender's pictures of round 0, or the reference's under its label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to measure. `limit_s` bounds a scenario: what is under way is finished, nothing long is begun."""

    rounds: int = ROUNDS
    limit_s: float | None = None
    price_per_hour: float | None = None
    check: bool = True
    new_size: bool = True
    seed: int = 0


@dataclass(slots=True)
class Entry:
    """One contender on its way through the harness."""

    name: str
    arm: Arm | None = None
    prepare_s: float | None = None
    first_s: float | None = None
    settling_s: tuple[float, ...] = ()
    memory: dict[str, Any] | None = None
    probe: Probe | None = None
    correctness: dict[str, Any] | None = None
    samples: Samples | None = None
    new_size_s: float | None = None
    refused: str | None = None
    failed: str | None = None
    timeline: list[tuple[float, int]] | None = None
    routes: dict[str, int] = field(default_factory=dict)


def load_model(scenario: Scenario, device: Device) -> Model:
    """The scenario's model on `device`, in the scenario's dtypes."""
    precision = scenario.precision_on(device)
    if scenario.model.endswith(SUFFIX):
        return random_model(scenario.model.removesuffix(SUFFIX), device, precision)
    return load(scenario.model, device=device, precision=precision)


def bench(
    scenario: Scenario,
    names: Sequence[str],
    device: Device,
    plan: Plan,
    *,
    model: Model | None = None,
    timer: Timer | None = None,
    tell: Tell = lambda text: None,
    on_picture: OnPicture | None = None,
) -> list[Record]:
    """One record a contender, in the order of `names`; `tell` hears what is being done.

    The scenario of the ops has implementations for contenders, and takes all of them.

    Raises RequestError for a contender that does not exist and passes on what ends the whole process: a stop
    by the user, a fault of the device.
    """
    if scenario.what == "ops":
        from clearway.measure.operations import bench_ops

        return bench_ops(scenario, device, plan, timer=timer or HostTimer(device), tell=tell)
    chosen = [registry.find(name) for name in dict.fromkeys(names)]
    run = Run(scenario, device, plan, timer or HostTimer(device), tell)
    tell(f"{scenario.name}: building {scenario.model}")
    run.model = model or load_model(scenario, device)
    if plan.check:
        tell(f"{scenario.name}: reference")
        run.reference = verify.reference(scenario, run.model)
        if on_picture and run.reference.probe.images is not None:
            on_picture(run.reference.label, run.reference.probe.images)
    run.start = run.resting()
    entries = [run.prepared(one) for one in chosen]
    for entry in entries:
        if on_picture and entry.probe and entry.probe.images is not None:
            on_picture(entry.name, entry.probe.images)
    try:
        run.time(entries)
        for entry in entries:
            run.checked_again(entry)
        if plan.new_size:
            for entry in entries:
                run.resized(entry)
        return run.records(entries)
    finally:
        for entry in entries:
            if entry.arm is not None:
                entry.arm.close()


class Run:
    """What all steps of one scenario share."""

    def __init__(self, scenario: Scenario, device: Device, plan: Plan, timer: Timer, tell: Tell) -> None:
        self.scenario, self.device, self.plan, self.timer, self.tell = scenario, device, plan, timer, tell
        self.begun = timer.now()
        self.model: Model
        self.reference: verify.Reference | None = None
        self.start: Meter
        self.floor = math.inf
        self.floor_of: str | None = None

    def left(self) -> float:
        """Seconds of the limit that are left; infinite without one."""
        limit = math.inf if self.plan.limit_s is None else self.plan.limit_s
        return limit - (self.timer.now() - self.begun)

    def limit(self, share: float, entries: Sequence[Entry]) -> float | None:
        """Seconds for rounds of `entries`: that share of what is left.

        Where getting ready took it all: what the fewest rounds that can tell a difference may take, up to
        LEAST_S.
        """
        if self.plan.limit_s is None:
            return None
        calls = sum((entry.settling_s or (entry.first_s or 0.0,))[-1] for entry in entries)
        return max(self.left() * share, min(3 * FEWEST * calls, LEAST_S))

    def resting(self) -> Meter:
        """The memory in use now, unused caches given back."""
        gc.collect()
        machine.release_memory(self.device)
        with Meter(self.device) as meter:
            pass
        return meter

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """(seconds from idle device to idle device, result)."""
        self.timer.synchronize()
        begun = self.timer.now()
        result = call()
        self.timer.synchronize()
        return self.timer.now() - begun, result

    def prepared(self, contender: registry.Contender) -> Entry:
        """A contender made ready, called cold, measured for memory and checked, all by itself."""
        entry = Entry(contender.name)
        if self.left() <= 0:
            entry.failed = f"not begun: the limit of {self.plan.limit_s:g} s had passed"
            return entry
        self.tell(f"{self.scenario.name}: {contender.name}, getting ready")
        before = self.resting()
        try:
            with Meter(self.device, self.pause_s()) as making:
                entry.prepare_s, entry.arm = self.seconds(
                    lambda: contender.prepare(self.scenario, self.model)
                )
                arm = entry.arm
                assert arm is not None
                entry.first_s, _ = self.seconds(lambda: arm.call(self.plan.rounds))
            # a graph of what runs once a call (the VAE) is captured in the second call, or the third
            settling = range(2 if self.device.kind == "cuda" else 0)
            entry.settling_s = tuple(self.seconds(lambda: arm.call(0))[0] for _ in settling)
            with Meter(self.device) as meter:
                self.seconds(lambda: arm.call(self.plan.rounds + 1))
            entry.memory = self.own_memory(meter, making, before)
            entry.timeline = meter.timeline
            entry.probe = verify.on_cpu(arm.probe(0))
            arm.settle()
            entry.correctness = {"verified": "not checked"}
            if self.reference is not None:
                entry.correctness = self.reference.judge(entry.probe)
                entry.refused = self.reference.doubt(entry.probe, entry.correctness)
        except Exception as error:
            entry.failed, entry.arm = failure(error), None
        if entry.failed:
            self.tell(f"{self.scenario.name}: {contender.name} failed: {entry.failed}")
        return entry

    def pause_s(self) -> float:
        """How often memory is read while an arm gets ready: only before and after where graphs are captured.

        Captures on CUDA may be broken by another thread's calls. The allocator keeps what it had, so little
        of the peak is missed.
        """
        return 3600.0 if self.device.kind == "cuda" else 0.05

    def own_memory(self, meter: Meter, making: Meter, before: Meter) -> dict[str, Any]:
        """The memory ledger as if this arm were the only one: what others held before it is taken off."""
        found = meter.as_record()
        others = {
            "driver": before.baseline_bytes - self.start.baseline_bytes,
            "allocator": _less(before.allocator_peak_bytes, self.start.allocator_peak_bytes),
            "live": _less(before.live_peak_bytes, self.start.live_peak_bytes),
        }
        for key, value in found.items():
            if key.endswith("_bytes") and value is not None:
                kind = key.partition("_")[0]
                found[key] = max(0, value - others["driver" if kind == "baseline" else kind])
        found["ready_driver_peak_bytes"] = max(0, making.driver_peak_bytes - others["driver"])
        found["others_driver_bytes"] = max(0, others["driver"])
        return found

    def time(self, entries: list[Entry]) -> None:
        """The noise floor, then the rounds."""
        live = {entry.name: entry for entry in entries if entry.arm is not None}
        arms = {name: entry.arm.call for name, entry in live.items() if entry.arm is not None}
        if not arms:
            return
        first = next(iter(arms))
        if self.plan.rounds >= FEWEST:
            self.tell(f"{self.scenario.name}: noise floor, {first} against itself")
            share = self.limit(FLOOR_SHARE, [live[first], live[first]])
            try:
                self.floor = noise_floor(
                    arms[first],
                    self.timer,
                    self.plan.rounds,
                    limit_s=share,
                    seed=self.plan.seed,
                    on_round=self.progress(),
                )
                self.floor_of = first
            except Exception as error:
                live[first].failed = failure(error)
                arms.pop(first)
        self.tell(f"{self.scenario.name}: {self.plan.rounds} rounds of {', '.join(arms)}")
        limit = self.limit(1.0, list(live.values()))
        found = interleave(
            arms,
            self.timer,
            rounds=self.plan.rounds,
            limit_s=limit,
            seed=self.plan.seed,
            on_round=self.progress(),
        )
        for name, samples in found.items():
            if isinstance(samples, Failed):
                live[name].failed = f"{samples.when}: {failure(samples.error)}"
            else:
                live[name].samples = samples

    def progress(self) -> Callable[[int, int], None]:
        """What hears of each round and tells of it where QUIET_S have passed since the last word."""
        told = self.timer.now()

        def heard(done: int, rounds: int) -> None:
            nonlocal told
            now = self.timer.now()
            if done < rounds and now - told >= QUIET_S:
                told = now
                self.tell(f"{self.scenario.name}: {done} of {rounds} rounds done")

        return heard

    def checked_again(self, entry: Entry) -> None:
        """Refuses an arm that did not run as intended, or whose result changed during the rounds."""
        if entry.arm is None or entry.samples is None or entry.probe is None:
            return
        try:
            after = entry.arm.call(0)
        except Exception as error:
            entry.failed = failure(error)
            return
        tolerance = verify.FLOOR if self.reference is None else self.reference.tolerance
        entry.routes = dict(entry.arm.routes())
        entry.refused = entry.arm.proof() or entry.refused or verify.changed(entry.probe, after, tolerance)

    def resized(self, entry: Entry) -> None:
        """The first call at a size that this arm has not seen; left out where it could pass the limit."""
        if entry.arm is None or entry.samples is None or self.scenario.what == "text":
            return
        likely = (entry.prepare_s or 0.0) + (entry.first_s or 0.0)
        if self.left() < 1.5 * likely:
            return
        arm = entry.arm
        try:
            entry.new_size_s, _ = self.seconds(lambda: arm.call(self.plan.rounds, NEW_SIZE_PX))
        except Exception as error:
            self.tell(f"{self.scenario.name}: {entry.name} failed at a new size: {failure(error)}")

    def settings(self) -> dict[str, Any]:
        """What the provenance says of how it was measured."""
        precision = self.scenario.precision_on(self.device)
        return {
            **({} if self.scenario.what == "whole" else roofs(self.device, precision.unet, self.timer)),
            "scenario": self.scenario.as_dict(),
            "precision": asdict(precision),
            "rounds": self.plan.rounds,
            "limit_s": self.plan.limit_s,
            "noise_floor": None if math.isinf(self.floor) else self.floor,
            "noise_floor_of": self.floor_of,
        }

    def records(self, entries: list[Entry]) -> list[Record]:
        """Everything as records; comparisons of each with every other that was timed."""
        made = provenance(self.device, **self.settings(), order=[entry.name for entry in entries])
        cost = self.cost() if any(entry.samples for entry in entries) else {}
        return [
            Record(
                scenario=self.scenario.name,
                contender=entry.name,
                work=entry.arm.work if entry.arm else self.scenario.work,
                provenance=made,
                intended=entry.arm.intended() if entry.arm else {},
                refused=None if entry.failed else entry.refused,
                failed=entry.failed,
                throughput=throughput(self.scenario, entry, self.plan.price_per_hour),
                operations=operations(self.scenario, entry, cost),
                correctness=entry.correctness,
                memory=entry.memory and {**entry.memory, "timeline": _thinned(entry.timeline or [])},
                routes=entry.routes,
                comparisons=comparisons(entry, entries, self.floor),
            )
            for entry in entries
        ]

    def cost(self) -> dict[str, Any]:
        """FLOPs and bytes of one network call; nothing for whole generations, whose parts `profile` tells."""
        if self.scenario.what == "whole":
            return {}
        from clearway.measure import networks

        return networks.cost(self.scenario, self.model)


def throughput(scenario: Scenario, entry: Entry, price_per_hour: float | None) -> dict[str, Any] | None:
    """The throughput ledger; a network's call makes no pictures, so it has none an hour."""
    samples = entry.samples
    if samples is None:
        return None
    images = scenario.count if scenario.what == "whole" else None
    hourly = images * 3600 / samples.p50 if images else None
    ready = None
    if entry.prepare_s is not None and entry.first_s is not None:
        early = (entry.first_s, *entry.settling_s)
        ready = entry.prepare_s + sum(max(0.0, one - samples.p50) for one in early)
    return {
        "images": images,
        "n": len(samples.wall_s),
        "p20_s": samples.p20,
        "p50_s": samples.p50,
        "p80_s": samples.p80,
        "samples_s": list(samples.wall_s),
        "device_p50_s": samples.device_p50,
        "device_samples_s": None if samples.device_s is None else list(samples.device_s),
        "first_s": entry.first_s,
        "ready_s": ready,
        "new_size_s": entry.new_size_s,
        "outliers": samples.outliers(),
        "stable": samples.stable,
        "warm_ups": samples.warm_ups,
        "images_per_hour": hourly,
        "price_per_hour": price_per_hour,
        "cost_per_1000": price_per_hour * 1000 / hourly if price_per_hour is not None and hourly else None,
    }


def operations(scenario: Scenario, entry: Entry, cost: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The operations ledger of a network's call; None for whole generations."""
    samples = entry.samples
    if samples is None or scenario.what == "whole":
        return None
    from clearway.measure.networks import TITLES

    return [operation(TITLES[scenario.what], samples.wall_s, **cost)]


def operation(
    name: str, seconds: Sequence[float], *, flops: int | None = None, bytes_moved: int | None = None
) -> dict[str, Any]:
    """One row of the operations ledger from its times in seconds."""
    middle = quantile(seconds, 50)
    return {
        "name": name,
        "n": len(seconds),
        "p20_ms": quantile(seconds, 20) * 1000,
        "p50_ms": middle * 1000,
        "p80_ms": quantile(seconds, 80) * 1000,
        "samples_ms": [one * 1000 for one in seconds],
        "flops": flops,
        "bytes_moved": bytes_moved,
        "gb_per_s": bytes_moved / middle / 1e9 if bytes_moved is not None else None,
        "tflop_per_s": flops / middle / 1e12 if flops is not None else None,
    }


def comparisons(entry: Entry, entries: Sequence[Entry], floor: float) -> list[dict[str, Any]]:
    """This arm against every other of the same work that was timed in the same rounds."""
    found = []
    for other in entries:
        if other is entry or entry.samples is None or other.samples is None:
            continue
        same = entry.arm is not None and other.arm is not None and entry.arm.work == other.arm.work
        if same and len(entry.samples.wall_s) == len(other.samples.wall_s):
            found.append({"against": other.name, **asdict(compare(other.samples, entry.samples, floor))})
    return found


def roofs(device: Device, named: str, timer: Timer) -> dict[str, Any]:
    """{"ceilings": …}: this machine's measured ceilings for a dtype; {} where the clock is no real one."""
    if not isinstance(timer, HostTimer):
        return {}
    from clearway.measure.ceilings import ceilings

    found = ceilings(device, named, timer)
    return {
        "ceilings": {
            "gb_per_s": found.bytes_per_s / 1e9,
            "tflop_per_s": found.flops_per_s / 1e12,
            "dtype": named,
        }
    }


def failure(error: Exception) -> str:
    """An arm's error as a sentence; what the whole process cannot go on after is raised again."""
    torch = sys.modules.get("torch")
    if isinstance(error, (Cancelled, getattr(torch, "AcceleratorError", Cancelled))):
        raise error
    if isinstance(error, ClearwayError):
        return str(error)
    if machine.is_out_of_memory(error):
        return f"out of memory: {one_line(error)}"
    return f"{type(error).__name__}: {one_line(error)}"


def _less(value: int | None, other: int | None) -> int:
    return 0 if value is None or other is None else value - other


def _thinned(timeline: list[tuple[float, int]], most: int = 200) -> list[list[float]]:
    """At most `most` points of a memory timeline, the highest of each stretch."""
    stretch = max(1, math.ceil(len(timeline) / most))
    parts = [timeline[at : at + stretch] for at in range(0, len(timeline), stretch)]
    return [[round(t, 4), value] for t, value in (max(part, key=lambda point: point[1]) for part in parts)]
