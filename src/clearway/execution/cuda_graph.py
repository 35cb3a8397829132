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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from clearway import device as machine
from clearway.device import Device
from clearway.errors import one_line
from clearway.execution.calls import Call, copied, defaults, told
from clearway.execution.capture import agrees
from clearway.execution.fingerprint import Fingerprint
from clearway.execution.kept import Frame, inside, within
from clearway.execution.pool import Graph, Pool
from clearway.ops import ahead, budget, contract, other_sizes

WARM_UPS = 2
"""Calls before a capture; the first of them builds our kernels and launches none."""
NO_MEMORY = "there was no memory for its graph"


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
        call = Call.of(self.module, args, kwargs)
        reason = self._refuse(call)
        if reason is None:
            with self.pool.lock:
                promised = call.promises(self.promised)
                module, graph, output = self._at_once(call, promised)
                if graph is None:
                    module = self.pool.checked(call.owner) if module is None else module
                    graph, reason = self._graph(call, promised, module)
                    if graph is not None:
                        output = self._replayed(graph, call, promised)
                        self._count(graph)
        elif self.pool.held:
            with self.pool.lock:
                self.pool.checked(call.owner)  # one that was moved away gives its graphs' memory back
        if reason is not None:
            return self._eagerly(reason, args, kwargs)
        assert graph is not None
        self.routes[f"{self.part}/cuda_graph"] += 1
        contract.count(graph.routes)
        budget.current(call.tensors[0].device).follow(graph.sample)
        return output

    def sentences(self, name: str) -> list[str]:
        """Why some calls of what is called `name` were not replayed."""
        return told(name, self.reasons, self.calls)

    def _at_once(self, call: Call, promised: list[bool]) -> tuple[Fingerprint | None, Graph | None, Any]:
        """(None, graph, its output), replayed before it is looked whether the module still is what it was:
        the device works meanwhile. Without a graph where it is not, and what was computed is thrown away;
        the first is then the module as it was found, None where nobody looked.

        A replay changes nothing but what the graph owns, and reads weights that lie where they lay; so does
        what is made anew of another prompt, by the module as it is now. Where that fails the module is no
        longer what it was, or the call itself will fail so.
        """
        module = self.pool.lying(call.owner)
        if module is None or module.refuse(call.itself, hooks=self.pool.heard) is not None:
            return None, None, None
        key = self._key(call, module)
        _, graph = self.pool.choose(key, call.tensors[0].device, call.tensors)
        if graph is None:
            return None, None, None
        settled = graph.ready(call.tensors)
        if not settled and module.hooked(call.itself):  # who would hear of what is made anew
            return None, None, None
        try:
            output = self._replayed(graph, call, promised, settled)
        except Exception:
            if settled:
                raise  # of the replay itself
            return None, None, None
        found = self.pool.checked(call.owner, lies=True)
        if found is not module:
            return found, None, None
        self.pool.heard = module.hooked(call.itself)
        if self.pool.heard:
            return found, None, None
        self._count(graph)
        return None, graph, output

    def _replayed(self, graph: Graph, call: Call, promised: list[bool], settled: bool = False) -> Any:
        self.pool.backend.enter(graph.buffers)
        graph.load(call.tensors, promised, settled)
        graph.replay()
        return copied(graph.output)

    def _count(self, graph: Graph) -> None:
        graph.uses += 1
        self.pool.turns += 1
        graph.turn = self.pool.turns

    def _graph(
        self, call: Call, promised: list[bool], module: Fingerprint | None
    ) -> tuple[Graph | None, str | None]:
        """The graph for these arguments, captured if need be; or why there is none."""
        reason = None if module is None else module.refuse(call.itself)
        if reason is not None:
            return None, reason
        key = self._key(call, module)
        reason = self.pool.failed.get(key)
        if reason is not None:
            return None, reason
        place, graph = self.pool.choose(key, call.tensors[0].device, call.tensors)
        if graph is None:
            if self.pool.restless and not self.pool.settled:
                return None, "it was moved or changed before its last graph was used twice"
            if self.pool.wasted >= self.pool.limit:
                return None, "its arguments differ from call to call"
            graph, reason = self._capture(call, promised)
            if graph is None:
                assert reason is not None
                self.pool.failed[key] = reason
                return None, reason
            # warming up tests implementations, which can change routes: the key as it is now
            now = self._key(call, self.pool.checked(call.owner))
            self.pool.add(place if now == key else now, graph)
        return graph, None

    def _eagerly(self, reason: str, args: Any, kwargs: Any) -> Any:
        self.pool.reasons[reason] += 1
        self.reasons[reason] += 1
        self.routes[f"{self.part}/eager"] += 1
        return self.module(*args, **kwargs)

    def _refuse(self, call: Call) -> str | None:
        """Why these arguments are not captured; metadata only."""
        if call.tensors:
            device = call.tensors[0].device
            reason = self.pool.backend.absent(device)
            if reason:
                return reason
            if any(tensor.device != device for tensor in call.tensors):
                return "its arguments lie on several devices"
        return call.refuse()

    def _key(self, call: Call, module: Fingerprint | None) -> Hashable:
        signs = tuple(
            (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)
            for leaf in call.leaves
        )
        adapters = "" if module is None else module.adapters()
        how = contract.route_key(), machine.switches(), torch.is_grad_enabled(), defaults()
        return self.key() if callable(self.key) else self.key, str(call.tree), signs, adapters, how

    def _capture(self, call: Call, promised: list[bool]) -> tuple[Graph | None, str | None]:
        device = call.tensors[0].device
        inputs: list[Tensor] = []
        own = []
        with torch.inference_mode(False), torch.no_grad():  # buffers to write to in any mode
            for leaf in call.leaves:
                if isinstance(leaf, Tensor):
                    inputs.append(torch.empty_like(leaf, requires_grad=False))
                own.append(inputs[-1] if isinstance(leaf, Tensor) else leaf)
        # what is made from an input that is new at every call, as far as anybody can tell, stays in the graph
        lasting = []
        for mine, given, promise in zip(inputs, call.tensors, promised, strict=True):
            mine.copy_(given)
            lasting += [mine] if promise or not given.is_inference() else []
        frame, routes, calls = Frame(tuple(lasting)), dict[str, int](), ahead.Calls()
        limit = budget.current(device).limit_bytes

        turns, plainly = itertools.count(), False

        def run() -> Any:
            args, kwargs = pytree.tree_unflatten(own, call.tree)  # anew: a UNet takes residuals off its list
            return self.module(*args, **kwargs)

        def warm() -> Any:
            nonlocal plainly
            if next(turns) == 0:  # kernels are built at once, not one by one
                with within(Frame(tuple(lasting))) as first:
                    begin = partial(other_sizes.begin, inputs, calls)
                    ahead.build(lambda: (run(), first.gather()), calls=calls, known=begin)
                return None
            plainly = True
            output = run()
            plainly = False
            frame.gather()
            return output

        reason: str | None
        with budget.sampled(Device(device.type, device.index), limit) as sample, within(frame):
            try:
                self.pool.backend.enter(lambda: inputs)  # what is shared with other graphs is written to
                with contract.recording({}):
                    expected = self.pool.backend.warm_up(warm, WARM_UPS)
                plainly = False
                with contract.recording(routes):
                    replay, output = self.pool.backend.capture(run)
                reason = self._check(replay, output, expected, inputs)
            except Exception as error:  # a fault of the device meets the eager call too, which raises it
                if machine.is_out_of_memory(error):
                    reason = NO_MEMORY
                elif plainly and not (isinstance(error, RuntimeError) and "captur" in str(error).lower()):
                    raise  # the module's own, of a call that has nothing of a graph yet
                else:
                    reason = f"it cannot be captured: {one_line(error)}"
        if reason == NO_MEMORY:
            self.pool.evicted += len(self.pool.held)
            self.pool.held.clear()
            machine.release_memory(Device(device.type, device.index))
        if reason is not None:
            return None, reason
        unseen: list[Any] = [None] * len(inputs)
        return Graph(replay, output, inputs, frame, sample, routes, unseen, list(unseen)), None

    def _check(
        self, replay: Callable[[], None], output: Any, expected: Any, inputs: list[Tensor]
    ) -> str | None:
        """Why a new graph does not stand for the call: replays it once."""
        if not all(
            isinstance(leaf, Tensor | int | float | str | None) for leaf in pytree.tree_leaves(output)
        ):
            return f"its output is a {type(output).__name__}, which cannot be copied"
        self.pool.backend.enter(lambda: inputs)
        replay()
        if not agrees(output, expected):
            return "its graph gives other values than it does (randomness, or a kernel out of order)"
        return None
