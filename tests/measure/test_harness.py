"""The harness, with arms that only move a clock: order, refusals, limits, ledgers."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from clearway.device import Device
from clearway.errors import Cancelled, RequestError, UnavailableError
from clearway.measure import contenders, harness
from clearway.measure.clock import FEWEST
from clearway.measure.contenders import Arm, Contender, Probe
from clearway.measure.harness import LEAST_S, Plan, bench
from clearway.measure.random_model import random_model
from clearway.measure.record import Record, to_line
from clearway.measure.scenario import Scenario
from clearway.types import Precision

CPU = Device("cpu")
TINY = Scenario(name="tiny", width=64, height=64, steps=2, count=2, batch_size=2)
PICTURE = np.full((1, 16, 16, 3), 128, np.uint8)


class FakeTimer:
    """A clock that arms push forward."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def synchronize(self) -> None:
        pass

    def event(self) -> Any:
        return None

    def between(self, begun: Any, ended: Any) -> float | None:
        return None


@pytest.fixture
def timer() -> FakeTimer:
    return FakeTimer()


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("tiny-sd15", CPU, Precision())


Add = Callable[..., None]


@pytest.fixture
def add(timer: FakeTimer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Registers a contender whose calls take `seconds`, the first ones `cold_s` more, with 1 % of noise."""
    monkeypatch.setattr(contenders, "CONTENDERS", {})

    def make(
        name: str, seconds: float = 1.0, *, cold_s: float = 0.0, ready_s: float = 0.0, **more: Any
    ) -> None:
        noise, called, seen = random.Random(name), [0], set()

        def call(round: int, side_px: int = 0) -> Any:
            called[0] += 1
            if called[0] == more.get("breaks_at"):
                raise more.get("error", RuntimeError("it broke\nbadly"))
            if side_px not in seen:
                timer.seconds += cold_s
                seen.add(side_px)
            timer.seconds += seconds * noise.gauss(1, 0.01)
            return more.get("later", PICTURE) if called[0] > 3 else PICTURE

        def prepare(scenario: Scenario, model: Any) -> Arm:
            timer.seconds += ready_s
            if "unable" in more:
                raise more["unable"]
            return Arm(
                call=call,
                probe=lambda round: Probe(PICTURE, more.get("latents"), more.get("calls", 2)),
                proof=lambda: more.get("proof"),
                routes=lambda: {"unet/eager": called[0]},
                intended=lambda: {"engine": name},
                work=more.get("work", "same"),
            )

        contenders.CONTENDERS[name] = Contender(name, name, prepare)

    yield make


def run(timer: FakeTimer, model: Any, names: list[str], **plan: Any) -> list[Record]:
    return bench(TINY, names, CPU, Plan(**({"check": False} | plan)), model=model, timer=timer)


def test_a_loss_is_a_record_like_a_win(add: Add, timer: FakeTimer, model: Any) -> None:
    add("slow", 1.3)
    add("quick", 1.0)
    slow, quick = run(timer, model, ["slow", "quick"], rounds=12, price_per_hour=3.0)
    assert (slow.contender, quick.contender) == ("slow", "quick")
    assert slow.comparisons[0]["verdict"] == "slower" and quick.comparisons[0]["verdict"] == "faster"
    assert slow.comparisons[0]["against"] == "quick"
    assert slow.comparisons[0]["ratio"] == pytest.approx(1.3, rel=0.02)
    found = slow.throughput
    assert found is not None and found["n"] == len(found["samples_s"]) == 12
    assert found["images_per_hour"] == pytest.approx(2 * 3600 / found["p50_s"])
    assert found["cost_per_1000"] == pytest.approx(3.0 * 1000 / found["images_per_hour"])
    assert slow.provenance["settings"]["noise_floor_of"] == "slow"
    assert 0 < slow.provenance["settings"]["noise_floor"] < 0.05
    assert slow.provenance["settings"]["scenario"]["name"] == "tiny"
    assert slow.memory is not None and slow.memory["driver_peak_bytes"] > 0 and slow.memory["timeline"]
    assert slow.operations is None and slow.correctness == {"verified": "not checked"}
    assert to_line(slow)


def test_nothing_planted_is_no_difference(add: Add, timer: FakeTimer, model: Any) -> None:
    add("a")
    add("b")
    records = run(timer, model, ["a", "b"], rounds=12)
    assert [one.comparisons[0]["verdict"] for one in records] == ["no difference"] * 2


def test_cold_start_and_a_new_size_are_told_apart_from_the_rounds(
    add: Add, timer: FakeTimer, model: Any
) -> None:
    add("compiled", 1.0, cold_s=60.0, ready_s=5.0)
    (one,) = run(timer, model, ["compiled"])
    found = one.throughput
    assert found is not None
    assert found["p50_s"] == pytest.approx(1, rel=0.05) and found["first_s"] == pytest.approx(61, rel=0.01)
    assert found["ready_s"] == pytest.approx(65, rel=0.01)
    assert found["new_size_s"] == pytest.approx(61, rel=0.01)


def test_few_rounds_call_no_difference_and_measure_no_floor(add: Add, timer: FakeTimer, model: Any) -> None:
    add("slow", 2.0)
    add("quick")
    slow, _ = run(timer, model, ["slow", "quick"], rounds=5)
    assert slow.comparisons[0]["verdict"] == "too few rounds"
    assert slow.provenance["settings"]["noise_floor"] is None
    assert math.isinf(slow.comparisons[0]["floor"])


def test_what_did_not_run_as_intended_is_refused(add: Add, timer: FakeTimer, model: Any) -> None:
    add("graph", proof="the UNet was to run by cuda_graph and ran by eager")
    add("drifting", later=PICTURE + 60)
    add("sound")
    graph, drifting, sound = run(timer, model, ["graph", "drifting", "sound"])
    assert graph.refused == "the UNet was to run by cuda_graph and ran by eager"
    assert "changed during the run" in (drifting.refused or "")
    assert sound.refused is None and sound.failed is None and sound.routes["unet/eager"] > 0


def test_what_fails_says_why_and_stops_nobody(add: Add, timer: FakeTimer, model: Any) -> None:
    add("unable", unable=UnavailableError("it cannot"))
    add("cold", breaks_at=1)
    add("later", breaks_at=9)
    add("memory", breaks_at=1, error=torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"))
    add("sound")
    records = run(timer, model, ["sound", "unable", "cold", "later", "memory"])
    failed = {one.contender: one.failed or "" for one in records}
    assert failed["sound"] == "" and failed["unable"] == "it cannot"
    assert failed["cold"] == "RuntimeError: it broke" and "it broke" in failed["later"]
    assert failed["memory"].startswith("out of memory")
    assert all(one.throughput is None and not one.comparisons for one in records if one.failed)


def test_a_stop_by_the_user_ends_everything(add: Add, timer: FakeTimer, model: Any) -> None:
    add("a", breaks_at=1, error=Cancelled("stopped"))
    with pytest.raises(Cancelled):
        run(timer, model, ["a"])
    add("b", breaks_at=1, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(timer, model, ["b"])
    with pytest.raises(RequestError, match="not known"):
        run(timer, model, ["c"])


def test_the_limit_begins_nothing_long(add: Add, timer: FakeTimer, model: Any) -> None:
    add("quick", 1.0, cold_s=50)
    add("long", 1.0, cold_s=300)
    add("late")
    quick, long, late = run(timer, model, ["quick", "long", "late"], limit_s=200)
    assert late.failed == "not begun: the limit of 200 s had passed" and late.throughput is None
    # what was minutes in the making is not wasted on too few rounds, where a minute suffices
    assert long.throughput is not None and long.throughput["n"] >= FEWEST
    assert timer.now() < 350 + 200 + 3 * LEAST_S
    assert long.throughput["new_size_s"] is None and quick.throughput["new_size_s"] is None  # type: ignore[index]


def test_what_was_long_in_the_making_gets_no_new_size(add: Add, timer: FakeTimer, model: Any) -> None:
    add("quick", cold_s=50)
    add("long", cold_s=300)
    quick, long = run(timer, model, ["quick", "long"], new_size_s=60.0)
    assert quick.throughput["new_size_s"] == pytest.approx(51, rel=0.01)  # type: ignore[index]
    assert long.throughput["new_size_s"] is None  # type: ignore[index]


def test_long_rounds_are_told_of(add: Add, timer: FakeTimer, model: Any) -> None:
    add("slow", 6.0)
    add("quick", 0.01)
    told: list[str] = []
    plan = Plan(check=False, new_size=False, rounds=6)
    bench(TINY, ["slow"], CPU, plan, model=model, timer=timer, tell=told.append)
    # two calls a round against itself, then one
    assert [text.partition(": ")[2] for text in told if text.endswith("rounds done")] == [
        *(f"{done} of 6 rounds done" for done in (1, 2, 3, 4, 5)),
        *(f"{done} of 6 rounds done" for done in (1, 3, 5)),
    ]
    warm = re.compile(r"tiny, \d+ s: slow warm after 3 calls, the last took [\d.]+ s")
    assert any(map(warm.fullmatch, told))
    told.clear()
    bench(TINY, ["quick"], CPU, plan, model=model, timer=timer, tell=told.append)
    assert "rounds done" not in "".join(told)


def test_the_noise_floor_has_rounds_of_its_own(add: Add, timer: FakeTimer, model: Any) -> None:
    add("a")
    told: list[str] = []
    plan = Plan(check=False, new_size=False, rounds=2, floor_rounds=8)
    (one,) = bench(TINY, ["a"], CPU, plan, model=model, timer=timer, tell=told.append)
    assert any(text.endswith("noise floor, a against itself, 8 rounds") for text in told)
    assert one.provenance["settings"]["noise_floor"] is not None
    assert one.provenance["settings"]["floor_rounds"] == 8 and one.throughput["n"] == 2  # type: ignore[index]


def test_what_is_known_is_handed_out_before_the_end(add: Add, timer: FakeTimer, model: Any) -> None:
    add("slow", 6.0)
    add("graph", proof="ran by eager")
    add("unable", unable=UnavailableError("it cannot"))
    heard: list[list[Record]] = []
    plan = Plan(check=False, rounds=6)
    names = ["slow", "graph", "unable"]
    last = bench(TINY, names, CPU, plan, model=model, timer=timer, on_records=heard.append)
    assert [len(found) for found in heard[:3]] == [1, 2, 3]
    slow, _, unable = heard[2]
    assert slow.refused == harness.UNTIMED and slow.throughput is None and slow.memory is not None
    assert unable.failed == "it cannot" and unable.refused is None
    during, end = heard[3:-1], heard[-1]
    assert during and all(found[0].refused == harness.UNCHECKED for found in during)
    counts = [found[0].throughput["n"] for found in during]  # type: ignore[index]
    assert counts == sorted(counts) and 0 < counts[0] < 6
    assert [one.refused for one in end] == [None, "ran by eager", None]
    assert end[0].throughput["samples_s"] == last[0].throughput["samples_s"]  # type: ignore[index]
    assert end[0].throughput["new_size_s"] is None and last[0].throughput["new_size_s"]  # type: ignore[index]


def test_a_round_of_several_calls_is_told_by_the_call(add: Add, timer: FakeTimer, model: Any) -> None:
    add("net", 10.0, cold_s=60.0, ready_s=5.0)
    one = replace(TINY, what="vae", calls=10, count=1, batch_size=1)
    plan = Plan(check=False, rounds=6)
    (record,) = bench(one, ["net"], CPU, plan, model=model, timer=timer)
    found = record.throughput
    assert found is not None and found["calls"] == 10 and found["p50_s"] == pytest.approx(1, rel=0.05)
    assert found["first_s"] == pytest.approx(61, rel=0.02) and found["ready_s"] == pytest.approx(65, rel=0.02)
    assert found["new_size_s"] == pytest.approx(61, rel=0.02)
    assert record.operations is not None
    (row,) = record.operations
    assert row["name"] == "VAE decode, of 10 in a row" and row["p50_ms"] == pytest.approx(1000, rel=0.05)


def test_less_work_is_not_compared_with_the_same(add: Add, timer: FakeTimer, model: Any) -> None:
    add("engine")
    add("skipping", 0.5, work="less work")
    engine, skipping = run(timer, model, ["engine", "skipping"])
    assert engine.comparisons == skipping.comparisons == [] and skipping.work == "less work"


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_real_arms_are_verified_and_a_wrong_one_refused(timer: FakeTimer, model: Any) -> None:
    shown: list[str] = []
    plan = Plan(rounds=1)

    class Ticking(FakeTimer):
        def now(self) -> float:
            self.seconds += 0.01
            return self.seconds

    one = replace(TINY, count=1)
    records = bench(
        one,
        ["clearway-eager", "diffusers", "clearway:executor=cuda_graph"],
        CPU,
        plan,
        model=model,
        timer=Ticking(),
        on_picture=lambda whose, images: shown.append(f"{whose} {images.shape}"),
    )
    ours, theirs, graph = records
    for record in (ours, theirs):
        assert record.refused is None and record.failed is None, record
        assert record.correctness is not None and record.correctness["verified"] is True
        assert to_line(record)
    assert graph.refused or graph.failed  # no CUDA graphs on a CPU
    assert shown[0] == "Diffusers eager, float32, on the CPU (1, 64, 64, 3)" and len(shown) >= 3


def test_a_networks_call_fills_the_operations_ledger(timer: FakeTimer, model: Any) -> None:
    class Ticking(FakeTimer):
        def now(self) -> float:
            self.seconds += 0.01
            return self.seconds

    one = replace(TINY, what="vae", name="vae")
    (record,) = bench(one, ["clearway"], CPU, Plan(rounds=2), model=model, timer=Ticking())
    assert record.operations is not None and record.correctness is not None
    (row,) = record.operations
    assert row["name"] == "VAE decode" and row["n"] == 2 and row["flops"] > 0 and row["bytes_moved"] > 0
    assert row["tflop_per_s"] == pytest.approx(row["flops"] / row["p50_ms"] / 1e9)
    assert record.correctness["verified"] is True
    assert record.throughput is not None and record.throughput["images_per_hour"] is None


def test_memory_is_an_arms_own(model: Any, timer: FakeTimer) -> None:
    from types import SimpleNamespace

    run = harness.Run(TINY, CPU, Plan(), timer, print)

    def reading(driver: int, held: int, live: int) -> Any:
        found = SimpleNamespace(
            baseline_bytes=driver,
            driver_peak_bytes=driver + 50,
            allocator_peak_bytes=held,
            live_peak_bytes=live,
        )
        found.as_record = lambda: (
            {key: value for key, value in vars(found).items() if key.endswith("_bytes")} | {"sources": {}}
        )
        return found

    run.start = reading(100, 60, 40)
    before = reading(130, 80, 45)  # another arm holds 30, 20 and 5
    ledger = run.own_memory(reading(140, 90, 55), reading(150, 0, 0), before)
    assert ledger["driver_peak_bytes"] == 190 - 30 and ledger["baseline_bytes"] == 140 - 30
    assert ledger["allocator_peak_bytes"] == 90 - 20 and ledger["live_peak_bytes"] == 55 - 5
    assert ledger["ready_driver_peak_bytes"] == 200 - 30 and ledger["others_driver_bytes"] == 30


def test_timelines_are_thinned_to_their_peaks() -> None:
    points = [(index / 100, index % 7) for index in range(1000)]
    found = harness._thinned(points)
    assert len(found) <= 200 and {value for _, value in found} <= set(range(7))
    assert max(value for _, value in found) == 6 and harness._thinned([]) == []
