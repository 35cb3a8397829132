"""Recorded calls as an executor for the CPU: no modules, weights packed once, elementwise steps fused.

At first sight of arguments the module is called while its ATen operations are recorded (`recorded`). What
does nothing is left out (`rewrite`), attention is what the op routes to (`routed`), what can be done in fewer
passes is (`fusions`), layers get packed weights (`packed`), and the rest is one generated function
(`generated`), which is called from then on. No compiler is needed. What depends on promised arguments alone
(cross-attention's keys and values) is computed once for each.

A function is used as long as the module, its code, its settings and its weights are what they were. It must
give, at first, what the module gave. What cannot be recorded runs eagerly, and the reason is kept.
"""

from __future__ import annotations

import gc
import threading
import weakref
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
from clearway.execution import fusions, generated, packed, recorded, rewrite, routed, unchanged
from clearway.execution.calls import Call, defaults, told
from clearway.execution.capture import agrees
from clearway.execution.fingerprint import Fingerprint
from clearway.execution.kept import inside
from clearway.execution.pool import Bounded
from clearway.ops import budget, contract

FUNCTIONS = 6
"""How many functions a module has at most."""
KEPT = 4
"""For how many promised arguments a function keeps what depends on them alone."""
APART = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""How far, relative, a function's output may lie from the module's: far above rounding, far below a bug."""
AS_STEPS = {"upsample_conv": "reference"}
"""Ops that are recorded as what they stand for: their faster form writes into parts of a tensor, which no
list of values has, and `fusions` makes another of it."""


@dataclass(slots=True, eq=False)
class Flat:
    """Calls `module` as a recorded function; else as it is.

    Calls are counted as "<part>/flat" or "<part>/eager", with the reason in `reasons`; the ops that were
    recorded are counted at each call. `promised` names keyword arguments that the caller never changes in
    place; `key` is the caller's own part of a function's key, or a function that gives it.
    """

    module: Callable[..., Any]
    part: str
    routes: Counter[str]
    pool: Functions
    key: Hashable = ()
    promised: tuple[str, ...] = ()
    reasons: Counter[str] = field(default_factory=Counter)
    calls: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if inside():  # part of what somebody else records
            return self.module(*args, **kwargs)
        self.calls += 1
        call = Call.of(self.module, args, kwargs)
        reason = _refuse(call)
        function, output = None, None
        if reason is None:
            with self.pool.lock:
                function, output, reason = self._function(call)
        elif self.pool.held:
            with self.pool.lock:
                self.pool.checked(call.owner)  # one that was moved away gives its packed weights' memory back
        if reason is not None or function is None:
            self.pool.reasons[str(reason)] += 1
            self.reasons[str(reason)] += 1
            self.routes[f"{self.part}/eager"] += 1
            return self.module(*args, **kwargs) if output is None else output
        self.routes[f"{self.part}/flat"] += 1
        contract.count(function.routes)
        budget.current(call.tensors[0].device).follow(function.sample)
        if output is not None:
            return output
        return function(call.tensors)

    def sentences(self, name: str) -> list[str]:
        """Why some calls of what is called `name` were not run as recorded, or not all of it packed."""
        short = self.pool.packs.short
        why = told(name, self.reasons, self.calls)
        return why + ([f"{short} weights of {name} were not packed: memory is short"] if short else [])

    def _function(self, call: Call) -> tuple[Recorded | None, Any, str | None]:
        """(function, the output if it was just made, why there is no function)."""
        module = self.pool.checked(call.owner)
        reason = None if module is None else module.refuse(call.itself)
        if reason is not None:
            return None, None, reason
        reason = self.pool.refused
        promised = call.promises(self.promised)
        key = self._key(call, module, promised)
        reason = reason or self.pool.failed.get(key)
        if reason is not None:
            return None, None, reason
        found = self.pool.find(key, call.tensors[0].device)
        if found is not None:
            found.uses += 1
            return found, None, None
        if self.pool.wasted >= self.pool.limit:
            return None, None, "its arguments differ from call to call"
        made, output, reason = self._record(call, promised, key)
        if made is None:
            self.pool.failed[key] = reason or ""
            return None, output, reason
        # an implementation may be tested on the way, which can change routes: the key as it is now
        self.pool.add(self._key(call, self.pool.checked(call.owner), promised), made)
        return made, output, None

    def _key(self, call: Call, module: Fingerprint | None, promised: list[bool]) -> Hashable:
        signs = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
            for leaf in call.leaves
        )
        how = contract.route_key(), machine.switches(), torch.get_num_threads(), defaults()
        given = tuple(promised), self._same(call.tensors)
        allowed = torch._C._get_mkldnn_enabled()
        adapters = "" if module is None else module.adapters()
        return (
            self.key() if callable(self.key) else self.key,
            str(call.tree),
            signs,
            given,
            adapters,
            how,
            allowed,
        )

    def _same(self, tensors: list[Tensor]) -> tuple[int, ...]:
        """Which tensors among the arguments are one object, or a weight: recorded, they are one value."""
        weights, first = self.pool.numbers, dict[int, int]()
        return tuple(
            weights.get(id(tensor)) or first.setdefault(id(tensor), number)
            for number, tensor in enumerate(tensors)
        )

    def _record(
        self, call: Call, promised: list[bool], key: Hashable
    ) -> tuple[Recorded | None, Any, str | None]:
        device = call.tensors[0].device
        routes: dict[str, int] = {}
        limit = budget.current(device).limit_bytes

        def run() -> Any:
            args, kwargs = pytree.tree_unflatten(call.leaves, call.tree)
            return self.module(*args, **kwargs)

        with budget.sampled(Device(device.type, device.index), limit) as sample:
            try:
                with contract.recording(routes), contract.use(**AS_STEPS):
                    program, output = recorded.record(run, call.tensors, self.pool.weights)
            except recorded.UnrecordableError as error:
                return None, None, f"it cannot be recorded: {error}"
        output = _outside(output)
        numbers = [number for number, promise in enumerate(promised) if promise]
        try:
            function, taken = self.pool.fitted(key, program, numbers, routes)
            made = Recorded(function, sample, taken)
            found = made(call.tensors)
        except recorded.UnrecordableError as error:
            return None, output, f"it cannot be recorded: {error}"
        except (RuntimeError, MemoryError) as error:
            if machine.is_out_of_memory(error):
                self.pool.clear()
                return None, output, "there was no memory for its packed weights"
            return None, output, f"its recorded call does not run: {one_line(error)[:200]}"
        if not agrees(found, output, _near):
            return None, output, "its recorded call gives other values than it does"
        return made, found, None  # the first picture is the same to the bit as all later ones


@dataclass(eq=False)
class Recorded:
    """A generated function, what was decided when it was recorded, and what it keeps of promised inputs."""

    function: generated.Function
    sample: budget.Sample
    routes: dict[str, int]
    uses: int = 0
    kept: list[tuple[Any, tuple[Any, ...], tuple[weakref.ref[Tensor], ...]]] = field(default_factory=list)

    def __call__(self, tensors: list[Tensor]) -> Any:
        return self.function.run(*tensors, *self._once(tensors))

    def _once(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        """What depends on the promised inputs alone."""
        numbers = self.function.lasting
        if not numbers:
            return ()
        given = [tensors[number] for number in numbers]
        sign = tuple((id(t), t.data_ptr(), None if t.is_inference() else t._version) for t in given)
        for seen, values, sources in self.kept:
            if seen == sign and all(source() is t for source, t in zip(sources, given, strict=True)):
                return values
        values = self.function.once(*given)
        fresh = (sign, values, tuple(map(weakref.ref, given)))
        alive = [one for one in self.kept if all(source() is not None for source in one[2])]
        self.kept = [*alive, fresh][-KEPT:]
        return values


@dataclass(slots=True, eq=False)
class Functions(Bounded[Recorded]):
    """The functions of one module."""

    limit: int = field(default=FUNCTIONS, kw_only=True)
    packs: packed.Packs = field(default_factory=packed.Packs)
    weights: list[Tensor] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    """By id, -1 for the first weight, -2 for the second, ..."""
    refused: str | None = None
    gave: set[Hashable] = field(default_factory=set)
    """The keys of functions that were dropped for others, where memory was short."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _module: Fingerprint | None = None
    _unchanged: unchanged.Unchanged | None = None
    _adapters: str = ""

    def checked(self, owner: nn.Module | None) -> Fingerprint | None:
        """The module's fingerprint; every function and packed weight goes where module or weights are not
        what they were, or an adapter was merged or taken out."""
        if owner is None:
            return None
        if (
            self._module is not None
            and self._module.holds()
            and (self._unchanged is None or self._unchanged.holds())
            and self._module.adapters() == self._adapters
        ):
            return self._module
        self.clear()
        self._module = Fingerprint(owner)
        self._adapters = self._module.adapters()
        self.weights = [*owner.parameters(), *owner.buffers()]
        self.numbers = {id(weight): -number for number, weight in enumerate(self.weights, 1)}
        self.refused = unchanged.refuse(self.weights) or _refuse_weights(self.weights)
        self._unchanged = unchanged.Unchanged(self.weights) if self.refused is None else None
        return self._module

    def fitted(
        self, key: Hashable, program: recorded.Program, numbers: list[int], routes: dict[str, int]
    ) -> tuple[generated.Function, dict[str, int]]:
        """The program as a function under `key`, and `routes` with what it decides. Where memory is short for
        its packed weights, what is no longer used goes, then functions of other sizes."""
        tidied = False
        while True:
            taken = dict(routes)
            made = _made(program, numbers, self.packs, taken)
            if not self.packs.short or (tidied and not self._give_way(key)):
                return made, taken
            gc.collect()  # a function and what it reads may hold each other
            tidied = True

    def _give_way(self, key: Hashable) -> bool:
        """Drops the function used least recently for the one under `key`; whether it did. Where nothing is
        packed that would free nothing, and who gave way is not made room for: two sizes in turns would each
        be packed anew at every turn."""
        if not self.held or not self.packs.held or key in self.gave:
            return False
        gone, _ = self.held.popitem(last=False)
        self.gave.add(gone)
        self.evicted += 1
        return True

    def clear(self) -> None:
        """Drops every function and packed weight, and what is known of arguments that cannot be recorded."""
        Bounded.clear(self)  # without super(): slots make the class anew
        self.gave.clear()
        self.packs = packed.Packs()


def _made(
    program: recorded.Program, numbers: list[int], packs: packed.Packs, routes: dict[str, int]
) -> generated.Function:
    program = routed.routed(rewrite.simplified(program), routes)
    program = fusions.fused(program, generated.lasting_values(program, numbers))
    return generated.generated(packed.lowered(program, packs), numbers)


def _refuse(call: Call) -> str | None:
    """Why a call with these arguments is not recorded; metadata only."""
    if call.owner is None:
        return "it is no module's, so nothing tells whether it stays the same"
    if any(tensor.device.type != "cpu" for tensor in call.tensors):
        return f"recorded calls are for the CPU, this is {call.tensors[0].device}"
    if any(type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided for t in call.tensors):
        return "an argument is a tensor of another class or layout"
    return call.refuse()


def _refuse_weights(weights: list[Tensor]) -> str | None:
    if any(weight.device.type != "cpu" for weight in weights):
        return "not all of its weights are on the CPU"
    if any(type(weight) not in (Tensor, nn.Parameter) for weight in weights):
        return "a weight is quantised or of a class of its own"
    return None


def _outside(output: Any) -> Any:
    """The recorded call's output as the caller's mode would have made it."""
    if torch.is_inference_mode_enabled():
        return output
    return pytree.tree_map_only(Tensor, torch.clone, output)


def _near(apart: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    near: Tensor = apart.norm() <= APART.get(dtype, 1e-6) * right.norm()
    return near
