"""How long contenders for one linear layer take: several calls of each in a row, in turns.

A kernel timed alone hides what it costs in a network: some of cuBLASLt's choices zero a counter beforehand,
and the GPU idles between the two. So the calls lie ready in the stream, behind a kernel that only waits,
before the first of them runs, as in a captured graph; nothing is captured, which would need memory of its own
and to be undone where it fails. Each call has inputs of its own, together more than the cache holds, as a
network's weights are. The shortest of several turns counts, since whatever else the GPU does only adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]

CACHE = 1.25
"""Copies of the inputs take so many times what the cache holds."""
LEAST, MOST = 4, 32
"""Calls in a row."""
TURNS = 7
LIMIT_MS = 10.0
"""No further turn after so much time of the device."""
NEAR = 1.15
"""What takes so many times the fastest in the first turn is not timed again."""
WAIT_CYCLES, MOST_CYCLES = 2**15, 2**24
"""What the device waits for a call of the host's, some 20 µs at 1.5 GHz, and at most altogether."""


def copies(tensors: Sequence[Tensor], cache_bytes: int) -> list[tuple[Tensor, ...]]:
    """The tensors themselves and copies of them, set by set, together more than a cache holds."""
    each = max(sum(tensor.nbytes for tensor in tensors), 1)
    count = min(max(-int(-CACHE * cache_bytes // each), LEAST), MOST)
    return [tuple(tensors), *(tuple(one.clone() for one in tensors) for _ in range(count - 1))]


def cache_bytes(index: int) -> int:
    """What the second-level cache of a CUDA device holds."""
    return int(getattr(torch.cuda.get_device_properties(index), "L2_cache_size", 0)) or 2**26


def settle() -> None:
    """Waits for the current stream. Raises a fault of the device: it stays, any later call says it again."""
    try:
        torch.cuda.current_stream().synchronize()
    except RuntimeError as error:
        if "captur" not in str(error).lower():  # a capture in another thread may forbid it: no fault
            raise


def times(contenders: Mapping[int, Sequence[Call]]) -> dict[int, float]:
    """Milliseconds of a call of each, on the current CUDA device and stream.

    Waits for the device. Those that were much slower than the fastest in the first turn are left at that.
    """
    for calls in contenders.values():  # what is made or loaded at a first call
        for call in calls:
            call()
    found = in_turns({name: timed(calls) for name, calls in contenders.items()})
    return {name: ms / len(contenders[name]) for name, ms in found.items()}


def in_turns(clocks: Mapping[int, Callable[[], float]]) -> dict[int, float]:
    """The shortest time of each, in milliseconds; the first of them is timed in every turn."""
    first = next(iter(clocks))
    found = {name: clock() for name, clock in clocks.items()}
    spent = sum(found.values())
    fastest = min(found.values())
    near = [name for name, ms in found.items() if name == first or ms <= NEAR * fastest]
    for turn in range(1, TURNS):
        if spent > LIMIT_MS:
            break
        for name in near[:: 1 - 2 * (turn % 2)]:
            ms = clocks[name]()
            spent += ms
            found[name] = min(found[name], ms)
    return found


def timed(calls: Sequence[Call]) -> Callable[[], float]:
    """A function that makes the calls once and gives the milliseconds that the device took for them.

    Where it began before the host had asked for all of them, it is the host's time: they are made again, and
    the device waits for longer.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    cycles = min(WAIT_CYCLES * len(calls), MOST_CYCLES)

    def clock() -> float:
        nonlocal cycles
        while True:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            start.record()
            for call in calls:
                call()
            end.record()
            ready = not start.query()  # type: ignore[no-untyped-call]
            end.synchronize()
            if ready or cycles >= MOST_CYCLES:
                return float(start.elapsed_time(end))
            cycles = min(2 * cycles, MOST_CYCLES)

    return clock
