"""Two environments in turns: planted times are found, the protocol survives what libraries print."""

from __future__ import annotations

import io
import json
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clearway.device import Device
from clearway.errors import RequestError, UnavailableError
from clearway.measure import against
from clearway.measure.against import PROTOCOL, Told, Worker, alternate, check_python, serve
from clearway.measure.harness import Plan
from clearway.measure.record import Record, to_line
from clearway.measure.scenario import Scenario

CPU = Device("cpu")
TINY = Scenario(name="tiny", model="tiny-sd15-random", what="vae", width=64, height=64)


class FakeSide:
    """An environment whose calls take about `seconds`."""

    def __init__(
        self, torch: str, seconds: float, channel: str = "release", failed: str | None = None
    ) -> None:
        self.torch, self.seconds, self.channel, self.failed = torch, seconds, channel, failed
        self.noise, self.kept, self.rounds = random.Random(torch), 0, list[int]()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        if question["do"] == "begin":
            return {"failed": self.failed, "pictures": []}
        if question["do"] == "call":
            self.kept += question["keep"]
            self.rounds.append(question["round"])
            wall_s = self.seconds * self.noise.gauss(1, 0.01)
            return {"wall_s": wall_s, "device_s": wall_s / 2}
        self.ended = question
        made = {"torch": self.torch, "torch_channel": self.channel, "settings": {"rounds": 12}}
        one = Record(scenario="tiny", contender="clearway", provenance=made, failed=self.failed)
        return {"record": json.loads(to_line(one))}


def test_a_slower_environment_is_found_and_channels_are_named() -> None:
    this, other = FakeSide("2.13.0", 1.0), FakeSide("2.14.0.dev", 1.1, "nightly")
    a, b = alternate(TINY, "clearway", CPU, Plan(rounds=12), (this.ask, other.ask))
    assert a.comparisons[0]["verdict"] == "faster" and b.comparisons[0]["verdict"] == "slower"
    assert a.comparisons[0]["against"] == "clearway with torch 2.14.0.dev (nightly)"
    assert b.comparisons[0]["ratio"] == pytest.approx(1.1, rel=0.02)
    assert a.provenance["settings"]["side"] == "this environment"
    assert b.provenance["torch_channel"] == "nightly"  # two records, never one table
    assert this.kept == other.kept == 12 and set(range(12)) <= set(this.rounds)
    assert this.ended["stable"] is other.ended["stable"] is True


def test_the_same_environment_is_no_difference() -> None:
    sides = FakeSide("a", 1.0), FakeSide("b", 1.0)
    a, b = alternate(TINY, "clearway", CPU, Plan(rounds=12), [one.ask for one in sides])
    assert a.comparisons[0]["verdict"] == b.comparisons[0]["verdict"] == "no difference"


def test_an_environment_that_fails_is_a_record_and_nothing_is_timed() -> None:
    sides = FakeSide("a", 1.0), FakeSide("b", 1.0, failed="out of memory")
    a, b = alternate(TINY, "clearway", CPU, Plan(rounds=12), [one.ask for one in sides])
    assert b.failed == "out of memory" and a.comparisons == [] and sides[0].rounds == []


def test_told_time_is_what_workers_say() -> None:
    told = Told()
    begun = told.now(), told.event()
    told.add({"wall_s": 2.0, "device_s": 1.5})
    assert told.now() - begun[0] == 2.0 and told.between(begun[1], told.event()) == 1.5
    told.add({"wall_s": 1.0, "device_s": None})
    assert told.between(begun[1], told.event()) is None


def asked(*questions: Any) -> list[dict[str, Any]]:
    """What a worker in this process answers."""
    answers = io.StringIO()
    lines = [one if isinstance(one, str) else json.dumps({"protocol": PROTOCOL, **one}) for one in questions]
    serve(io.StringIO("\n".join(lines) + "\n"), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_worker_answers_and_an_error_is_an_answer() -> None:
    begin = {
        "do": "begin",
        "scenario": TINY.as_dict(),
        "contender": "clearway-eager",
        "device": "cpu",
        "plan": asdict(Plan(rounds=2)),
    }
    found = asked(
        begin,
        {"do": "call", "round": 2, "keep": False},
        {"do": "call", "round": 0, "keep": True},
        {"do": "call", "round": 1, "keep": True},
        {"do": "end", "floor": 0.01},
    )
    assert found[0] == {"failed": None, "pictures": []} and found[1]["wall_s"] > 0
    record = Record(**found[-1]["record"])
    assert record.throughput is not None and record.throughput["n"] == 2
    assert record.correctness is not None and record.correctness["verified"] is True
    assert record.throughput["stable"] is False  # nobody said that it was
    assert record.provenance["settings"]["noise_floor"] == 0.01 and record.refused is None
    wrong = asked({**begin, "contender": "nobody"}, {**begin, "protocol": 99}, "{", {"do": "dance"})
    assert [one["kind"] for one in wrong] == [
        "RequestError",
        "UnavailableError",
        "JSONDecodeError",
        "KeyError",
    ]


def test_pictures_of_both_are_compared() -> None:
    import numpy as np

    image = against._png(np.zeros((16, 16, 3), np.uint8))
    other = against._png(np.full((16, 16, 3), 10, np.uint8))
    records = [Record(scenario="s", contender="c", provenance={"torch": name}) for name in "ab"]
    begun = [{"pictures": [image]}, {"pictures": [other]}]
    _, b = against._compared(records, {}, 0.1, begun)
    assert b.correctness is not None and b.correctness["other_environment"]["max_error"] == 10


def test_a_real_worker_of_this_interpreter_answers_errors() -> None:
    with Worker(sys.executable) as worker, pytest.raises(RequestError, match="what 'all' is not known"):
        worker.ask({"do": "begin", "scenario": {"name": "x", "what": "all"}, "device": "cpu", "plan": {}})


def test_ctrl_c_is_for_who_asks() -> None:
    with Worker(sys.executable) as worker:
        for _ in range(2):  # the first answer says that it listens
            with pytest.raises(UnavailableError, match="protocol 99"):
                worker.ask({"protocol": 99})
            worker._process.send_signal(signal.SIGINT)


def test_a_worker_that_dies_and_a_python_that_is_none(tmp_path: Path) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nexit 1\n")
    dying.chmod(0o755)
    with Worker(str(dying)) as worker, pytest.raises(UnavailableError, match="ended without an answer"):
        worker.ask({"do": "begin"})
    with pytest.raises(RequestError, match="no Python interpreter"):
        check_python(str(dying))
    with pytest.raises(RequestError, match="--against"):
        check_python(str(tmp_path / "none"))
    check_python(sys.executable)
