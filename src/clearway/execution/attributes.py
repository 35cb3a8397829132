"""What modules hold, and the objects at them: every attribute as it was, to be compared in C's loops.

An attribute counts whatever it is: a number, a list of them, a tensor that is no buffer, a function, an
object with attributes of its own (a processor, a config). Numbers, words and containers of them are compared
by value, all else by which object it is; the attributes of objects are looked at in turn, and so are modules
that nobody registered.

Dicts are compared with copies of theirs, which costs the least by far: two values that are the same object
are alike before anything is asked of them. Two tensors that are not would be compared element by element,
and then refuse to be true or false, which is taken for "other"; what could be alike without being the same
(a tensor of one element, a class with an `==` of its own) is compared by identity besides.
"""

from __future__ import annotations

import enum
import sys
from functools import cache, partial
from operator import call, eq, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

BUILT = "_clearway_built"
"""Where a module holds what executors made for it: this too, so it is never looked into."""
HOOKED = ("_hf_hook", "_diffusers_hook")
"""Where Accelerate and Diffusers keep hooks at a module."""

_OURS = "clearway."
_INNER = ("_parameters", "_buffers", "_modules")
_STANDARD = frozenset(vars(nn.Module())) | {"_is_full_backward_hook", BUILT, *HOOKED}
"""Attributes of every module, which are no settings, and those that are not looked into."""
_IDLE = (nn.Linear, nn.Dropout, nn.ModuleList, nn.Sequential, nn.SiLU, nn.Identity)
"""Modules of torch's that read no settings in inference but which class they are and whether they train."""
_USUAL = _STANDARD | {"in_features", "out_features", "p", "inplace"}
"""What these have; one with more is compared whole."""
_ADAPTERS = ("scaling", "merged_adapters", "use_dora")
_WHICH = ("_active_adapter", "_disable_adapters")
"""What PEFT changes in its layers: in place, and by another value. They have a hash of their own."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
_BY_IDENTITY: Any = object.__eq__
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_NAMESPACES = ("SimpleNamespace", "Namespace")
_LARGE = 4096
"""Elements of a container from which on it is told by which object it is (a tokenizer's words)."""
_DEPTH = 4
"""How many objects and containers deep is looked."""


class Attributes:
    """All that a module and what is in it hold; `hold` says whether they still do.

    `modules` are those found, the module itself first; `tensors` all that are held, each once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self.objects: list[Any] = []
        """Those whose attributes are looked at: processors, configs."""
        self._known: set[int] = set()
        self._held: list[dict[str, Any]] = []
        self._were: list[dict[str, Any]] = []
        self._empty: list[dict[str, Any]] = []
        self._delicate: list[tuple[dict[str, Any], str, Any]] = []
        self._of: list[dict[str, Any]] = []
        self._readers: list[itemgetter[Any]] = []
        self._read: list[tuple[Any, ...]] = []
        self._add(module)
        number = 0
        while number < len(self.modules):  # looking at one may find others
            self._look(self.modules[number])
            number += 1
        self._sizes = list(map(len, self._of))
        self._dicts = [holder for holder, _, _ in self._delicate]
        self._names = [name for _, name, _ in self._delicate]
        self._values = [value for _, _, value in self._delicate]

    def hold(self) -> bool:
        """Whether every attribute of every module and object is what it was."""
        if any(self._empty) or not all(map(is_, map(dict.get, self._dicts, self._names), self._values)):
            return False
        if list(map(len, self._of)) != self._sizes:
            return False
        try:
            # one after the other: so many tuples at once would set off the garbage collector
            return self._held == self._were and all(map(eq, self._read, map(call, self._readers, self._of)))
        except Exception:  # tensors (arrays, ...) that are not the same ones
            return False

    def _add(self, module: nn.Module) -> None:
        for one in module.modules():
            if id(one) not in self._known:
                self._known.add(id(one))
                self.modules.append(one)

    def _look(self, module: nn.Module) -> None:
        held = vars(module)
        idle = type(module) in _IDLE and not (module.training and type(module) is nn.Dropout)
        own = () if idle and held.keys() <= _USUAL else (name for name in held if name not in _STANDARD)
        self._attributes(held, ("training", *(name for name in _INNER if held[name]), *own))
        for name in _INNER:
            inner = held[name]
            if inner:
                self._note(inner, {key: self._was(one, 0, inner, key) for key, one in inner.items()})
            else:
                self._empty.append(inner)

    def _attributes(self, held: dict[str, Any], names: tuple[str, ...]) -> None:
        """Notes those of these names: of PyTorch's own the dicts of hooks and those that are not empty, so
        that another in the place of one is seen."""
        adapter = any(name in held for name in _ADAPTERS[:2])
        names = names * 2 if len(names) == 1 else names  # of two names a tuple is read
        were: list[Any] = []
        for name in names:
            value = held[name]
            if adapter and name in _WHICH:
                were.append(_ANYTHING)
            elif name in _STANDARD or (adapter and name in _ADAPTERS):
                were.append(value)
            else:
                were.append(self._was(value, _DEPTH, held, name))
        self._of.append(held)
        self._readers.append(_reader(names))
        self._read.append(tuple(were))

    def _note(self, held: dict[str, Any], were: dict[str, Any]) -> None:
        self._held.append(held)
        self._were.append(were)

    def _was(self, value: Any, depth: int, holder: dict[str, Any] | None = None, name: str = "") -> Any:
        """What the value is to be compared with."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                self._known.add(id(value))
                self.tensors.append(value)
            delicate = kind not in _ORDINARY or value.numel() <= 1
            return self._itself(value, holder, name) if delicate else value
        if isinstance(value, nn.Module):
            self._add(value)
            return value
        if isinstance(value, _CONTAINERS):
            return self._contents(value, depth)
        if depth > 0 and _has_attributes(value, name):
            self._object(value, depth - 1)
        alike: Any = kind.__eq__
        if alike is _BY_IDENTITY or isinstance(value, (*_CODE, enum.Enum)):
            return value
        return self._itself(value, holder, name)

    def _itself(self, value: Any, holder: dict[str, Any] | None, name: str) -> Any:
        if holder is None:
            return _Itself(value)
        self._delicate.append((holder, name, value))
        return value

    def _contents(self, value: Any, depth: int) -> Any:
        if depth <= 0 or len(value) > _LARGE:
            return value
        if getattr(value, "__dict__", None):  # Diffusers' configs are both
            self._object(value, depth - 1)
        if isinstance(value, dict):
            return {key: self._was(one, depth - 1) for key, one in value.items()}
        if isinstance(value, set | frozenset):
            return set(value)
        items = [self._was(one, depth - 1) for one in value]
        if isinstance(value, list):
            return items
        same = all(map(is_, items, value))
        return value if same else tuple(items)

    def _object(self, value: Any, depth: int) -> None:
        if id(value) in self._known:
            return
        self._known.add(id(value))
        self.objects.append(value)
        held = vars(value)
        self._note(held, {name: self._was(one, depth, held, name) for name, one in held.items()})


@cache
def _reader(names: tuple[str, ...]) -> itemgetter[Any]:
    return itemgetter(*names)


class _Itself:
    """Alike to nothing but one object, whatever that thinks itself alike to."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return other is self.value


class _Anything:
    """Alike to everything."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


_ANYTHING = _Anything()


def _has_attributes(value: Any, name: str) -> bool:
    """Whether it is an object to look into: not one of Python's own (a logger), nor what calls the network
    and changes at each step. Ours keep what they computed: of those only processors."""
    kind = type(value)
    if isinstance(value, _CODE) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    if kind.__name__ not in _NAMESPACES and kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return False
    if hasattr(kind, "components") or hasattr(kind, "set_timesteps"):  # a pipeline, a scheduler
        return False
    return name == "processor" or not kind.__module__.startswith(_OURS)
