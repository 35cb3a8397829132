"""The trial of contenders for a linear layer: turns, copies, and the graphs it makes."""

from __future__ import annotations

import contextlib
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
    """torch.cuda as far as the trial uses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_default: bool) -> None:
        self.log: list[str] = []
        self.default, self.current = self.stream("default"), self.stream("current")
        if on_default:
            self.current = self.default
        self.made, self.graphs, self.now = 0, 0, 0.0
        for name, value in {
            "current_stream": lambda: self.current,
            "default_stream": lambda: self.default,
            "Stream": lambda: self.stream("another"),
            "stream": self.entered,
            "current_device": lambda: 0,
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": self.graph,
            "Event": self.event,
            "empty_cache": lambda: self.log.append("given back"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(_linear_trial, "_streams", {})

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.log.append(f"{name} after {other.name}")
        )

    @contextlib.contextmanager
    def entered(self, stream: Any) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before

    def graph(self) -> Any:
        number = self.graphs
        self.graphs += 1

        def begin(pool: Any, capture_error_mode: str) -> None:
            assert (pool, capture_error_mode) == ("pool", "thread_local")
            self.log.append(f"capture {number} on {self.current.name}")

        def replay() -> None:
            self.now += 8.0 if number == 0 else 4.0

        return SimpleNamespace(
            capture_begin=begin,
            capture_end=lambda: self.log.append(f"end {number}"),
            replay=replay,
            reset=lambda: self.log.append(f"reset {number}"),
        )

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(synchronize=lambda: None, elapsed_time=lambda other: other.at - event.at)
        event.record = lambda: setattr(event, "at", self.now)
        return event


@pytest.mark.parametrize("on_default", [False, True])
def test_graphs_of_calls_are_timed_and_given_back(monkeypatch: pytest.MonkeyPatch, on_default: bool) -> None:
    cuda = Cuda(monkeypatch, on_default)
    calls = [lambda: cuda.log.append("call")] * 2
    assert _linear_trial.times({-1: calls, 0: calls}) == {-1: 4.0, 0: 2.0}  # milliseconds of one call
    where = "another" if on_default else "current"
    assert cuda.log == [
        *(f"{where} after {'default' if on_default else 'current'}", "call", "call"),
        *(f"capture 0 on {where}", "call", "call", "end 0"),
        *(f"capture 1 on {where}", "call", "call", "end 1"),
        *(f"{'default' if on_default else 'current'} after {where}", "reset 0", "reset 1", "given back"),
    ]
    if on_default:  # not a new one each time
        assert _linear_trial.capturable(cuda.default) is _linear_trial.capturable(cuda.default)


def test_memory_that_cannot_be_given_back_now_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, on_default=False)

    def capturing() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", capturing)
    assert _linear_trial.times({-1: [lambda: None]}) == {-1: 8.0}


def test_a_capture_ends_whatever_a_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, on_default=False)

    def failing() -> None:
        if "capture 0 on current" in cuda.log:
            raise RuntimeError("it failed")

    with pytest.raises(RuntimeError, match="it failed"):
        _linear_trial.times({0: [failing]})
    assert cuda.log[-3:] == ["end 0", "current after current", "given back"]


@pytest.mark.cuda
def test_on_a_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x, weight = (torch.randn(512, 512, device="cuda", dtype=torch.float16) for _ in range(2))
    sets = _linear_trial.copies((x, weight), _linear_trial.cache_bytes(0))
    once = [lambda one=one: F.linear(*one) for one in sets]
    thrice = [lambda one=one: [F.linear(*one) for _ in range(3)] for one in sets]
    before = torch.cuda.memory_allocated()
    found = _linear_trial.times({0: once, 1: thrice})
    assert 0 < found[0] < found[1] < 1
    assert torch.cuda.memory_allocated() - before <= 2**26  # a workspace of the stream's at most
