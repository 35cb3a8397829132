"""The trial of contenders for a linear layer: turns, copies, and what is the device's time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from clearway.ops import _linear_trial


def clocks(log: list[int], **times: list[float]) -> dict[int, Callable[[], float]]:
    def clock(name: int, left: list[float]) -> float:
        log.append(name)
        return left.pop(0) if len(left) > 1 else left[0]

    return {
        int(name[1:]): (lambda number=int(name[1:]), left=list(taken): clock(number, left))
        for name, taken in times.items()
    }


def test_the_shortest_of_several_turns_counts() -> None:
    log: list[int] = []
    found = _linear_trial.in_turns(clocks(log, c0=[0.3, 0.2, 0.25], c1=[0.3, 0.1, 0.4]))
    assert found == {0: 0.2, 1: 0.1}
    assert log[:6] == [0, 1, 1, 0, 0, 1] and len(log) == 2 * _linear_trial.TURNS


def test_what_is_much_slower_is_not_timed_again_but_the_first_is() -> None:
    log: list[int] = []
    found = _linear_trial.in_turns(clocks(log, c0=[0.9], c1=[0.3], c2=[0.34], c3=[0.5]))
    assert log.count(3) == 1 and log.count(0) == log.count(1) == log.count(2) == _linear_trial.TURNS
    assert found[3] == 0.5


def test_it_ends_when_the_time_is_spent() -> None:
    log: list[int] = []
    _linear_trial.in_turns(clocks(log, c0=[4.0], c1=[4.0]))
    assert len(log) == 4  # 8 ms of 10 after the first turn, 16 after the second


def test_copies_are_more_than_the_cache_holds() -> None:
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    each = x.nbytes + weight.nbytes
    sets = _linear_trial.copies((x, weight), 10 * each)
    assert len(sets) * each > 10 * each and len(sets) <= 13
    assert sets[0][0] is x and all(torch.equal(one, x) and torch.equal(other, weight) for one, other in sets)
    assert len({one.data_ptr() for one, _ in sets}) == len(sets)
    assert len(_linear_trial.copies((x, weight), 0)) == _linear_trial.LEAST
    assert len(_linear_trial.copies((x, weight), 2**30)) == _linear_trial.MOST


class Cuda:
    """torch.cuda as far as the trial uses it: a stream that runs behind the host, in microseconds.

    The host takes `host_us` to ask for anything; the device waits a cycle a nanosecond, and takes 10 µs for a
    call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host_us: float) -> None:
        self.host_us, self.host, self.device = host_us, 0.0, 0.0
        self.calls, self.waits = 0, list[int]()
        for name, value in {
            "_sleep": self.wait,
            "Event": self.event,
            "current_stream": lambda: SimpleNamespace(synchronize=self.synchronize),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def ask(self, us: float) -> None:
        self.host += self.host_us
        self.device = max(self.device, self.host) + us

    def wait(self, cycles: int) -> None:
        self.waits.append(cycles)
        self.ask(cycles / 1e3)

    def call(self) -> None:
        self.calls += 1
        self.ask(10.0)

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(
            query=lambda: event.at <= self.host,
            synchronize=lambda: setattr(self, "host", max(self.host, event.at)),
            elapsed_time=lambda other: (other.at - event.at) / 1e3,
        )
        event.record = lambda: (self.ask(0.0), setattr(event, "at", self.device))
        return event

    def synchronize(self) -> None:
        raise self.fault  # type: ignore[attr-defined]


def test_it_is_the_device_s_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, host_us=5.0)
    twice = [lambda: (cuda.call(), cuda.call())] * 4
    found = _linear_trial.times({-1: [cuda.call] * 4, 0: twice})
    assert found == {-1: pytest.approx(0.01), 0: pytest.approx(0.02)}  # milliseconds
    assert set(cuda.waits) == {4 * _linear_trial.WAIT_CYCLES}


def test_a_slow_host_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host takes is no time of the device's: 8 calls of 100 µs need 800 µs, and are given 1049."""
    cuda = Cuda(monkeypatch, host_us=100.0)
    assert _linear_trial.times({-1: [cuda.call] * 8}) == {-1: pytest.approx(0.01)}
    first = 8 * _linear_trial.WAIT_CYCLES
    assert cuda.waits[:3] == [first, 2 * first, 4 * first] and set(cuda.waits[3:]) == {4 * first}


def test_a_host_that_is_too_slow_ends_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, host_us=1e4)
    assert _linear_trial.times({-1: [cuda.call] * 4})[-1] > 1
    assert max(cuda.waits) == _linear_trial.MOST_CYCLES


def test_everything_is_called_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, log = Cuda(monkeypatch, host_us=1.0), list[tuple[str, int]]()
    calls = [lambda number=number: (cuda.call(), log.append((number, len(cuda.waits)))) for number in "abcd"]
    _linear_trial.times({-1: calls})
    assert log[:4] == [(number, 0) for number in "abcd"] and log[4:8] == [(number, 1) for number in "abcd"]


def test_what_a_call_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, host_us=1.0)

    def failing() -> None:
        if cuda.waits:
            raise RuntimeError("it failed")

    with pytest.raises(RuntimeError, match="it failed"):
        _linear_trial.times({0: [failing]})


def test_a_fault_of_the_device_is_raised_and_another_s_capture_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch, host_us=1.0)
    cuda.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal"):
        _linear_trial.settle()
    cuda.fault = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    _linear_trial.settle()


@pytest.mark.cuda
def test_on_a_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x, weight = (torch.randn(512, 512, device="cuda", dtype=torch.float16) for _ in range(2))
    sets = _linear_trial.copies((x, weight), _linear_trial.cache_bytes(0))
    once = [lambda one=one: F.linear(*one) for one in sets]
    thrice = [lambda one=one: [F.linear(*one) for _ in range(3)] for one in sets]
    F.linear(x, weight)  # the workspace of the stream
    before = torch.cuda.memory_allocated()
    found = _linear_trial.times({0: once, 1: thrice})
    assert 0 < found[0] < found[1] < 1
    assert torch.cuda.memory_allocated() == before
