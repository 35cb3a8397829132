"""What this machine can do at most: matrix multiplication, copying, and how long an empty launch takes.

Measured here with random data, a few seconds at most, and kept in the state folder for this device, driver
and torch. The best of several runs counts: a ceiling is what was reached once, not what is usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from clearway import device as machine
from clearway import home

if TYPE_CHECKING:
    from clearway.device import Device
    from clearway.measure.clock import Timer

LIMIT_S = 1.5  # for each of the two measurements
LONG_ENOUGH_S = 0.02
COPY_BYTES = {"cuda": 2**30, "xpu": 2**30, "mps": 2**28, "cpu": 2**27}  # far beyond any cache
SIDES = (256, 512, 1024, 2048, 4096, 8192)
LAUNCHES = 200


@dataclass(frozen=True, slots=True)
class Ceilings:
    """FLOP/s of a matrix product in `dtype`, bytes/s of a copy (read and written), seconds a launch."""

    dtype: str
    flops_per_s: float
    bytes_per_s: float
    launch_s: float

    def floor_s(self, flops: float, bytes_moved: float) -> float:
        """The least time such work takes here: the larger of both bounds (a roofline)."""
        return max(flops / self.flops_per_s, bytes_moved / self.bytes_per_s)


def ceilings(
    device: Device, dtype: str, timer: Timer, *, tf32: bool = False, fresh: bool = False
) -> Ceilings:
    """This machine's ceilings for `dtype`; measured where they are not known yet, or `fresh` is set.

    A fresh measurement only raises what is known: a busy machine does not lower a ceiling.
    """
    import torch

    key = f"{dtype}{' tf32' if tf32 else ''}, {torch.get_num_threads()} threads"
    identity = machine.identity(device.kind) + (f", number {device.index}" if device.index else "")
    file = ("ceilings", f"{device.kind}.json")
    stored = home.read_json(*file)
    known = stored.get("ceilings") if stored.get("identity") == identity else {}
    known = known if isinstance(known, dict) else {}
    before = _read(known.get(key))
    if before and not fresh:
        return before
    with machine.tf32(device, tf32) if device.kind == "cuda" else nullcontext():
        found = measure(device, dtype, timer)
    if before:
        found = Ceilings(
            dtype,
            max(found.flops_per_s, before.flops_per_s),
            max(found.bytes_per_s, before.bytes_per_s),
            min(found.launch_s, before.launch_s),
        )
    home.write_json({"identity": identity, "ceilings": {**known, key: asdict(found)}}, *file)
    return found


def measure(device: Device, dtype: str, timer: Timer) -> Ceilings:
    """The ceilings, measured now."""
    import torch

    where, kind = str(device), machine.dtype(dtype)
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> Any:
        """Random numbers of this dtype on the device; a page of them repeated, which no chip compresses."""
        page = torch.randn(min(count, 2**22), generator=generator).to(where, kind)
        return page.repeat(-(-count // page.numel()))[:count]

    with torch.inference_mode():
        begun, flops_per_s = timer.now(), 0.0
        for side in SIDES:
            a, b = random(side * side).view(side, side), random(side * side).view(side, side)
            out = torch.empty_like(a)
            seconds = best(functools.partial(torch.mm, a, b, out=out), timer)
            flops_per_s = max(flops_per_s, 2 * side**3 / seconds)
            if timer.now() - begun + 24 * seconds > LIMIT_S:  # the next side takes 8 times as long, thrice
                break
        free = machine.memory(device).available_bytes
        source = random(min(COPY_BYTES[device.kind], free // 8) // kind.itemsize)
        target = torch.empty_like(source)
        seconds = best(lambda: target.copy_(source), timer)
        bytes_per_s = 2 * source.numel() * kind.itemsize / seconds
        one = random(1)
        launch_s = best(lambda: [one.add(1.0) for _ in range(LAUNCHES)], timer) / LAUNCHES
    return Ceilings(dtype, flops_per_s, bytes_per_s, launch_s)


def best(run: Callable[[], Any], timer: Timer, limit_s: float = LIMIT_S / 4) -> float:
    """The least seconds of one `run`, from idle to idle, over several that last long enough to be timed."""
    times, repeat = [], 1
    begun = timer.now()
    while True:
        timer.synchronize()
        start = timer.now()
        for _ in range(repeat):
            run()
        timer.synchronize()
        seconds = timer.now() - start
        if seconds < LONG_ENOUGH_S and repeat < 2**14 and timer.now() - begun < limit_s:
            repeat *= 2
            continue
        times.append(seconds / repeat)
        if len(times) >= 5 or timer.now() - begun + seconds > limit_s:
            return max(min(times), 1e-12)


def _read(stored: Any) -> Ceilings | None:
    """A stored entry, where it is a whole one."""
    if not isinstance(stored, dict):
        return None
    names = ("flops_per_s", "bytes_per_s", "launch_s")
    if not all(isinstance(stored.get(name), float) and stored[name] > 0 for name in names):
        return None
    return Ceilings(str(stored.get("dtype")), *(stored[name] for name in names))
