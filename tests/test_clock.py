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


CUDA = device.Device("cuda", 0)


class Device:
    """A CUDA device whose work takes as long as it is told; it is asked for marks, never to wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waits = 0.0, 0
        monkeypatch.setattr(clock, "mark", lambda _: self.now)
        monkeypatch.setattr(clock, "between", self.between)
        monkeypatch.setattr(clock, "synchronize", lambda _: pytest.fail("the host waited"))

    def between(self, first: float, last: float) -> float:
        self.waits += 1
        return last - first


def test_on_cuda_stages_have_the_devices_time_and_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Event] = []
    fake, timer = Device(monkeypatch), clock.Clock(CUDA, heard.append)
    for name, seconds in (("text", 0.5), ("sampling", 2.0), ("text", 0.25)):
        with timer.stage(name):
            fake.now += seconds
    assert fake.waits == 0 and [event.name for event in heard] == ["text", "sampling", "text"]
    assert all(event.seconds < 0.5 for event in heard)  # the host's own
    for _ in range(2):  # reading twice counts once
        assert timer.timings_ms == {"text": 750.0, "sampling": 2000.0}
    with pytest.raises(ZeroDivisionError), timer.stage("vae"):
        raise ZeroDivisionError
    assert "vae" not in timer.timings_ms


def test_whoever_watches_from_outside_has_every_stage_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[device.Device] = []
    monkeypatch.setattr(clock, "synchronize", waited.append)
    with clock.waiting(), clock.Clock(CUDA).stage("vae"):
        pass
    assert waited == [CUDA]


@pytest.mark.cuda
def test_on_a_device_marks_tell_its_time() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    timer, square = clock.Clock(CUDA), torch.randn(4096, 4096, device="cuda")
    with timer.stage("text"):
        pass
    with timer.stage("sampling"):
        for _ in range(20):
            square = square @ square * 1e-4
    assert 0 <= timer.timings_ms["text"] < timer.timings_ms["sampling"]
