"""What is computed once from a tensor that stays the same for many calls: cross-attention's keys and values.

A value is kept while its source is the same object at the same version, and the weights it was made with are
the same objects, at the same versions and addresses. So a change in place makes it anew, and it goes when its
source does. Tensors made under inference_mode have no version: what reads them is kept only for a caller that
promises not to change them in place. A weight changed through `.data` raises no version either; whoever does
that between two calls with one source calls `forget`.
Within a captured graph the source is the graph's own buffer: see `Frame`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from clearway.execution import together
from clearway.execution.together import Together
from clearway.ops import ahead

Values = tuple[Tensor, ...]
Sign = tuple[Any, ...]
_State = tuple[int, Sign]
"""How often an owner forgot, and what tells weights apart."""


def version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None where nobody counts (made under inference_mode)."""
    return None if tensor.is_inference() else tensor._version


def _sign(tensors: Sequence[Tensor]) -> Sign:
    return tuple((id(t), version(t), t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors)


def _tracked(tensors: Sequence[Tensor]) -> bool:
    return not any(t.is_inference() for t in tensors)


@dataclass(slots=True, eq=False)
class _Entry:
    source: weakref.ref[Tensor]
    sign: Sign
    values: Values


class Kept:
    """Values of the last few sources; a copy of it, by deepcopy or pickle, starts empty."""

    def __init__(self, limit: int = 4) -> None:
        self.limit, self.forgotten = limit, 0
        self._entries: list[_Entry] = []
        self._shared: weakref.WeakValueDictionary[int, _Shared] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self.limit,)

    def __deepcopy__(self, memo: Any) -> Kept:
        return Kept(self.limit)

    def forget(self) -> None:
        """Drops everything kept, here and in captured graphs."""
        self._entries.clear()
        self.forgotten += 1

    def get(
        self,
        source: Tensor,
        weights: Sequence[Tensor],
        compute: Callable[[], Values],
        promised: bool = False,
        products: bool = False,
    ) -> Values:
        """compute(), or what it gave before for this source and these weights.

        `compute` reads `source` and `weights` alone. `promised`: nobody changes in place what has no version.
        `products`: it gives source weight^T for each weight, so others may compute that for it.
        """
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(source.device.type):
            return compute()
        frame = _frame.get()
        if frame is not None:
            return frame.get(self, source, weights, compute, products)
        if source.is_cuda and torch.cuda.is_current_stream_capturing():
            return compute()  # somebody else's graph: what it reads must be made in it
        if not promised and not _tracked((source, *weights)):
            return compute()
        sign = _sign((source, *weights))
        for entry in self._entries:
            if entry.source() is source and entry.sign == sign:
                return entry.values
        values = compute()
        others = [entry for entry in self._entries if entry.source() is not source]
        fresh = _Entry(weakref.ref(source, self._drop), sign, values)
        self._entries = [*others, fresh][-self.limit :]  # a new list: another thread may be reading this one
        return values

    def of_weights(self, weights: Sequence[Tensor], compute: Callable[[], Values]) -> Values:
        """compute(), which reads `weights` alone; within a captured graph that holds something of a context
        what it gave last, made anew with that. Outside of one nothing is kept."""
        if torch.compiler.is_compiling() or not _tracked(weights):
            return compute()
        frame = _frame.get()
        return compute() if frame is None else frame.fixed(self, weights, compute)

    def shared(self, weights: Sequence[Tensor], values: Values) -> _Shared:
        """Buffers of these values: one of each for all graphs, since the weights are."""
        found = self._shared.get(id(weights[0]))
        if found is not None and found.of() is weights[0] and _alike(found.values, values):
            for buffer, value in zip(found.values, values, strict=True):
                buffer.copy_(value)
            return found
        made = _Shared(weakref.ref(weights[0]), tuple(map(_buffer, values)))
        self._shared[id(weights[0])] = made
        return made

    def _drop(self, gone: weakref.ref[Tensor]) -> None:
        self._entries = [entry for entry in self._entries if entry.source is not gone]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Shared:
    """What was computed of a weight, in buffers that last as long as a graph reads them."""

    of: weakref.ref[Tensor]
    values: Values


def _alike(one: Values, other: Values) -> bool:
    signs = [[(t.shape, t.stride(), t.dtype, t.device) for t in values] for values in (one, other)]
    return signs[0] == signs[1]


@dataclass(slots=True, eq=False)
class _Held:
    """One value of a frame; `of` is the state that it was made in."""

    owner: Kept
    weights: tuple[Tensor, ...]
    of: _State
    compute: Callable[[], Values]
    values: Values
    shared: _Shared | None = None
    products: bool = False

    def state(self) -> _State:
        """What of its owner and its weights, as they are, would have it made anew if it were another."""
        return self.owner.forgotten, _sign(self.weights)


@dataclass(slots=True, eq=False)
class Frame:
    """The values that one captured graph reads, in buffers of its own outside of it.

    `sources` are the graph's static inputs. What is computed from one of them during warm-up is held here and
    left out of the graph; `refresh` makes it anew, into the same buffers, when an input has changed. Products
    of one input are made by one op once they were gathered, which is between warm-up and capture.
    """

    sources: tuple[Tensor, ...]
    held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    _together: list[Together] = field(default_factory=list)
    _settled: _Settled | None = None

    def get(
        self,
        owner: Kept,
        source: Tensor,
        weights: Sequence[Tensor],
        compute: Callable[[], Values],
        products: bool = False,
    ) -> Values:
        if not any(source is one for one in self.sources):
            return compute()  # made within the graph, so what reads it is too
        return self._held(owner, source, weights, compute, products)

    def gather(self) -> int:
        """Gives products of one input memory together, and makes them there; how many groups that makes."""
        gathered = {key for group in self._together for key in group.keys}
        for source in self.sources:
            alike = [
                (key, held.weights, held.values)
                for key, held in self.held.items()
                if held.products and key[1] == id(source) and key not in gathered
            ]
            made, parts = together.groups(source, alike)
            for key, values in parts.items():
                self.held[key].values = values
            for group in made:
                group.make()
            self._together += made
        return len(self._together)

    def fixed(self, owner: Kept, weights: Sequence[Tensor], compute: Callable[[], Values]) -> Values:
        """As `get`, of weights alone, which lie outside of the graph. Where nothing is held of an input, it
        is made within the graph: nothing would tell when a weight was changed through `.data`."""
        return self._held(owner, weights[0], weights, compute) if self._of_inputs() else compute()

    def holds(self) -> bool:
        """Whether nothing would have to be made anew for unchanged inputs."""
        return not self.held or (self._settled is not None and self._settled.holds())

    def _of_inputs(self) -> set[int]:
        """The inputs of which something is held."""
        inputs = set(map(id, self.sources))
        return {source for _, source in self.held if source in inputs}

    def _held(
        self,
        owner: Kept,
        source: Tensor,
        weights: Sequence[Tensor],
        compute: Callable[[], Values],
        products: bool = False,
    ) -> Values:
        key = (id(owner), id(source))
        found = self.held.get(key)
        if found is None:
            if source.is_cuda and torch.cuda.is_current_stream_capturing():
                return compute()  # not seen at warm-up: left in the graph
            values, shared = compute(), None
            if any(source is one for one in self.sources) or ahead.gathering() is not None:
                values = tuple(map(_buffer, values))  # while kernels are built nothing of ours is computed
            else:
                shared = owner.shared(weights, values)
                values = shared.values
            state = owner.forgotten, _sign(weights)
            found = _Held(owner, tuple(weights), state, compute, values, shared, products)
            self.held[key] = found
            self._settled = None
        return found.values

    def refresh(self, changed: Sequence[Tensor] = ()) -> int:
        """Recomputes what is held for `changed` inputs, other weights, or what was forgotten; how many."""
        touched, inputs = set(map(id, changed)), self._of_inputs()
        settled = self._settled is not None and self._settled.holds()
        if settled and inputs.isdisjoint(touched):
            return 0
        anew, now = {key for key in self.held if key[1] in touched}, dict[tuple[int, int], _State]()
        if not settled:
            now = {key: held.state() for key, held in self.held.items()}
            anew |= {key for key, state in now.items() if state != self.held[key].of}
        if any(source in inputs for _, source in anew):  # with what is made of a prompt, what is of weights
            anew |= {key for key in self.held if key[1] not in inputs}
        left = set(anew)
        for group in self._together:
            if not left.isdisjoint(group.keys):  # all of it: a product's bits do not tell how it was made
                group.make()
                left.difference_update(group.keys)
        for key in [key for key in self.held if key in left]:
            held = self.held[key]
            for buffer, value in zip(held.values, held.compute(), strict=True):
                buffer.copy_(value)
        if not settled:
            for key, state in now.items():
                self.held[key].of = state
            self._settled = _Settled(self.held)
        return len(anew)


class _Settled:
    """All that a frame holds as it was last made, to be compared in C's loops: at each replay."""

    def __init__(self, held: dict[tuple[int, int], _Held]) -> None:
        self._owners = [one.owner for one in held.values()]
        self._forgotten = [one.of[0] for one in held.values()]
        self._weights = [weight for one in held.values() for weight in one.weights]
        signs = [sign for one in held.values() for sign in one.of[1]]
        self._addresses, self._dtypes = [sign[2] for sign in signs], [sign[3] for sign in signs]
        counted = [(weight, sign[1]) for weight, sign in zip(self._weights, signs, strict=True)]
        self._counted = [weight for weight, version in counted if version is not None]
        self._versions = [version for _, version in counted if version is not None]

    def holds(self) -> bool:
        """Whether nothing was forgotten and every weight has its version, its address and its dtype."""
        return (
            list(map(attrgetter("forgotten"), self._owners)) == self._forgotten
            and list(map(attrgetter("_version"), self._counted)) == self._versions
            and list(map(Tensor.data_ptr, self._weights)) == self._addresses
            and list(map(attrgetter("dtype"), self._weights)) == self._dtypes
        )


def _buffer(value: Tensor) -> Tensor:
    """A copy that may be written to in and out of inference_mode."""
    with torch.inference_mode(False), torch.no_grad():
        buffer = torch.empty_like(value, requires_grad=False)
    return buffer.copy_(value)


_frame: ContextVar[Frame | None] = ContextVar("clearway_frame", default=None)


@contextmanager
def within(frame: Frame) -> Iterator[Frame]:
    """Within it values are held by `frame`, which it gives, instead of being kept by source."""
    token = _frame.set(frame)
    try:
        yield frame
    finally:
        _frame.reset(token)


def inside() -> bool:
    """Whether this is within somebody's `within`: a graph is being captured around it."""
    return _frame.get() is not None
