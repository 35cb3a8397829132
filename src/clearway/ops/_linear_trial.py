"""How long contenders for one linear layer take: graphs of several calls, one after the other, in turns.

A kernel timed alone hides what it costs in a captured network: some of cuBLASLt's choices zero a counter
beforehand, and the GPU idles between the two. Each call of a graph has inputs of its own, copies that
together are more than the cache holds, as a network's weights are. The shortest of several turns counts,
since whatever else the GPU does only adds to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]

CACHE = 1.25
"""Copies of the inputs take so many times what the cache holds."""
LEAST, MOST = 4, 32
"""Calls of a graph."""
TURNS = 7
LIMIT_MS = 10.0
"""No further turn after so much time of the device."""
NEAR = 1.15
"""What takes so many times the fastest in the first turn is not timed again."""


def copies(tensors: Sequence[Tensor], cache_bytes: int) -> list[tuple[Tensor, ...]]:
    """The tensors themselves and copies of them, set by set, together more than a cache holds."""
    each = max(sum(tensor.nbytes for tensor in tensors), 1)
    count = min(max(-int(-CACHE * cache_bytes // each), LEAST), MOST)
    return [tuple(tensors), *(tuple(one.clone() for one in tensors) for _ in range(count - 1))]


def cache_bytes(index: int) -> int:
    """What the second-level cache of a CUDA device holds."""
    return int(getattr(torch.cuda.get_device_properties(index), "L2_cache_size", 0)) or 2**26


def times(contenders: Mapping[int, Sequence[Call]]) -> dict[int, float]:
    """Milliseconds of a call of each, on the current CUDA device; calls were made before.

    Waits for the device. What was allocated for it is given back. Those that were much slower than the
    fastest in the first turn are left at that.
    """
    current = torch.cuda.current_stream()
    alone = capturable(current)
    pool, graphs = torch.cuda.graph_pool_handle(), dict[int, Any]()
    alone.wait_stream(current)
    try:
        with torch.cuda.stream(alone):
            for calls in contenders.values():
                calls[0]()  # its workspace on this stream is made here, not in the graph
            for name, calls in contenders.items():
                graphs[name] = captured(calls, pool)
            for graph in graphs.values():
                graph.replay()
            found = in_turns({name: timed(graph.replay) for name, graph in graphs.items()})
    finally:
        current.wait_stream(alone)
        for graph in graphs.values():
            graph.reset()
        with contextlib.suppress(RuntimeError):  # another thread captures: what is cached stays so
            torch.cuda.empty_cache()
    return {name: ms / len(contenders[name]) for name, ms in found.items()}


def capturable(stream: Any) -> Any:
    """The stream, or where it is the device's default one, which cannot be captured, the same other one each
    time: every stream has a workspace of cuBLAS's (32 MiB on Hopper) to the end of the process."""
    if stream != torch.cuda.default_stream():
        return stream
    index = torch.cuda.current_device()
    if index not in _streams:
        _streams[index] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return _streams[index]


_streams: dict[int, Any] = {}


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


def captured(calls: Sequence[Call], pool: Any = None, **kwargs: Any) -> Any:
    """A graph of the calls, captured on the current stream, which is not the default one."""
    graph = torch.cuda.CUDAGraph(**kwargs)
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for call in calls:
            call()
    finally:
        graph.capture_end()
    return graph


def timed(replay: Call) -> Callable[[], float]:
    """A function that replays once and gives the milliseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def clock() -> float:
        start.record()
        replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return clock
