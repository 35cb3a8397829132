"""The three meters, on the CPU and with devices that only pretend."""

import gc
import mmap
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from clearway.device import Device
from clearway.measure import memory
from clearway.measure.memory import Meter

MIB = 2**20


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "clearway-memory"]


def wait_until(done) -> None:
    for _ in range(2000):
        if done():
            return
        time.sleep(0.005)
    raise AssertionError("nothing was sampled")


class Card:
    """What torch.cuda tells of memory, moved by hand; no call of it would wait for the device."""

    def __init__(self) -> None:
        self.used = 10 * MIB
        self.calls: list[str] = []

    def mem_get_info(self, name: str) -> tuple[int, int]:
        self.calls.append(f"{threading.current_thread().name} mem_get_info {name}")
        return 100 * MIB - self.used, 100 * MIB

    def reset_peak_memory_stats(self, name: str) -> None:
        self.calls.append("reset")

    def max_memory_reserved(self, name: str) -> int:
        return 30 * MIB

    def max_memory_allocated(self, name: str) -> int:
        return 20 * MIB


def test_the_cpu_meter_sees_memory_that_was_given_back() -> None:
    """Pages of its own: what malloc gives may be memory that the process had already, and kept."""
    gc.collect()
    with Meter(Device("cpu"), interval_s=0.001) as meter:
        block = mmap.mmap(-1, 96 * MIB)
        block[:: mmap.PAGESIZE] = b"x" * (96 * MIB // mmap.PAGESIZE)
        count = len(meter.timeline)
        wait_until(lambda: len(meter.timeline) > count + 1)
        block.close()
    assert meter.driver_peak_bytes - meter.baseline_bytes > 64 * MIB
    assert meter.driver_end_bytes < meter.driver_peak_bytes
    assert meter.allocator_peak_bytes is meter.live_peak_bytes is None
    assert "psutil" in meter.sources["driver"]
    times = [at for at, _ in meter.timeline]
    assert times == sorted(times) and max(value for _, value in meter.timeline) > meter.baseline_bytes
    assert watchers() == []


def test_a_peak_between_two_samples_is_told_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = iter([500 * 2**30, 600 * 2**30])
    monkeypatch.setattr(memory, "_high_water", lambda: next(marks))
    with Meter(Device("cpu"), interval_s=60) as meter:
        pass
    assert meter.driver_peak_bytes == 600 * 2**30
    monkeypatch.setattr(memory, "_high_water", lambda: 500 * 2**30)  # an older peak is not this one's
    with Meter(Device("cpu"), interval_s=60) as meter:
        pass
    assert meter.driver_peak_bytes < 500 * 2**30


def test_the_thread_stops_when_the_body_raises() -> None:
    with pytest.raises(RuntimeError, match="no"), Meter(Device("cpu"), interval_s=60) as meter:
        assert len(watchers()) == 1
        raise RuntimeError("no")
    assert watchers() == [] and meter.driver_end_bytes > 0


def test_the_cuda_meters_are_three_and_none_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    monkeypatch.setattr(memory, "_backend", lambda device: card)
    with Meter(Device("cuda", 1), interval_s=0.001) as meter:
        card.used = 70 * MIB
        wait_until(lambda: meter.driver_peak_bytes == 70 * MIB)
        card.used = 12 * MIB
    assert meter.as_record() == {
        "baseline_bytes": 10 * MIB,
        "driver_peak_bytes": 70 * MIB,
        "driver_end_bytes": 12 * MIB,
        "allocator_peak_bytes": 30 * MIB,
        "live_peak_bytes": 20 * MIB,
        "sources": meter.sources,
    }
    assert "whole device" in meter.sources["driver"]
    assert card.calls[:2] == ["MainThread mem_get_info cuda:1", "reset"]
    assert set(card.calls) == {
        "reset",
        "MainThread mem_get_info cuda:1",
        "clearway-memory mem_get_info cuda:1",
    }


def test_mps_tells_the_driver_and_live_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(driver_allocated_memory=lambda: 8 * MIB, current_allocated_memory=lambda: 5 * MIB)
    monkeypatch.setattr(torch, "mps", fake)
    with Meter(Device("mps"), interval_s=60) as meter:
        pass
    assert (meter.driver_peak_bytes, meter.live_peak_bytes) == (8 * MIB, 5 * MIB)
    assert meter.allocator_peak_bytes is None and "not told" in meter.sources["allocator"]


def test_a_fault_while_sampling_ends_the_sampling_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with Meter(Device("cpu"), interval_s=0.001) as meter:
        read, meter._driver = meter._driver, lambda: 1 // 0
        wait_until(lambda: watchers() == [])
        meter._driver = read
    assert "stopped early: integer division" in meter.sources["driver"]


def test_a_long_timeline_keeps_its_peaks_in_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_POINTS", 20)
    meter, values = Meter(Device("cpu")), iter([*range(77), 10**15, *range(400)])
    meter._driver = lambda: next(values)
    for _ in range(478):
        meter._sample()
    assert len(meter.timeline) < 20
    assert max(value for _, value in meter.timeline) == meter.driver_peak_bytes == 10**15
    assert meter._interval_s > 0.01


@pytest.mark.cuda
def test_the_meters_on_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with Meter(Device("cuda", 0), interval_s=0.001) as meter:
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda:0")
        with torch.cuda.graph(graph):  # sampling goes on while a graph is captured
            for _ in range(200):
                x = x + 1
                time.sleep(0.001)
        graph.replay()
        torch.cuda.synchronize()
    assert meter.live_peak_bytes is not None and meter.allocator_peak_bytes is not None
    assert 256 * MIB <= meter.live_peak_bytes <= meter.allocator_peak_bytes
    assert meter.driver_peak_bytes - meter.baseline_bytes >= 256 * MIB
    assert "stopped early" not in meter.sources["driver"] and len(meter.timeline) > 50
