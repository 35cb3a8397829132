"""A scenario's contenders in one process: made ready, checked, timed in turns, and written down as records.

In this order, so that nothing disturbs what is measured: the reference; then each contender by itself (ready
time, cold call, memory, correctness); then the noise floor, one arm against itself; then the rounds, arms
taking turns; then each arm's picture again, and a size it has not seen. What did not run as intended, or gave
another picture, is refused with its reason; what failed says why; losses are records like wins. What is known
so far is handed out as it comes in, for runs that are cut off.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    interleave,
    noise_floor,
)
from clearway.measure.contenders import Arm, Probe
from clearway.measure.ledgers import comparisons, operations, throughput
from clearway.measure.loading import kept_model
from clearway.measure.memory import Meter
from clearway.measure.provenance import provenance
from clearway.measure.record import Record
from clearway.measure.scenario import Scenario
from clearway.models import Model

LEAST_S = 60.0  # that rounds may take beyond the limit: minutes of compiling are wasted on too few rounds
ROUNDS = 10
NEW_SIZE_PX = 64  # how much wider the size is that no arm has seen
QUIET_S = 10.0  # of rounds without a word
FLOOR_SHARE = 0.25  # of the time that is left, for the noise floor

Tell = Callable[[str], None]
OnPicture = Callable[[str, Any], None]
"""(whose, uint8 (B, H, W, 3)): a contender's pictures of round 0, or the reference's under its label."""
OnRecords = Callable[[list[Record]], None]
"""Hears all records of a scenario as they are now; those without their whole evidence are refused."""
UNTIMED = "cut off before it was timed"
UNCHECKED = "cut off before its result was checked again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to measure. `limit_s` bounds a scenario: what is under way is finished, nothing long is begun.

    `floor_rounds` None: as many rounds for the noise floor as for the contenders. `pictures` is how many of a
    round's are checked, None all. No arm that was made ready in more than `new_size_s` gets a new size.
    """

    rounds: int = ROUNDS
    floor_rounds: int | None = None
    limit_s: float | None = None
    price_per_hour: float | None = None
    check: bool = True
    pictures: int | None = None
    new_size: bool = True
    new_size_s: float = math.inf
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
    png_s: tuple[float, ...] = ()
    refused: str | None = None
    failed: str | None = None
    timeline: list[tuple[float, int]] | None = None
    routes: dict[str, int] = field(default_factory=dict)


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
    on_records: OnRecords | None = None,
    kept: dict[Any, Model] | None = None,
) -> list[Record]:
    """One record a contender, in the order of `names`; `tell` hears what is being done.

    `on_records` hears them again and again before that: once an arm is ready, during long rounds, and once
    all were timed and checked. `kept` is where the model is kept for the next scenario.

    The scenario of the ops has implementations for contenders, and takes all of them.

    Raises RequestError for a contender that does not exist and passes on what ends the whole process: a stop
    by the user, a fault of the device.
    """
    if scenario.what == "ops":
        from clearway.measure.operations import bench_ops

        return bench_ops(scenario, device, plan, timer=timer or HostTimer(device), tell=tell)
    chosen = [registry.find(name) for name in dict.fromkeys(names)]
    run = Run(scenario, device, plan, timer or HostTimer(device), tell, on_records)
    run.say(f"building {scenario.model}")
    run.model = model or kept_model(scenario, device, {} if kept is None else kept)
    if plan.check:
        run.say("reference")
        run.reference = verify.reference(scenario, run.model, plan.pictures)
        if on_picture and run.reference.probe.images is not None:
            on_picture(run.reference.label, run.reference.probe.images)
    run.measure_roofs()
    run.start = run.resting()
    entries: list[Entry] = []
    try:
        for one in chosen:
            entries.append(run.prepared(one))
            run.keep(entries, UNTIMED)
        for entry in entries:
            if on_picture and entry.probe and entry.probe.images is not None:
                on_picture(entry.name, entry.probe.images)
        run.time(entries)
        for entry in entries:
            run.checked_again(entry)
        run.keep(entries)
        if plan.new_size:
            for entry in entries:
                run.resized(entry)
        run.say("done")
        return run.records(entries)
    finally:
        for entry in entries:
            if entry.arm is not None:
                entry.arm.close()


class Run:
    """What all steps of one scenario share."""

    def __init__(
        self,
        scenario: Scenario,
        device: Device,
        plan: Plan,
        timer: Timer,
        tell: Tell,
        on_records: OnRecords | None = None,
    ) -> None:
        self.scenario, self.device, self.plan, self.timer, self.tell = scenario, device, plan, timer, tell
        self.on_records = on_records
        self.begun = timer.now()
        self.roofs: dict[str, Any] = {}
        self._cost: dict[str, Any] | None = None
        self.model: Model
        self.reference: verify.Reference | None = None
        self.start: Meter
        self.floor = math.inf
        self.floor_of: str | None = None

    def say(self, text: str) -> None:
        """Tells what is being done, with the seconds since the scenario was begun."""
        self.tell(f"{self.scenario.name}, {self.timer.now() - self.begun:.0f} s: {text}")

    def measure_roofs(self) -> None:
        """The machine's ceilings, for what is compared with them."""
        if self.scenario.what != "whole":
            self.roofs = roofs(self.device, self.scenario.precision_on(self.device).unet, self.timer)

    def keep(self, entries: Sequence[Entry], why: str | None = None) -> None:
        """Hands out the records as they are now; `why` refuses what has not failed."""
        if self.on_records:
            self.on_records(
                [
                    one if one.failed else replace(one, refused=why or one.refused)
                    for one in self.records(entries, final=why is None)
                ]
            )

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
        self.say(f"{contender.name}, getting ready")
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
            self.say(f"{contender.name} failed: {entry.failed}")
        elif entry.prepare_s is not None and entry.first_s is not None:
            calls = ", ".join(f"{one:.3g}" for one in (entry.first_s, *entry.settling_s))
            self.say(f"{contender.name}, made in {entry.prepare_s:.1f} s, first calls {calls} s")
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
        floor_rounds = self.plan.floor_rounds or self.plan.rounds
        if floor_rounds >= FEWEST:
            self.say(f"noise floor, {first} against itself, {floor_rounds} rounds")
            share = self.limit(FLOOR_SHARE, [live[first], live[first]])
            try:
                self.floor = noise_floor(
                    arms[first],
                    self.timer,
                    floor_rounds,
                    limit_s=share,
                    seed=self.plan.seed,
                    on_round=self.progress(),
                )
                self.floor_of = first
            except Exception as error:
                live[first].failed = failure(error)
                arms.pop(first)
        self.say(f"{self.plan.rounds} rounds of {', '.join(arms)}")
        limit = self.limit(1.0, list(live.values()))
        found = interleave(
            arms,
            self.timer,
            rounds=self.plan.rounds,
            limit_s=limit,
            seed=self.plan.seed,
            on_round=self.progress(),
            on_warm=self.warmed,
            on_samples=self.sampled(live, entries) if self.on_records else None,
        )
        for name, samples in found.items():
            if isinstance(samples, Failed):
                live[name].samples = None
                live[name].failed = f"{samples.when}: {failure(samples.error)}"
            else:
                live[name].samples = samples

    def warmed(self, name: str, calls: Sequence[float]) -> None:
        """Tells of an arm's warm-up."""
        self.say(f"{name} warm after {len(calls)} calls, the last took {calls[-1]:.3g} s")

    def sampled(
        self, live: Mapping[str, Entry], entries: Sequence[Entry]
    ) -> Callable[[Mapping[str, Samples]], None]:
        """What keeps the rounds so far, where QUIET_S have passed since it last did."""
        kept = self.timer.now()

        def heard(found: Mapping[str, Samples]) -> None:
            nonlocal kept
            if self.timer.now() - kept < QUIET_S:
                return
            for name, samples in found.items():
                live[name].samples = samples
            self.keep(entries, UNCHECKED)
            kept = self.timer.now()

        return heard

    def progress(self) -> Callable[[int, int], None]:
        """What hears of each round and tells of it where QUIET_S have passed since the last word."""
        told = self.timer.now()

        def heard(done: int, rounds: int) -> None:
            nonlocal told
            now = self.timer.now()
            if done < rounds and now - told >= QUIET_S:
                told = now
                self.say(f"{done} of {rounds} rounds done")

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
        entry.routes, entry.png_s = dict(entry.arm.routes()), tuple(entry.arm.png_s)
        entry.refused = entry.arm.proof() or entry.refused or verify.changed(entry.probe, after, tolerance)

    def resized(self, entry: Entry) -> None:
        """The first call at a size that this arm has not seen; left out where it could pass the limit."""
        if entry.arm is None or entry.samples is None or self.scenario.what == "text":
            return
        likely = (entry.prepare_s or 0.0) + (entry.first_s or 0.0)
        if entry.arm.intended().get("compiled_by_an_earlier_scenario"):
            return  # how long it took to get ready, and would at another size, was seen there
        if self.left() < 1.5 * likely or likely > self.plan.new_size_s:
            return
        arm = entry.arm
        self.say(f"{entry.name} at a new size")
        try:
            entry.new_size_s, _ = self.seconds(lambda: arm.call(self.plan.rounds, NEW_SIZE_PX))
        except Exception as error:
            self.say(f"{entry.name} failed at a new size: {failure(error)}")

    def settings(self) -> dict[str, Any]:
        """What the provenance says of how it was measured."""
        precision = self.scenario.precision_on(self.device)
        return {
            **self.roofs,
            "scenario": self.scenario.as_dict(),
            "precision": asdict(precision),
            "rounds": self.plan.rounds,
            "floor_rounds": self.plan.floor_rounds or self.plan.rounds,
            "limit_s": self.plan.limit_s,
            "noise_floor": None if math.isinf(self.floor) else self.floor,
            "noise_floor_of": self.floor_of,
        }

    def records(self, entries: Sequence[Entry], final: bool = True) -> list[Record]:
        """Everything as records; comparisons of each with every other that was timed.

        Before the end (`final` False) the network is not called to count its work.
        """
        made = provenance(self.device, **self.settings(), order=[entry.name for entry in entries])
        cost = self.cost() if final and any(entry.samples for entry in entries) else {}
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
        if self._cost is None:
            from clearway.measure import networks

            self._cost = networks.cost(self.scenario, self.model)
        return self._cost


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
