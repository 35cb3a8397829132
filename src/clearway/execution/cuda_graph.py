"""Captured CUDA graphs as an executor: one replay in place of hundreds of launches.

A bounded pool of graphs, each for one key: the tree of arguments with its shapes, dtypes and constants, the
routes of ops, PyTorch's switches, the module's adapters, what the caller adds. A graph whose module has since
been changed, or whose memory decisions would now be others, is never replayed. A graph's first replay must
give what the call itself gave. What cannot be captured runs eagerly, and the reason is kept. Outputs are
copies: the next replay does not change them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clearway import device as machine
from clearway.device import Device
from clearway.errors import one_line
from clearway.execution.capture import agrees
from clearway.execution.fingerprint import Fingerprint
from clearway.execution.kept import Frame, inside, within
from clearway.execution.pool import Graph, Pool
from clearway.ops import ahead, budget, contract

WARM_UPS = 2
"""Calls before a capture; the first of them builds our kernels and launches none."""


@dataclass(slots=True, eq=False)
class CudaGraph:
    """Replays a graph of `module` for these arguments, captured at first sight; else calls it eagerly.

    Calls are counted as "<part>/cuda_graph" or "<part>/eager", with the reason in `reasons` and, for all
    executors of the module, in `pool.reasons`; the ops that a graph holds are counted at each replay.
    `promised` names keyword arguments that the caller never changes in place; `key` is the caller's own part
    of a graph's key, or a function that gives it.
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
        if inside():  # part of what somebody else captures
            return self.module(*args, **kwargs)
        self.calls += 1
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        owner = self.module if isinstance(self.module, nn.Module) else getattr(self.module, "__self__", None)
        owner = owner if isinstance(owner, nn.Module) else None
        reason = self._refuse(tensors, leaves, owner)
        if reason is None:
            with self.pool.lock:
                promised = self._promises(args, kwargs)
                graph, reason = self._graph(leaves, tree, promised, owner)
                if graph is not None:
                    self.pool.backend.enter(graph.buffers)
                    graph.load(tensors, promised)
                    graph.replay()
                    graph.replays += 1
                    self.pool.turns += 1
                    graph.turn = self.pool.turns
                    output = pytree.tree_map_only(Tensor, torch.clone, graph.output)
        elif self.pool.graphs:
            with self.pool.lock:
                self.pool.checked(owner)  # one that was moved away gives its graphs' memory back
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
        self, leaves: list[Any], tree: Any, promised: list[bool], owner: nn.Module | None
    ) -> tuple[Graph | None, str | None]:
        """The graph for these arguments, captured if need be; or why there is none."""
        module = self.pool.checked(owner)
        if module is not None and module.moved:
            return None, "hooks are at work in it that may move its weights (offloading, caching)"
        if module is not None and module.hooked(isinstance(self.module, nn.Module)):
            return None, "forward hooks are at work in it"
        if module is not None and module.foreign:
            return (
                None,
                f"{module.foreign} is somebody's own code, which a graph would not run at each call",
            )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = self._key(leaves, tree, module)
        reason = self.pool.failed.get(key)
        if reason is not None:
            return None, reason
        place, graph = self.pool.choose(key, tensors[0].device, tensors)
        if graph is None:
            if self.pool.restless and not self.pool.settled:
                return None, "it was moved or changed before its last graph was used twice"
            if self.pool.wasted >= self.pool.limit:
                return None, "its arguments differ from call to call"
            graph, reason = self._capture(leaves, tree, promised)
            if graph is None:
                assert reason is not None
                self.pool.failed[key] = reason
                return None, reason
            # warming up tests implementations, which can change routes: the key as it is now
            now = self._key(leaves, tree, self.pool.checked(owner))
            self.pool.add(place if now == key else now, graph)
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
        return self.key() if callable(self.key) else self.key, str(tree), signs, adapters, how

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

    def _capture(self, leaves: list[Any], tree: Any, promised: list[bool]) -> tuple[Graph | None, str | None]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = tensors[0].device
        inputs: list[Tensor] = []
        own = []
        with torch.inference_mode(False), torch.no_grad():  # buffers to write to in any mode
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    inputs.append(torch.empty_like(leaf, requires_grad=False))
                own.append(inputs[-1] if isinstance(leaf, Tensor) else leaf)
        # what is made from an input that is new at every call, as far as anybody can tell, stays in the graph
        lasting = []
        for mine, given, promise in zip(inputs, tensors, promised, strict=True):
            mine.copy_(given)
            lasting += [mine] if promise or not given.is_inference() else []
        frame, routes = Frame(tuple(lasting)), dict[str, int]()
        limit = budget.current(device).limit_bytes

        def run() -> Any:
            args, kwargs = pytree.tree_unflatten(own, tree)  # anew: a UNet takes residuals off its list
            return self.module(*args, **kwargs)

        def warm() -> Any:
            if next(turns) == 0:  # kernels are built at once, not one by one
                with within(Frame(tuple(lasting))):
                    ahead.build(run)
                return None
            return run()

        turns = itertools.count()
        with budget.sampled(Device(device.type, device.index), limit) as sample, within(frame):
            try:
                with contract.recording({}):
                    expected = self.pool.backend.warm_up(warm, WARM_UPS)
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
        self.pool.backend.enter(lambda: inputs)
        replay()
        if not agrees(output, expected):
            return None, "its graph gives other values than it does (randomness, or a kernel out of order)"
        unseen: list[Any] = [None] * len(inputs)
        return Graph(replay, output, inputs, frame, sample, routes, unseen, list(unseen)), None
