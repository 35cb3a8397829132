"""Stage times with a clock that is not the machine's."""

import itertools

import pytest

from clearway import clock, device
from clearway.types import Event, StageDone


def test_stages_add_up_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.chain([0.0, 1.0], [10.0, 12.5])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks))
    heard: list[Event] = []
    timer = clock.Clock(device.pick("cpu"), heard.append)
    for _ in range(2):
        with timer.stage("vae"):
            pass
    assert timer.timings_ms == {"vae": 3500.0}
    assert heard == [StageDone("vae", 1.0), StageDone("vae", 2.5)]


def test_a_stage_that_raises_is_not_counted() -> None:
    timer = clock.Clock(device.pick("cpu"))
    with pytest.raises(ZeroDivisionError), timer.stage("vae"):
        raise ZeroDivisionError
    assert timer.timings_ms == {}
