"""What warms up, captures and replays: CUDA's own graphs, in memory that all graphs of a device share.

One graph runs after the other and what it gave is copied before the next one runs, so the UNet's, the VAE's
and the text encoders' graphs need the memory of the largest of them, not of all. A lock for the whole process
and an order between streams keep it so for several threads.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

APART = 0.02
"""How far a replay may be from the call that it stands for, of the largest value: far above what another
order of sums gives in half precision, far below what a kernel that was left out gives."""


class Capture(Protocol):
    """What warms up, captures and replays; a test gives one of its own."""

    lock: threading.RLock
    """Held while a graph is captured, or filled, replayed and read."""

    def absent(self, device: torch.device) -> str | None:
        """Why nothing can be captured on `device` now."""

    def enter(self, buffers: Callable[[], Iterable[Tensor]]) -> None:
        """What follows comes after all that was done with the graphs' memory before, in any stream; `buffers`
        are the tensors outside of that memory that it will use."""

    def warm_up(self, run: Callable[[], Any], times: int) -> Any:
        """Runs it off the current stream, which waits for it; what the last run gave."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """(replay, output): `replay` does again what `run` did, into the same output."""


@dataclass(slots=True, eq=False)
class _Memory:
    """What the graphs of one device share: memory, two streams, and the stream that used the memory last.

    Each stream has a workspace of cuBLAS's (32 MiB on Hopper), hence one for all warm-ups and one for all
    captures. They are two, so that the workspace that a graph has baked in lies in the pool: torch.compile's
    own graphs have all workspaces freed, and what lies in the pool stays the graphs'. It goes with the pool:
    one begun after a failure (`handle` None), while older graphs live, has a workspace of its own. The older
    pool is then those graphs' alone and lasts as long as they do.
    """

    warming: Any
    capturing: Any
    handle: Any = None
    stream: Any = None
    graphs: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """Those of the pool that `handle` names."""
    failed: list[Any] = field(default_factory=list)
    """Graphs whose capture failed, kept: torch's allocator of pinned memory goes on asking them."""


_LOCK = threading.RLock()
_memories: dict[int, _Memory] = {}


class TorchCapture:
    """CUDA's own."""

    def __init__(self) -> None:
        self.lock = _LOCK

    def absent(self, device: torch.device) -> str | None:
        """Why nothing can be captured on `device` now."""
        if device.type != "cuda":
            return f"CUDA graphs are for CUDA devices, this is {device.type}"
        if device.index not in (None, torch.cuda.current_device()):
            return f"its arguments are on {device}, which is not the current device"
        if torch.cuda.is_current_stream_capturing():
            return "somebody else is capturing already"
        return None

    def enter(self, buffers: Callable[[], Iterable[Tensor]]) -> None:
        """The current stream waits for the one that used the memory last, where that is another."""
        memory, stream = _memory(), torch.cuda.current_stream()
        if memory.stream is not None and memory.stream != stream:
            stream.wait_stream(memory.stream)
            for buffer in buffers():
                buffer.record_stream(stream)
        memory.stream = stream

    def warm_up(self, run: Callable[[], Any], times: int) -> Any:
        """Runs it on a side stream, as capture wants: handles and workspaces are made here."""
        stream, output = _memory().warming, None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(times):
                output = None  # not two of them at once
                output = run()
        torch.cuda.current_stream().wait_stream(stream)
        return output

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """One graph in the device's memory for graphs; a failure leaves the stream and random numbers as they
        were, and the next capture a memory that can be entered. Raises what `run` raised, or what ended the
        capture otherwise."""
        memory, before = _memory(), torch.cuda.current_stream()
        if memory.handle is None or not memory.graphs:  # a pool that all graphs have left is closed
            memory.handle, memory.graphs = torch.cuda.graph_pool_handle(), weakref.WeakSet()
            torch._C._cuda_clearCublasWorkspaces()  # the capturing stream's is made anew, in this pool
        graph = torch.cuda.CUDAGraph()
        raised: list[BaseException] = []
        try:
            with torch.cuda.graph(
                graph, pool=memory.handle, stream=memory.capturing, capture_error_mode="thread_local"
            ):
                try:
                    output = run()
                except BaseException as error:
                    raised.append(error)
                    raise
        except BaseException:
            _give_up(memory, graph, before)
            if not raised:
                raise
        if raised:  # not what ending the capture raised of it; here, and popped: no cycle holds what was made
            raise raised.pop()
        memory.graphs.add(graph)
        return graph.replay, output


def _give_up(memory: _Memory, graph: Any, before: Any) -> None:
    """Undoes what a failed capture leaves: where ending it raises too, torch.cuda.graph leaves its own stream
    current, its pool being recorded to, and (torch before 2.13) its random numbers waiting for the end."""
    torch.cuda.set_stream(before)
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError, AttributeError, TypeError):  # ended already, or another torch
        torch._C._cuda_endAllocateToPool(device, memory.handle)
        torch._C._cuda_releasePool(device, memory.handle)  # entered and ended: the graph itself does not
    memory.handle = None  # the pinned memory's pool of this name cannot be ended
    _let_draw(torch.cuda.default_generators[device])
    with contextlib.suppress(RuntimeError):
        graph.reset()
    memory.failed.append(graph)


def _let_draw(generator: torch.Generator) -> None:
    """Gives a generator whose state still waits for a capture's end another one of the same seed and offset.

    Only such a one, which refuses to draw: a graph of somebody else's that draws from the state it had would
    no longer follow `manual_seed`.
    """
    with contextlib.suppress(RuntimeError):
        offset = generator.get_offset()
        try:
            torch.empty(1, device=generator.device).uniform_(generator=generator)
        except RuntimeError:
            generator.graphsafe_set_state(generator.clone_state())
        else:
            generator.set_offset(offset)


def _memory() -> _Memory:
    device = torch.cuda.current_device()
    if device not in _memories:
        warming, capturing = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
        _memories[device] = _Memory(warming, capturing)
    return _memories[device]


def _by_the_largest(apart: Tensor, right: Tensor, _: torch.dtype) -> Tensor:
    return apart.abs().max() <= APART * right.abs().max()


def agrees(
    found: Any, expected: Any, near: Callable[[Tensor, Tensor, torch.dtype], Tensor] = _by_the_largest
) -> bool:
    """Whether what stands for a call gave what the call gave, as far as rounding goes; waits for the device.

    `near(difference, expected, dtype)` says so of floating-point outputs of that dtype, in float32 or wider.
    """
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return all(_alike(one, other, near) for one, other in pairs if isinstance(other, Tensor))


def _alike(found: Tensor, expected: Tensor, near: Callable[[Tensor, Tensor, torch.dtype], Tensor]) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    if expected.numel() == 0:
        return True
    wide, finite = torch.promote_types(expected.dtype, torch.float32), expected.isfinite()
    right = expected.to(wide).where(finite, 0)
    apart = found.to(wide).where(finite, 0) - right
    return bool((found.isfinite() == finite).all() & near(apart, right, expected.dtype))
