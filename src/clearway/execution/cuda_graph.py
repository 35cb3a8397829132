"""Captured CUDA graphs as an executor: one replay in place of hundreds of launches.

A bounded pool of graphs, each for one key: the tree of arguments with its shapes, dtypes and constants, the
routes of ops, PyTorch's switches, the module's adapters, what the caller adds. A graph whose module has since
been changed, or whose memory decisions would now be others, is never replayed. What cannot be captured runs
eagerly, and the reason is kept. Outputs are copies: the next replay does not change them.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clearway import device as machine
from clearway.device import Device
from clearway.errors import one_line
from clearway.execution.fingerprint import Fingerprint
from clearway.execution.kept import Frame, within
from clearway.ops import budget, contract

WARM_UPS = 2
GRAPHS = 6
"""How many graphs a pool holds: two sizes of a picture with and without guidance, and two to spare."""
_HOOKS = {"_hf_hook", "_diffusers_hook"}
"""Where Accelerate and Diffusers keep hooks of theirs on a module."""


class Capture(Protocol):
    """What warms up, captures and replays; a test gives one of its own."""

    def absent(self, device: torch.device) -> str | None:
        """Why nothing can be captured on `device` now."""

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        """Runs it off the current stream, which waits for it."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """(replay, output): `replay` does again what `run` did, into the same output."""


class TorchCapture:
    """CUDA's own; the graphs of one pool share their memory, since they run one after the other."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def absent(self, device: torch.device) -> str | None:
        """Why nothing can be captured on `device` now."""
        if device.type != "cuda":
            return f"CUDA graphs are for CUDA devices, this is {device.type}"
        if device.index not in (None, torch.cuda.current_device()):
            return f"its arguments are on {device}, which is not the current device"
        if torch.cuda.is_current_stream_capturing():
            return "somebody else is capturing already"
        return None

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        """Runs it on a side stream, as capture wants: handles and workspaces are made here."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(times):
                run()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """One graph in the pool's memory."""
        if not self._graphs:  # a pool that all graphs have left cannot be entered again
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = run()
        self._graphs.add(graph)
        return graph.replay, output


@dataclass(slots=True, eq=False)
class Graph:
    """One captured graph with what it reads, what it wrote and what it was captured under."""

    replay: Callable[[], None]
    output: Any
    inputs: list[Tensor]
    frame: Frame
    sample: budget.Sample
    routes: dict[str, int]
    seen: list[tuple[weakref.ref[Tensor], int | None] | None]
    replays: int = 0

    def load(self, tensors: Sequence[Tensor], promised: Sequence[bool]) -> None:
        """Copies the inputs in. One that is the same object with the same content as last time is left, so
        that what was computed from it (Frame) need not be computed again."""
        changed = []
        for index, (mine, given) in enumerate(zip(self.inputs, tensors, strict=True)):
            tracked = not given.is_inference()
            version = given._version if tracked else None
            before = self.seen[index]
            if before is not None and before[0]() is given and before[1] == version:
                continue
            mine.copy_(given)
            self.seen[index] = (weakref.ref(given), version) if tracked or promised[index] else None
            changed.append(mine)
        self.frame.refresh(changed)


@dataclass(slots=True, eq=False)
class Pool:
    """The graphs of one module, the least recently used of which goes when there are too many."""

    backend: Capture
    limit: int = GRAPHS
    graphs: OrderedDict[Hashable, Graph] = field(default_factory=OrderedDict)
    failed: dict[Hashable, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    captured: int = 0
    evicted: int = 0
    wasted: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while a graph is filled, replayed and read: its buffers are one for all threads."""
    _module: Fingerprint | None = None

    def checked(self, owner: nn.Module | None) -> Fingerprint | None:
        """The module's fingerprint; every graph goes where it is not what it was, since they would read
        memory that was given back."""
        if owner is None or (self._module is not None and self._module.holds()):
            return self._module
        self.evicted += len(self.graphs)
        self.graphs.clear()
        self.failed.clear()
        self.wasted = 0
        self._module = Fingerprint(owner)
        return self._module

    def find(self, key: Hashable, device: torch.device) -> Graph | None:
        """The graph of a key, if it would still be captured alike."""
        graph = self.graphs.get(key)
        if graph is None:
            return None
        if not graph.sample.holds(budget.current(device).limit_bytes):
            del self.graphs[key]
            self.evicted += 1
            return None
        self.graphs.move_to_end(key)
        return graph

    def add(self, key: Hashable, graph: Graph) -> None:
        """Keeps a graph, at the cost of the least recently used one where there are too many."""
        self.graphs[key] = graph
        self.captured += 1
        while len(self.graphs) > self.limit:
            _, gone = self.graphs.popitem(last=False)
            self.evicted += 1
            self.wasted = 0 if gone.replays > 1 else self.wasted + 1


@dataclass(slots=True, eq=False)
class CudaGraph:
    """Replays a graph of `module` for these arguments, captured at first sight; else calls it eagerly.

    Calls are counted as "<part>/cuda_graph" or "<part>/eager", with the reason in `reasons` and, for all
    executors of the module, in `pool.reasons`; the ops that a graph holds are counted at each replay.
    `promised` names keyword arguments that the caller never changes in place.
    """

    module: Callable[..., Any]
    part: str
    routes: Counter[str]
    pool: Pool
    key: Hashable = ()
    promised: tuple[str, ...] = ()
    reasons: Counter[str] = field(default_factory=Counter)
    calls: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        owner = self.module if isinstance(self.module, nn.Module) else getattr(self.module, "__self__", None)
        owner = owner if isinstance(owner, nn.Module) else None
        reason = self._refuse(tensors, leaves, owner)
        if reason is None:
            with self.pool.lock:
                graph, reason = self._graph(leaves, tree, tensors[0].device, owner)
                if graph is not None:
                    graph.load(tensors, self._promises(args, kwargs))
                    graph.replay()
                    graph.replays += 1
                    output = pytree.tree_map_only(Tensor, torch.clone, graph.output)
        if reason is not None:
            return self._eagerly(reason, args, kwargs)
        assert graph is not None
        self.routes[f"{self.part}/cuda_graph"] += 1
        contract.count(graph.routes)
        budget.current(tensors[0].device).follow(graph.sample)
        return output

    def sentences(self, name: str) -> list[str]:
        """Why some calls of what is called `name` were not replayed."""
        return [
            f"{name} ran eagerly{'' if count == self.calls else ' at times'}: {reason}"
            for reason, count in self.reasons.items()
        ]

    def _graph(
        self, leaves: list[Any], tree: Any, device: torch.device, owner: nn.Module | None
    ) -> tuple[Graph | None, str | None]:
        """The graph for these arguments, captured if need be; or why there is none."""
        module = self.pool.checked(owner)
        if module is not None and module.hooked():
            return None, "forward hooks are at work in it"
        key = self._key(leaves, tree, module)
        reason = self.pool.failed.get(key)
        if reason is not None:
            return None, reason
        graph = self.pool.find(key, device)
        if graph is None:
            if self.pool.wasted >= self.pool.limit:
                return None, "its arguments differ from call to call"
            graph, reason = self._capture(leaves, tree)
            if graph is None:
                assert reason is not None
                self.pool.failed[key] = reason
                return None, reason
            # warming up tests implementations, which can change routes: the key as it is now
            self.pool.add(self._key(leaves, tree, self.pool.checked(owner)), graph)
        return graph, None

    def _eagerly(self, reason: str, args: Any, kwargs: Any) -> Any:
        self.pool.reasons[reason] += 1
        self.reasons[reason] += 1
        self.routes[f"{self.part}/eager"] += 1
        return self.module(*args, **kwargs)

    def _refuse(self, tensors: list[Tensor], leaves: list[Any], owner: nn.Module | None) -> str | None:
        """Why these arguments are not captured; metadata only."""
        if not tensors:
            return "there is no tensor among its arguments"
        device = tensors[0].device
        reason = self.pool.backend.absent(device)
        if reason:
            return reason
        if any(tensor.device != device for tensor in tensors):
            return "its arguments lie on several devices"
        if torch.is_grad_enabled():
            weights = () if owner is None else owner.parameters()
            if any(tensor.requires_grad for tensor in (*tensors, *weights)):
                return "a gradient is needed"
        if torch.is_autocast_enabled(device.type):
            return "torch.autocast is at work"
        if owner is not None and not _HOOKS.isdisjoint(owner.__dict__):
            return "hooks are at work on it that may move its weights (offloading, caching)"
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                try:
                    hash(leaf)
                except TypeError:
                    return f"an argument is a {type(leaf).__name__}, which is no key"
        return None

    def _key(self, leaves: list[Any], tree: Any, module: Fingerprint | None) -> Hashable:
        signs = tuple(
            (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)
            for leaf in leaves
        )
        adapters = "" if module is None else module.adapters()
        how = contract.route_key(), machine.switches(), torch.is_grad_enabled()
        return self.key, str(tree), signs, adapters, how

    def _promises(self, args: Any, kwargs: Any) -> list[bool]:
        """For each tensor among the arguments, in order, whether it is promised not to change in place."""
        given = [(False, argument) for argument in args]
        given += [(name in self.promised, value) for name, value in kwargs.items()]
        return [
            promise
            for promise, value in given
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]

    def _capture(self, leaves: list[Any], tree: Any) -> tuple[Graph | None, str | None]:
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        inputs: list[Tensor] = []
        own = []
        with torch.inference_mode(False), torch.no_grad():  # buffers to write to in any mode
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    inputs.append(torch.empty_like(leaf, requires_grad=False))
                own.append(inputs[-1] if isinstance(leaf, Tensor) else leaf)
        for mine, given in zip(inputs, (leaf for leaf in leaves if isinstance(leaf, Tensor)), strict=True):
            mine.copy_(given)
        frame, routes = Frame(tuple(inputs)), dict[str, int]()
        limit = budget.current(device).limit_bytes

        def run() -> Any:
            args, kwargs = pytree.tree_unflatten(own, tree)  # anew: a UNet takes residuals off its list
            return self.module(*args, **kwargs)

        with budget.sampled(Device(device.type, device.index), limit) as sample, within(frame):
            try:
                with contract.recording({}):
                    self.pool.backend.warm_up(run, WARM_UPS)
                with contract.recording(routes):
                    replay, output = self.pool.backend.capture(run)
            except RuntimeError as error:
                if machine.is_out_of_memory(error):
                    self.pool.evicted += len(self.pool.graphs)
                    self.pool.graphs.clear()
                    machine.release_memory(Device(device.type, device.index))
                    return None, "there was no memory for its graph"
                if "captur" in str(error).lower():
                    return None, f"it cannot be captured: {one_line(error)}"
                raise
        if not all(
            isinstance(leaf, Tensor | int | float | str | None) for leaf in pytree.tree_leaves(output)
        ):
            return None, f"its output is a {type(output).__name__}, which cannot be copied"
        return Graph(replay, output, inputs, frame, sample, routes, [None] * len(inputs)), None
