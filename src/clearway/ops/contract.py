"""One contract for every operation that has more than one implementation.

The decorated reference is plain PyTorch: its signature is the schema, itself the fake for `torch.library`,
the yardstick of the self-test and the last resort. Implementations register beside it with two separate
questions, each answered by None or a sentence: `absent()` (can this machine ever?) and `refuse(*args)` (not
these arguments). Which of several able ones is taken is policy and lies in neither: what the user named, else
the tuned table, else the op's own default table for the device, else the order they are declared in. What the
user did not name is passed over where it would need more memory than the budget (budget.py) or has not passed
its self-test here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearway import device as machine
from clearway.errors import RequestError, UnavailableError, nearest
from clearway.ops import ahead, state
from clearway.ops._implementation import (
    Case,
    Decision,
    Given,
    Implementation,
    Promise,
    able,
    always,
    laid_out,
    needs_gradient,
    over_budget,
    refused,
    tensors,
)

__all__ = [
    "OPS",
    "REFERENCE",
    "Case",
    "Decision",
    "Given",
    "Implementation",
    "Op",
    "Promise",
    "bucket",
    "count",
    "op",
    "recording",
    "route_key",
    "use",
]

OPS: dict[str, Op] = {}
REFERENCE = "reference"
UNTESTED = "not tested on this machine yet: its self-test runs before it is first used"
_choice: ContextVar[Mapping[str, str]] = ContextVar("clearway_choice", default={})  # noqa: B039 - never changed
_routes: ContextVar[dict[str, int] | None] = ContextVar("clearway_routes", default=None)


class Op:
    """An operation with its implementations; calling it routes, counts and runs."""

    def __init__(
        self,
        reference: Callable[..., Any],
        cases: Callable[[], Iterable[tuple[str, Given]]],
        refusals: Callable[[], Iterable[tuple[str, str, Case]]],
        promise: Promise,
        bytes_moved: Callable[..., int] | None,
        flops: Callable[..., int] | None,
        compile: str,
        size_class: Callable[..., str] | None = None,
        then: Callable[[Any], Tensor] | None = None,
        exact: Callable[..., Any] | None = None,
    ) -> None:
        if compile not in ("opaque", "inline"):
            raise RuntimeError(f"{reference.__name__}: compile is 'opaque' or 'inline', not {compile!r}")
        self.name = reference.__name__
        self.source = Path(inspect.getfile(reference))
        self.module = reference.__module__
        self.cases, self.refusals, self.promise = cases, refusals, promise
        self.bytes_moved, self.flops, self.compile = bytes_moved, flops, compile
        self.size_class, self.then = size_class or _size_class, then
        self.exact = exact or reference
        self.signature = inspect.signature(reference)
        self._names = tuple(self.signature.parameters)
        self._defaults = tuple(parameter.default for parameter in self.signature.parameters.values())
        self.reference = Implementation(
            self.name, REFERENCE, "any", reference, stock=True, differentiable=True, sources=(self.source,)
        )
        self.implementations: list[Implementation] = []
        self.defaults: dict[str, Callable[..., str | None]] = {}
        self._ready: dict[str, tuple[int, tuple[Implementation, ...]]] = {}
        self._sound: set[tuple[Implementation, str, torch.dtype]] = set()
        self._opaque = self._registered(reference)

    @cached_property
    def doc(self) -> str:
        """What the op gives: its reference's docstring."""
        return inspect.getdoc(self.reference.run) or ""

    @cached_property
    def module_doc(self) -> str:
        """The formula, where it is used and the source: the docstring of the op's file."""
        return inspect.getdoc(inspect.getmodule(self.reference.run)) or ""

    def implementation(
        self,
        name: str,
        *,
        device: str,
        absent: Callable[[], str | None] = able,
        refuse: Callable[..., str | None] = able,
        stock: bool = False,
        differentiable: bool = False,
        peak: Callable[..., float] | None = None,
        materialises: Callable[..., bool] = always,
        sources: Iterable[str] = (),
        made_by: Callable[[], str] = str,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers the decorated function, in order of preference on `device` ("cuda", "mps", …, "any").

        `refuse` reads metadata only. What holds for every kernel of our own is refused before it is asked: a
        gradient (unless `differentiable`), tensor subclasses, empty tensors, tensors on several devices.
        `sources` are further files beside the op's own that its source hash covers, and `made_by()` what
        builds it here, where that is not part of Clearway or PyTorch. RuntimeError for a name
        taken twice or another signature than the reference's.
        """

        def register(run: Callable[..., Any]) -> Callable[..., Any]:
            same = [i.device for i in self.implementations if i.name == name]
            overlap = device in same or (same and "any" in (device, *same))
            if overlap or name == REFERENCE:
                raise RuntimeError(f"{self.name}: implementation {name!r} for {device} is registered twice")
            if tuple(inspect.signature(run).parameters) != self._names:
                raise RuntimeError(f"{self.name}: {name!r} does not take the reference's arguments")
            files = (self.source, *(self.source.parent / source for source in sources))
            made = Implementation(
                op=self.name,
                name=name,
                device=device,
                run=run,
                absent=absent,
                refuse=refuse,
                stock=stock,
                differentiable=differentiable or stock,
                peak=peak,
                materialises=materialises,
                sources=files,
                made_by=made_by,
            )
            self.implementations.append(made)
            self._ready.clear()
            return run

        return register

    def default(self, device: str) -> Callable[[Callable[..., str | None]], Callable[..., str | None]]:
        """Registers the default table of `device`: (*args) -> the implementation to prefer, or None."""

        def register(table: Callable[..., str | None]) -> Callable[..., str | None]:
            self.defaults[device] = table
            return table

        return register

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self._names):
            args = self._bound(args, kwargs)
        if torch.compiler.is_compiling():
            if self.compile == "inline" or needs_gradient(args):  # an opaque node has no backward
                return self.reference.run(*args)
            return self._opaque(*args)
        return self._run(args)

    def _bound(self, args: Case, kwargs: Mapping[str, Any]) -> Case:
        """All arguments in order, defaults filled in; TypeError as Python itself would."""
        if len(args) > len(self._names):
            raise TypeError(f"{self.name} takes {len(self._names)} arguments, {len(args)} were given")
        given = dict(zip(self._names, args, strict=False))
        for name, value in kwargs.items():
            if name in given or name not in self._names:
                raise TypeError(f"{self.name} got an unexpected or repeated argument {name!r}")
            given[name] = value
        for name, default in zip(self._names, self._defaults, strict=True):
            if name not in given:
                if default is inspect.Parameter.empty:
                    raise TypeError(f"{self.name} misses its argument {name!r}")
                given[name] = default
        return tuple(given[name] for name in self._names)

    def _run(self, args: Case) -> Any:
        chosen = self._route(args)
        try:
            out = chosen.run(*args)
        except state.BuildError as error:  # its kernel could not be built here: never at a second call
            if _choice.get().get(self.name) == chosen.name:
                raise UnavailableError(f"{self.name}={chosen.name} was asked for and {error}") from error
            state.disable(self.name, chosen.name, str(error), None if chosen.stock else args[0].dtype)
            return self._run(args)
        counts = _routes.get()
        if counts is not None:
            key = f"{self.name}/{chosen.name}"
            counts[key] = counts.get(key, 0) + 1
        return out

    def route(self, *args: Any) -> Implementation:
        """The implementation that these arguments take; reads their metadata only.

        The first use of one that is not stock tests it, in another process. UnavailableError where a named
        one cannot run, with its reason and those that can.
        """
        return self._route(args if len(args) == len(self._names) else self._bound(args, {}))

    def _route(self, args: Case) -> Implementation:
        gathering = ahead.gathering()
        if gathering is not None:
            gathering.note(self.name, args)
        first = args[0]
        kind = "cuda" if first.is_cuda else "cpu" if first.is_cpu else first.device.type
        prepared = self._ready.get(kind)
        if prepared is None or prepared[0] != state.version():
            prepared = self._prepare(kind)
        ready = prepared[1]
        named = _choice.get()
        if named and self.name in named:
            name = named[self.name]
            for implementation in ready:
                if (
                    implementation.name == name
                    and implementation.stock
                    and implementation.refuse(*args) is None
                ):
                    return implementation
            return self._named_route(name, kind, args)
        preferred = self._preferred(kind, args)
        if preferred is not None:
            for implementation in ready:
                if implementation.name == preferred:
                    if self._takes(implementation, kind, args):
                        return implementation
                    break
            else:
                if preferred == REFERENCE:
                    return self.reference
        for implementation in ready:
            if self._takes(implementation, kind, args):
                return implementation
        return self.reference

    def _preferred(self, kind: str, args: Case) -> str | None:
        """What the tuned table says of these arguments, else the op's default table for the device. Of empty
        ones no table is asked: its sizes and estimates may divide by their elements."""
        tuned, default = state.tuned(self.name, kind), self.defaults.get(kind)
        if not tuned and default is None:
            return None
        if not all(tensor.numel() for tensor in tensors(args)):
            return REFERENCE
        if tuned:
            found = tuned.get(f"{args[0].dtype}|{self.size_class(*args)}")
            if found is not None:
                return found
        return default(*args) if default else None

    def _takes(self, implementation: Implementation, kind: str, args: Case) -> bool:
        """Whether one that is ready takes these arguments, nobody having named it; tests it if need be."""
        stock = implementation.stock
        if (implementation.refuse(*args) if stock else refused(implementation, args)) is not None:
            return False
        if implementation.peak is not None and over_budget(implementation, args, args[0].device) is not None:
            return False
        if stock:
            return True
        key = (implementation, kind, args[0].dtype)
        if key in self._sound:
            return True
        if state.disabled(self.name, implementation.name, args[0].dtype) is not None:
            return False
        if state.verdict(implementation, kind, args) is not None:
            return False
        if not state.trusted():
            self._sound.add(key)
        return True

    def explain(self, *args: Any, kind: str | None = None) -> list[Decision]:
        """Every implementation with why it was taken or not, the reference last; runs nothing, tests nothing.

        With `kind` the arguments are taken to lie on such a device; they may be on "meta", without values.
        """
        args = self._bound(args, {})
        here = args[0].device if kind is None else torch.device(kind)
        kind = here.type
        memory = here if machine.absent(kind) is None else torch.device("cpu")
        name = _choice.get().get(self.name)
        preferred = name or self._preferred(kind, args)
        reasons: dict[Implementation, str | None] = {}
        names = {i.name for i in self.implementations if i.device in (kind, "any")}
        for implementation in (*self.implementations, self.reference):
            if implementation.device not in (kind, "any") and implementation.name in names:
                continue  # the same one is registered for this device too
            reason = self._impossible(implementation, kind, args[0].dtype) or refused(implementation, args)
            if reason is None and name and implementation.name != name:
                reason = f"{name} was asked for"
            reasons[implementation] = reason or (None if name else over_budget(implementation, args, memory))
        able_ones = [implementation for implementation, reason in reasons.items() if reason is None]
        first = able_ones[0] if able_ones else None
        chosen = next((i for i in able_ones if i.name == preferred), first)
        decisions = []
        for implementation, reason in reasons.items():
            taken = implementation is chosen
            if taken:
                untested = not implementation.stock and not state.known(implementation, kind, args[0].dtype)
                reason = UNTESTED if untested else ""
            elif reason is None and chosen is not None:
                reason = f"{chosen.name} comes before it"
            decisions.append(Decision(implementation.name, taken, reason or ""))
        return decisions

    def _impossible(
        self, implementation: Implementation, kind: str, dtype: torch.dtype | None = None
    ) -> str | None:
        """Why this implementation cannot be taken on `kind` in `dtype` (None: in any) by what is known so
        far; no test is run."""
        if implementation.device not in (kind, "any"):
            return f"it is for {implementation.device}, these are on {kind}"
        reason = implementation.absent() or state.disabled(self.name, implementation.name, dtype)
        if reason:
            return reason
        return state.ruled_out(implementation, kind, dtype)

    def _prepare(self, kind: str) -> tuple[int, tuple[Implementation, ...]]:
        """Those that may be taken on `kind` by what is known without testing, and for which version."""
        self._sound.clear()
        version = state.version()
        ready = tuple(i for i in self.implementations if self._impossible(i, kind) is None)
        self._ready[kind] = version, ready
        return version, ready

    def _named_route(self, name: str, kind: str, args: Case) -> Implementation:
        reasons = []
        for implementation in (*self.implementations, self.reference):
            if implementation.name != name:
                continue
            reason = self._impossible(implementation, kind, args[0].dtype) or refused(implementation, args)
            if reason is None and not implementation.stock:
                reason = state.verdict(implementation, kind, args)
            if reason is None:
                return implementation
            if implementation.device in (kind, "any"):
                reasons = [reason]
                break
            reasons.append(reason)
        others = [
            i.name
            for i in (*self._prepare(kind)[1], self.reference)
            if i.name != name and refused(i, args) is None
        ]
        raise UnavailableError(
            f"{self.name}={name} was asked for and cannot run: {'; '.join(reasons)} "
            f"(others that can: {', '.join(dict.fromkeys(others))})"
        )

    def _registered(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        """The op as one opaque node for torch.compile; the reference gives shapes and layout."""

        def opaque(*given: Any) -> Any:
            args = self._bound(given, {})  # torch.library leaves defaults out
            return laid_out(self._run(args), reference, args)

        schema = torch.library.infer_schema(reference, mutates_args=())
        made = torch.library.custom_op(f"clearway::{self.name}", opaque, mutates_args=(), schema=schema)
        made.register_fake(reference)
        return made


def op(
    *,
    cases: Callable[[], Iterable[tuple[str, Given]]],
    refusals: Callable[[], Iterable[tuple[str, str, Case]]] = tuple,
    promise: Promise = Promise(),  # noqa: B008 - frozen
    bytes_moved: Callable[..., int] | None = None,
    flops: Callable[..., int] | None = None,
    compile: str = "opaque",
    size_class: Callable[..., str] | None = None,
    then: Callable[[Any], Tensor] | None = None,
    exact: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Op]:
    """Makes the decorated reference an Op; its first argument is a tensor, its output one or a tuple of them.

    `cases()` gives (name, arguments), float32 on the CPU, seeded, a function that makes them where they are
    large (those run only in `ops check` and in benchmarks); `refusals()` gives (implementation, words of the
    expected reason, arguments). `bytes_moved`, `flops` and `size_class` (the key of the tuned table beside
    the dtype; by default the elements of the first argument) take the op's arguments. `compile` "inline"
    gives torch.compile the reference, where fusion with its neighbours wins, "opaque" one node. `then` is
    what usually reads the output; the self-test runs it at once after the op (by default a projection of the
    last axis). `exact` gives the reference's values where a large case in float64 would not fit.
    """

    def make(reference: Callable[..., Any]) -> Op:
        made = Op(reference, cases, refusals, promise, bytes_moved, flops, compile, size_class, then, exact)
        OPS[made.name] = made
        return made

    return make


def bucket(tensor: Tensor) -> int:
    """The size class of a tensor in the tuned table: log2 of its elements, rounded."""
    return round(math.log2(max(tensor.numel(), 1)))


def _size_class(*args: Any) -> str:
    return str(bucket(args[0]))


@contextmanager
def use(**names: str) -> Iterator[None]:
    """Within it the ops named take the implementations named, or raise: use(attention="math").

    RequestError for an op or an implementation that does not exist.
    """
    if not OPS.keys() >= names.keys():
        import clearway.ops

        clearway.ops.discover()
    for name, wanted in names.items():
        if name not in OPS:
            raise RequestError(f"op {name!r} is not known; nearest: {nearest(name, OPS)}")
        known = dict.fromkeys(i.name for i in (*OPS[name].implementations, OPS[name].reference))
        if wanted not in known:
            raise RequestError(f"{name}={wanted!r} is not known; nearest: {nearest(wanted, known)}")
    token = _choice.set({**_choice.get(), **names})
    try:
        yield
    finally:
        _choice.reset(token)


def chosen_by_name() -> dict[str, str]:
    """The implementations that `use` names here, by op."""
    return dict(_choice.get())


def route_key() -> tuple[int, tuple[tuple[str, str], ...]]:
    """What routes depend on beside the arguments and the memory budget: captured graphs are keyed on it, and
    hold while the budget's limit lies within the bounds recorded at capture (`budget.Sample.holds`)."""
    return state.version(), tuple(sorted(_choice.get().items()))


@contextmanager
def recording(routes: dict[str, int]) -> Iterator[None]:
    """Within it every call of an op that ran is counted in `routes` as "<op>/<implementation>"."""
    token = _routes.set(routes)
    try:
        yield
    finally:
        _routes.reset(token)


def count(routes: Mapping[str, int], times: int = 1) -> None:
    """Adds what ran elsewhere to the current recording: a captured graph's own counts, times its replays."""
    counts = _routes.get()
    if counts is not None:
        for key, number in routes.items():
            counts[key] = counts.get(key, 0) + number * times
