"""Traces hold to the Trace Event Format, as far as viewers insist on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clearway import RequestError, UnavailableError
from clearway.measure import trace
from clearway.measure.stages import CALL, RUN, STAGE, Recorder
from fake_timer import FakeTimer


def run(events: bool = False) -> Recorder:
    timer = FakeTimer(events)
    timer.spend(5.0)
    recorder = Recorder(timer)
    with recorder.span("generation", RUN):
        timer.spend(0.001)
        with recorder.span("vae", STAGE) as stage:
            call = recorder.begin("vae", CALL, ((1, 4, 8, 8),))
            timer.spend(0.002, 0.010)
            recorder.finish(call)
            stage.memory = {"driver_peak_bytes": 7, "allocator_peak_bytes": None}
    return recorder


def test_a_written_trace_is_read_back_as_the_format_wants(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace.write(path, trace.events({"generation": run(), "modules": run()}), {"torch": "2.13"})
    found = json.loads(path.read_text())
    assert found["otherData"] == {"torch": "2.13"} and found["displayTimeUnit"] == "ms"
    for event in found["traceEvents"]:
        assert event["ph"] in ("X", "M", "C") and {"name", "pid", "tid", "ts"} <= set(event)
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0
    spans = [event for event in found["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    assert [(one["name"], one["cat"], one["ts"], one["dur"]) for one in spans] == [
        ("generation", "run", 0, 3000),
        ("vae", "stage", 1000, 2000),
        ("vae", "call", 1000, 2000),
    ]
    assert spans[1]["args"] == {"driver_peak_bytes": 7} and spans[2]["args"] == {"shapes": [[1, 4, 8, 8]]}
    assert {one["args"]["name"] for one in found["traceEvents"] if one["name"] == "process_name"} == {
        "generation",
        "modules",
    }
    counter = next(event for event in found["traceEvents"] if event["ph"] == "C")
    assert (counter["ts"], counter["args"]) == (1000, {"peak bytes": 7})


def test_a_device_has_a_line_of_its_own() -> None:
    made = trace.events({"generation": run(events=True)})
    device = [event for event in made if event["ph"] == "X" and event["tid"] == trace.DEVICE]
    assert [(event["name"], event["ts"], event["dur"]) for event in device] == [
        ("generation", 0, 11000),
        ("vae", 1000, 10000),
        ("vae", 1000, 10000),
    ]
    assert trace.events({"empty": Recorder(FakeTimer())})[0]["args"] == {"name": "empty"}


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--trace"):
        trace.check_target(tmp_path)
    with pytest.raises(RequestError, match="does not exist"):
        trace.check_target(tmp_path / "no" / "t.json")
    trace.check_target(tmp_path / "t.json")
    with pytest.raises(UnavailableError, match="could not be written"):
        trace.write(tmp_path, [], {})
