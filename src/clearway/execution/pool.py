"""Captured graphs, each with what it reads and was captured under, in a pool of bounded number."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from clearway.execution.capture import Capture
from clearway.execution.fingerprint import Fingerprint
from clearway.execution.kept import Frame, version
from clearway.ops import budget

GRAPHS = 6
"""How many graphs a pool holds: two sizes of a picture with and without guidance, and two to spare."""

_Seen = tuple[weakref.ref[Tensor], int | None, int, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class Graph:
    """One captured graph with what it reads, what it wrote and what it was captured under."""

    replay: Callable[[], None]
    output: Any
    inputs: list[Tensor]
    frame: Frame
    sample: budget.Sample
    routes: dict[str, int]
    seen: list[_Seen | None]
    before: list[_Seen | None]
    uses: int = 0
    turn: int = 0

    def load(self, tensors: Sequence[Tensor], promised: Sequence[bool], settled: bool = False) -> None:
        """Copies the inputs in. One from which something was computed once (Frame) is left where it is the
        same object with the same content as last time, as far as PyTorch counts changes. `settled`: it was
        found `ready` for these."""
        changed, now, sources = [], list(self.seen), self._sources()
        for index, (mine, given) in enumerate(zip(self.inputs, tensors, strict=True)):
            if index in sources and _same(self.seen[index], given):
                continue
            self.before[index], self.seen[index] = self.seen[index], None  # until all is made of it
            mine.copy_(given)
            now[index] = _seen(given, promised[index])
            changed.append(mine)
        if not settled:
            self.frame.refresh(changed)
        self.seen = now

    def ready(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these inputs need to be copied alone: nothing that was computed once is to be made anew."""
        return self.keeps(tensors) and self.frame.holds()

    def keeps(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all that was computed from its inputs once holds for these."""
        return all(_same(self.seen[index], tensors[index]) for index in self._sources())

    def kept_before(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it held for these before what it holds for now: two take turns."""
        return all(
            _same(self.before[index], tensors[index]) or _same(self.seen[index], tensors[index])
            for index in self._sources()
        )

    def buffers(self) -> Iterator[Tensor]:
        """The tensors outside of the graphs' memory that it reads and writes."""
        yield from self.inputs
        for held in self.frame.held.values():
            yield from held.values

    def _sources(self) -> list[int]:
        """Which inputs something was computed from once."""
        sources = {source for _, source in self.frame.held}
        return [index for index, mine in enumerate(self.inputs) if id(mine) in sources]


def _seen(given: Tensor, promised: bool) -> _Seen | None:
    """What tells whether this tensor is given again unchanged; None where nothing does."""
    if given.is_inference() and not promised:
        return None
    return weakref.ref(given), version(given), given.data_ptr(), given.stride()


def _same(before: _Seen | None, given: Tensor) -> bool:
    return (
        before is not None
        and before[0]() is given
        and before[1] == version(given)
        and before[2] == given.data_ptr()
        and before[3] == given.stride()
    )


class Entry(Protocol):
    """What a call left for the next ones: under which memory decisions, and how often it was used."""

    sample: budget.Sample
    uses: int


T = TypeVar("T", bound=Entry)


@dataclass(slots=True, eq=False, kw_only=True)
class Bounded(Generic[T]):
    """What is kept for the calls of one module, the least recently used of which goes when there is too much.

    `failed` says by key why nothing is kept; `made` and `evicted` count; `wasted` is how many in a row went
    unused.
    """

    limit: int
    held: OrderedDict[Hashable, T] = field(default_factory=OrderedDict)
    failed: dict[Hashable, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    made: int = 0
    evicted: int = 0
    wasted: int = 0

    def clear(self) -> None:
        """Drops all that is kept, and what is known of arguments for which nothing is."""
        self.evicted += len(self.held)
        self.held.clear()
        self.failed.clear()
        self.wasted = 0

    def find(self, key: Hashable, device: torch.device) -> T | None:
        """What is kept under a key, if memory would still be decided on alike."""
        found = self.held.get(key)
        if found is None:
            return None
        if not found.sample.holds(budget.current(device).limit_bytes):
            del self.held[key]
            self.evicted += 1
            return None
        self.held.move_to_end(key)
        return found

    def add(self, key: Hashable, one: T) -> None:
        """Keeps one, at the cost of the least recently used where there are too many."""
        self.held[key] = one
        self.made += 1
        while len(self.held) > self.limit:
            _, gone = self.held.popitem(last=False)
            self.evicted += 1
            self.wasted = 0 if gone.uses > 1 else self.wasted + 1


@dataclass(slots=True, eq=False)
class Pool(Bounded[Graph]):
    """The graphs of one module."""

    backend: Capture
    limit: int = field(default=GRAPHS, kw_only=True)
    turns: int = 0
    restless: bool = False
    """Whether the module was last changed before any graph of it was replayed again: a VAE that is raised to
    float32 for each picture, or one that cannot be captured and counts its calls. Then it must be seen twice
    unchanged before it is captured once more."""
    settled: bool = False
    heard: bool = False
    """Whether somebody listened at the last call: then that is looked at before a replay, else after it."""
    _module: Fingerprint | None = None

    @property
    def lock(self) -> threading.RLock:
        """Held while a graph is filled, replayed and read: its buffers are one for all threads."""
        return self.backend.lock

    def checked(self, owner: nn.Module | None, lies: bool = False) -> Fingerprint | None:
        """The module's fingerprint; every graph goes where it is not what it was, since they would read
        memory that was given back. `lies`: `lying` said just now that tensors lie where they lay."""
        if owner is None or (self._module is not None and self._module.holds(lies)):
            self.settled = True
            return self._module
        self.settled = False
        if self.held or self.failed:
            self.restless = all(graph.uses <= 1 for graph in self.held.values())
        self.clear()
        self._module = Fingerprint(owner)
        return self._module

    def lying(self, owner: nn.Module | None) -> Fingerprint | None:
        """The module's fingerprint where graphs are held and all that they read of it lies where it lay; what
        else became of it `checked` tells."""
        module = self._module
        return module if owner is not None and self.held and module is not None and module.lies() else None

    def choose(
        self, key: Hashable, device: torch.device, tensors: Sequence[Tensor]
    ) -> tuple[Hashable, Graph | None]:
        """(key, graph) for these inputs: of two that take turns (the halves of guidance, called one by one)
        each has a graph, so that what is computed once from it stays. Without a graph the key to add one by.
        """
        graph, other = self.find(key, device), (key, "other")
        if graph is None or graph.keeps(tensors):
            return key, graph
        twin = self.find(other, device)
        if twin is None:
            return (other, None) if graph.kept_before(tensors) else (key, graph)
        if twin.keeps(tensors) or twin.turn < graph.turn:
            return other, twin
        return key, graph
