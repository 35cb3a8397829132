"""Three memory meters: what the driver gave, what the allocator holds of it, what tensors use of that."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from clearway.device import Device
from clearway.errors import one_line

MOST_POINTS = 2000


class Meter:
    """Within it, the memory of `device` is watched; afterwards its numbers stand as attributes, in bytes.

    `baseline_bytes`, `driver_peak_bytes`, `driver_end_bytes`: CUDA and XPU, what is in use on the whole
    device, other programs included; MPS, what Metal gave this process; CPU, the process's resident set. A
    thread reads them every `interval_s` without waiting for the device, so a shorter peak can be missed.
    `allocator_peak_bytes` and `live_peak_bytes`: what torch reserved and what tensors used of it, exact on
    CUDA and XPU (their counters are reset on entry: meters do not nest); on MPS live bytes are sampled and
    reserved ones are not told; None on the CPU. `timeline` is (seconds since entry, driver bytes), at most
    2000 points. `sources` says how each was read.
    """

    def __init__(self, device: Device, interval_s: float = 0.01) -> None:
        self.device = device
        self.baseline_bytes = self.driver_peak_bytes = self.driver_end_bytes = 0
        self.allocator_peak_bytes: int | None = None
        self.live_peak_bytes: int | None = None
        self.timeline: list[tuple[float, int]] = []
        self.sources: dict[str, str] = {}
        self._interval_s = interval_s
        self._driver, self._live = _readers(device, self.sources)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._begun = 0.0
        self._mark = 0

    def __enter__(self) -> Meter:
        self._mark = _high_water() if self.device.kind == "cpu" else 0
        self._begun = time.perf_counter()
        self._sample()
        self.baseline_bytes = self.timeline[0][1]
        if self.device.kind in (
            "cuda",
            "xpu",
        ):  # after a first reading, which starts the device where it must
            _backend(self.device).reset_peak_memory_stats(str(self.device))
        self._thread = threading.Thread(target=self._watch, name="clearway-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()
        self._sample()
        self.driver_end_bytes = self.timeline[-1][1]
        if self.device.kind == "cpu" and (mark := _high_water()) > self._mark:
            self.driver_peak_bytes = max(self.driver_peak_bytes, mark)
        if self.device.kind in ("cuda", "xpu"):
            self.allocator_peak_bytes = _backend(self.device).max_memory_reserved(str(self.device))
            self.live_peak_bytes = _backend(self.device).max_memory_allocated(str(self.device))

    def as_record(self) -> dict[str, Any]:
        """The memory ledger of a `Record`."""
        return {
            "baseline_bytes": self.baseline_bytes,
            "driver_peak_bytes": self.driver_peak_bytes,
            "driver_end_bytes": self.driver_end_bytes,
            "allocator_peak_bytes": self.allocator_peak_bytes,
            "live_peak_bytes": self.live_peak_bytes,
            "sources": dict(self.sources),
        }

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._sample()
            except Exception as error:  # the flow meets a fault of the device itself and tells it better
                self.sources["driver"] += f"; stopped early: {one_line(error)}"
                return

    def _sample(self) -> None:
        now = self._driver()
        self.driver_peak_bytes = max(self.driver_peak_bytes, now)
        if self._live:
            self.live_peak_bytes = max(self.live_peak_bytes or 0, self._live())
        self.timeline.append((time.perf_counter() - self._begun, now))
        if len(self.timeline) >= MOST_POINTS:  # a long run: half the points, the higher of each two
            pairs = zip(self.timeline[::2], self.timeline[1::2], strict=True)
            self.timeline = [max(pair, key=lambda point: point[1]) for pair in pairs]
            self._interval_s *= 2


def _readers(device: Device, sources: dict[str, str]) -> tuple[Callable[[], int], Callable[[], int] | None]:
    """How the driver's bytes are read, and live ones where they must be sampled; fills `sources`."""
    if device.kind in ("cuda", "xpu"):
        backend, name = _backend(device), str(device)
        sources |= {
            "driver": f"torch.{device.kind}.mem_get_info: in use on the whole device, sampled",
            "allocator": f"torch.{device.kind}.max_memory_reserved",
            "live": f"torch.{device.kind}.max_memory_allocated",
        }

        def used() -> int:
            free, total = backend.mem_get_info(name)
            return int(total - free)

        return used, None
    if device.kind == "mps":
        import torch

        sources |= {
            "driver": "torch.mps.driver_allocated_memory: this process, sampled",
            "allocator": "not told by torch.mps",
            "live": "torch.mps.current_allocated_memory, sampled",
        }
        return torch.mps.driver_allocated_memory, torch.mps.current_allocated_memory
    import psutil

    process = psutil.Process()
    sources |= {
        "driver": "psutil: resident set of this process, sampled; the system's own peak where it rose",
        "allocator": "not told: torch has no allocator of its own on the CPU",
        "live": "not told on the CPU",
    }
    return lambda: int(process.memory_info().rss), None


def _high_water() -> int:
    """The most this process ever held resident, in bytes; 0 where the system (Windows) has no such call."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _backend(device: Device) -> Any:
    import torch

    return getattr(torch, device.kind)
