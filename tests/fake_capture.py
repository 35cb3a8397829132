"""Stand-ins for CUDA's graphs that run on any device: one that keeps what a real one bakes in, and one of
`torch.cuda` itself, as far as captures and their memory go."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar, copy_context
from types import TracebackType
from typing import Any, ClassVar

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from clearway.ops import contract


class Recorder:
    """Captures by keeping the call: a replay does it again, into the same output. What code of others does in
    it (`replaying`) a graph on a device would not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.warm_ups, self.captures, self.replays = error, 0, 0, 0
        self.lock = threading.RLock()

    def absent(self, device: torch.device) -> str | None:
        return None

    def enter(self, buffers: Callable[[], Iterable[torch.Tensor]]) -> None:
        pass

    def warm_up(self, run: Callable[[], Any], times: int) -> Any:
        for _ in range(times):
            output = run()
        self.warm_ups += times
        return output

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.captures += 1
        if self.error is not None:
            raise self.error
        output, frame = run(), copy_context()  # the buffers that a real graph would have baked in

        def replay() -> None:
            self.replays += 1
            fresh = frame.copy().run(uncounted, run)
            for mine, new in zip(pytree.tree_leaves(output), pytree.tree_leaves(fresh), strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(new)

        return replay, output


class Baked(Recorder):
    """Captures what a real one does: operations with the memory, the layouts and the numbers of that moment.
    A replay runs no Python of the module's, reads and writes where tensors lay, and so is stale where a real
    graph would be."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.captures += 1
        tape = _Tape()
        with tape:
            output = run()

        def replay() -> None:
            self.replays += 1
            with torch.inference_mode():
                for func, args, kwargs, made in tape.steps:
                    fresh = func(*args, **kwargs)
                    for mine, new in zip(made, pytree.tree_leaves(fresh), strict=True):
                        if mine is not None:
                            mine.copy_(new)

        return replay, output


class _Tape(TorchDispatchMode):
    """(operation, arguments, where to put what it makes) of each, its tensors as they are now."""

    watches = True

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        now = pytree.tree_map_only(torch.Tensor, _as_it_lies, (args, kwargs or {}))
        given = {_memory(one) for one in pytree.tree_leaves(now) if isinstance(one, torch.Tensor)}
        output = func(*args, **(kwargs or {}))
        made = []
        for one in pytree.tree_leaves(output):
            fresh = isinstance(one, torch.Tensor) and _memory(one) not in given  # else a view, or in place
            made.append(_as_it_lies(one) if fresh else None)
        self.steps.append((func, *now, made))
        return output


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory by a tensor that does not follow what becomes of the first."""
    return tensor.detach()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


_replaying: ContextVar[bool] = ContextVar("replaying", default=False)


def replaying() -> bool:
    """Whether this runs in the place of a graph, which runs no Python."""
    return _replaying.get()


def uncounted(run: Callable[[], Any]) -> Any:
    """A graph on a device runs no Python, which alone counts ops; within a copied context."""
    _replaying.set(True)
    with contract.recording({}):
        return run()


class FakeCuda:
    """The rules of torch's allocators while graphs are captured; `put` it in the place of torch.cuda's.

    A pool may be recorded to by one capture at a time, and is closed when all graphs have left it. A capture
    that was made invalid raises where it ends, and then none of what it began is ended: neither the pool, nor
    that of pinned memory, which nobody can end. `uses` counts by pool; `broken` is whether the capture under
    way is invalid.
    """

    def __init__(self) -> None:
        self.stream: Any = "the user's"
        self.uses = Counter[Any]()
        self.recorded: list[Any] = []
        self.pinned: list[tuple[Any, weakref.ref[FakeGraph]]] = []
        self.workspaces: dict[Any, Any] = {}
        self.broken = False
        self.under_way: FakeGraph | None = None

    def put(self, patch: pytest.MonkeyPatch) -> None:
        """In place of torch's own until the test's end."""
        fake, numbers = self, itertools.count(1)

        def set_stream(stream: Any) -> None:
            fake.stream = stream

        class Graph(FakeGraph):
            cuda = fake

        for name, value in {
            "current_device": lambda: 0,
            "current_stream": lambda: fake.stream,
            "set_stream": set_stream,
            "Stream": lambda: f"stream {next(numbers)}",
            "graph_pool_handle": lambda: (0, next(numbers)),
            "CUDAGraph": Graph,
            "graph": FakeCapturing,
            "default_generators": [torch.Generator()],
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.workspaces.clear, raising=False)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _, pool: fake.end(pool), raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", lambda _, pool: fake.release(pool), raising=False)

    def begin(self, pool: Any) -> None:
        if pool in self.uses and not self.uses[pool]:
            raise RuntimeError("INTERNAL ASSERT: use_count > 0")
        self.uses[pool] += 1
        if pool in self.recorded or pool in (name for name, _ in self.pinned):
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recorded.append(pool)

    def end(self, pool: Any) -> None:
        if pool not in self.recorded:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recorded.remove(pool)

    def release(self, pool: Any) -> None:
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0

    def multiply(self) -> None:
        """A product of matrices in the capture under way: its workspace is baked in."""
        assert self.under_way is not None
        pool = self.workspaces.setdefault(self.stream, self.under_way.pool)
        self.under_way.reads.add(pool)

    def forbidden(self) -> None:
        """What no capture may hold, a value that is read: it is invalid from here on."""
        self.broken = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def sound(self) -> bool:
        """Whether nothing is under way, and all that graphs read and allocators ask is there."""
        graphs = [graph for graph in FakeGraph.alive if graph.cuda is self]
        there = all(self.uses[pool] > 0 for graph in graphs if graph.ended for pool in graph.reads)
        asked = all(graph() is not None for _, graph in self.pinned)
        return not self.recorded and self.under_way is None and there and asked


class FakeGraph:
    """torch.cuda.CUDAGraph."""

    cuda: FakeCuda
    alive: ClassVar[weakref.WeakSet[FakeGraph]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.pool: Any = None
        self.ended = False
        self.reads = set[Any]()
        self.alive.add(self)

    def capture_begin(self, pool: Any) -> None:
        self.cuda.begin(pool)
        self.pool, self.cuda.under_way, self.cuda.broken = pool, self, False
        self.cuda.pinned.append((pool, weakref.ref(self)))

    def capture_end(self) -> None:
        self.cuda.under_way = None
        if self.cuda.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.cuda.end(self.pool)
        self.cuda.pinned.pop()
        self.ended = True

    def replay(self) -> None:
        assert self.ended

    def reset(self) -> None:
        if self.ended:
            self.cuda.release(self.pool)
            self.ended = False

    def __del__(self) -> None:
        self.reset()


class FakeCapturing:
    """torch.cuda.graph, which leaves its stream current where ending the capture raises."""

    def __init__(self, graph: FakeGraph, *, pool: Any, stream: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.graph, self.pool, self.stream = graph, pool, stream

    def __enter__(self) -> None:
        self.before, self.graph.cuda.stream = self.graph.cuda.stream, self.stream
        self.graph.capture_begin(self.pool)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.graph.capture_end()
        self.graph.cuda.stream = self.before
