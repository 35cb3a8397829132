"""Recorded calls as an executor for the CPU: no modules, weights packed once, elementwise steps fused.

At first sight of arguments the module is called while its ATen operations are recorded (`recorded`). What
does nothing is left out (`rewrite`), what can be done in fewer passes is (`fusions`), layers get packed
weights (`packed`), and the rest is one generated function (`generated`), which is called from then on. No
compiler is needed. What depends on promised arguments alone (cross-attention's keys and values) is computed
once for each.

A function is used as long as the module, its code, its settings and its weights are what they were. It must
give, at first, what the module gave. What cannot be recorded runs eagerly, and the reason is kept.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clearway import device as machine
from clearway.device import Device
from clearway.errors import one_line
from clearway.execution import fusions, generated, packed, recorded, rewrite, unchanged
from clearway.execution.fingerprint import Fingerprint
from clearway.execution.kept import inside
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
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        owner = self.module if isinstance(self.module, nn.Module) else getattr(self.module, "__self__", None)
        owner = owner if isinstance(owner, nn.Module) else None
        reason = _refuse(tensors, leaves, owner)
        function, output = None, None
        if reason is None:
            with self.pool.lock:
                function, output, reason = self._function(leaves, tree, args, kwargs, owner)
        elif self.pool.held:
            with self.pool.lock:
                self.pool.checked(owner)  # one that was moved away gives its packed weights' memory back
        if reason is not None or function is None:
            self.pool.reasons[str(reason)] += 1
            self.reasons[str(reason)] += 1
            self.routes[f"{self.part}/eager"] += 1
            return self.module(*args, **kwargs) if output is None else output
        self.routes[f"{self.part}/flat"] += 1
        contract.count(function.routes)
        budget.current(tensors[0].device).follow(function.sample)
        if output is not None:
            return output
        return function(tensors)

    def sentences(self, name: str) -> list[str]:
        """Why some calls of what is called `name` were not run as recorded, or not all of it packed."""
        told = [
            f"{name} ran eagerly{'' if count == self.calls else ' at times'}: {reason}"
            for reason, count in self.reasons.items()
        ]
        short = self.pool.packs.short
        return told + ([f"{short} weights of {name} were not packed: memory is short"] if short else [])

    def _function(
        self, leaves: list[Any], tree: Any, args: Any, kwargs: Any, owner: nn.Module | None
    ) -> tuple[Recorded | None, Any, str | None]:
        """(function, the output if it was just made, why there is no function)."""
        module = self.pool.checked(owner)
        if module is not None and module.moved:
            return None, None, "hooks are at work in it that may move its weights (offloading, caching)"
        if module is not None and module.hooked(isinstance(self.module, nn.Module)):
            return None, None, "forward hooks are at work in it"
        if module is not None and module.foreign:
            return (
                None,
                None,
                f"{module.foreign} is somebody's own code, which would not run at each call",
            )
        reason = self.pool.refused
        promised = _promises(args, kwargs, self.promised)
        key = self._key(leaves, tree, module, promised)
        reason = reason or self.pool.failed.get(key)
        if reason is not None:
            return None, None, reason
        found = self.pool.find(key)
        if found is not None:
            found.calls += 1
            return found, None, None
        if self.pool.wasted >= self.pool.limit:
            return None, None, "its arguments differ from call to call"
        made, output, reason = self._record(leaves, tree, promised)
        if made is None:
            self.pool.failed[key] = reason or ""
            return None, output, reason
        # an implementation may be tested on the way, which can change routes: the key as it is now
        self.pool.add(self._key(leaves, tree, self.pool.checked(owner), promised), made)
        return made, output, None

    def _key(
        self, leaves: list[Any], tree: Any, module: Fingerprint | None, promised: list[bool]
    ) -> Hashable:
        signs = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves
        )
        how = contract.route_key(), machine.switches(), torch.get_num_threads(), torch.get_default_dtype()
        given = tuple(promised), self._same(leaves)
        allowed = torch._C._get_mkldnn_enabled()
        adapters = "" if module is None else module.adapters()
        return self.key() if callable(self.key) else self.key, str(tree), signs, given, adapters, how, allowed

    def _same(self, leaves: list[Any]) -> tuple[int, ...]:
        """Which tensors among the arguments are one object, or a weight: recorded, they are one value."""
        weights, first = self.pool.numbers, dict[int, int]()
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        return tuple(
            weights.get(id(tensor)) or first.setdefault(id(tensor), number)
            for number, tensor in enumerate(tensors)
        )

    def _record(
        self, leaves: list[Any], tree: Any, promised: list[bool]
    ) -> tuple[Recorded | None, Any, str | None]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = tensors[0].device
        routes: dict[str, int] = {}
        limit = budget.current(device).limit_bytes

        def call() -> Any:
            args, kwargs = pytree.tree_unflatten(leaves, tree)
            return self.module(*args, **kwargs)

        with budget.sampled(Device(device.type, device.index), limit) as sample:
            try:
                with contract.recording(routes), contract.use(**AS_STEPS):
                    program, output = recorded.record(call, tensors, self.pool.weights)
            except recorded.UnrecordableError as error:
                return None, None, f"it cannot be recorded: {error}"
        output = _outside(output)
        numbers = [number for number, promise in enumerate(promised) if promise]
        try:
            function = _made(program, numbers, self.pool.packs)
            made = Recorded(function, sample, routes)
            found = made(tensors)
        except recorded.UnrecordableError as error:
            return None, output, f"it cannot be recorded: {error}"
        except (RuntimeError, MemoryError) as error:
            if machine.is_out_of_memory(error):
                self.pool.clear()
                return None, output, "there was no memory for its packed weights"
            return None, output, f"its recorded call does not run: {one_line(error)[:200]}"
        if not _agree(found, output):
            return None, output, "its recorded call gives other values than it does"
        return made, found, None  # the first picture is the same to the bit as all later ones


@dataclass(eq=False)
class Recorded:
    """A generated function, what was decided when it was recorded, and what it keeps of promised inputs."""

    function: generated.Function
    sample: budget.Sample
    routes: dict[str, int]
    calls: int = 0
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
class Functions:
    """The functions of one module, the least recently used of which goes when there are too many."""

    limit: int = FUNCTIONS
    held: OrderedDict[Hashable, Recorded] = field(default_factory=OrderedDict)
    failed: dict[Hashable, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    packs: packed.Packs = field(default_factory=packed.Packs)
    recorded: int = 0
    evicted: int = 0
    wasted: int = 0
    weights: list[Tensor] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    """By id, -1 for the first weight, -2 for the second, ..."""
    refused: str | None = None
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

    def clear(self) -> None:
        """Drops every function and packed weight, and what is known of arguments that cannot be recorded."""
        self.evicted += len(self.held)
        self.held.clear()
        self.failed.clear()
        self.packs = packed.Packs()
        self.wasted = 0

    def find(self, key: Hashable) -> Recorded | None:
        """The function of a key, if it would still be recorded alike."""
        found = self.held.get(key)
        if found is None:
            return None
        if not found.sample.holds(budget.current(torch.device("cpu")).limit_bytes):
            del self.held[key]
            self.evicted += 1
            return None
        self.held.move_to_end(key)
        return found

    def add(self, key: Hashable, function: Recorded) -> None:
        """Keeps a function, at the cost of the least recently used one where there are too many."""
        self.held[key] = function
        self.recorded += 1
        while len(self.held) > self.limit:
            _, gone = self.held.popitem(last=False)
            self.evicted += 1
            self.wasted = 0 if gone.calls > 1 else self.wasted + 1


def _made(program: recorded.Program, numbers: list[int], packs: packed.Packs) -> generated.Function:
    program = rewrite.simplified(program)
    program = fusions.fused(program, generated.lasting_values(program, numbers))
    return generated.generated(packed.lowered(program, packs), numbers)


def _refuse(tensors: list[Tensor], leaves: list[Any], owner: nn.Module | None) -> str | None:
    """Why a call with these arguments is not recorded; metadata only."""
    if owner is None:
        return "it is no module's, so nothing tells whether it stays the same"
    if not tensors:
        return "there is no tensor among its arguments"
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return f"recorded calls are for the CPU, this is {tensors[0].device}"
    if any(
        type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided for tensor in tensors
    ):
        return "an argument is a tensor of another class or layout"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *owner.parameters())):
        return "a gradient is needed"
    if torch.is_autocast_enabled("cpu"):
        return "torch.autocast is at work"
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            try:
                hash(leaf)
            except TypeError:
                return f"an argument is a {type(leaf).__name__}, which is no key"
    return None


def _refuse_weights(weights: list[Tensor]) -> str | None:
    if any(weight.device.type != "cpu" for weight in weights):
        return "not all of its weights are on the CPU"
    if any(type(weight) not in (Tensor, nn.Parameter) for weight in weights):
        return "a weight is quantised or of a class of its own"
    return None


def _promises(args: Any, kwargs: Any, names: tuple[str, ...]) -> list[bool]:
    """For each tensor among the arguments, in order, whether it is promised not to change in place."""
    given = [(False, argument) for argument in args]
    given += [(name in names, value) for name, value in kwargs.items()]
    return [
        promise for promise, value in given for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)
    ]


def _outside(output: Any) -> Any:
    """The recorded call's output as the caller's mode would have made it."""
    if torch.is_inference_mode_enabled():
        return output
    return pytree.tree_map_only(Tensor, torch.clone, output)


def _agree(found: Any, expected: Any) -> bool:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return all(_alike(one, other) for one, other in pairs if isinstance(other, Tensor))


def _alike(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    wide = torch.promote_types(expected.dtype, torch.float32)
    finite = expected.isfinite()
    right = expected.to(wide).where(finite, 0)
    apart = (found.to(wide).where(finite, 0) - right).norm()
    return bool(
        (found.isfinite() == finite).all() & (apart <= APART.get(expected.dtype, 1e-6) * right.norm())
    )
