"""What a captured graph has baked in of a module: its code, the addresses of its tensors, its adapters.

A graph reads weights where they lay at capture. So it holds while every module, attribute, function and class
is what it was and every tensor lies where and as it lay; a change of weights in place is seen by it. Adapters
put numbers (scales, which are on) into the graph, hence a state of their own: a graph may be kept for each.
"""

import copy
import hashlib
from itertools import repeat
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module

from clearway.execution import code
from clearway.execution.attributes import HOOKED, Attributes
from clearway.execution.layouts import Layouts

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ADAPTER_FACTS = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters", "use_dora")
"""What PEFT's layers hold; a layer with one of the first or the fourth is taken for one."""
_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)


class Fingerprint:
    """A module as it was at one moment; `holds` says whether it still is. Reads no values of a device.

    It is asked at every replay, so the loops are C's, over lists that were made once. What that takes of the
    host's time is in bench/results/amd-epyc-2-cores/host_time.jsonl, beside what it overlaps. Tags of dicts
    (TorchDynamo's `dict_version`) would take less, but CPython 3.13 does not tell them of attributes that are
    set at an instance.
    """

    def __init__(self, module: nn.Module) -> None:
        held = self._attributes = Attributes(module)
        modules = self._modules = held.modules
        self._types = list(map(type, modules))
        self._kinds, self._names, self._functions = code.of_classes({*self._types, *map(type, held.objects)})
        self._spaces, self._globals, self._called = code.of_modules(set(self._types))
        self._tensors = held.tensors
        self._addresses = list(map(_address, self._tensors))
        self._read = _address if any(map(_without_memory, self._tensors)) else Tensor.data_ptr
        self._layouts = Layouts(self._tensors)
        self._numbers = list(filter(_is_number, self._tensors))
        self._values = list(map(_value, self._numbers))
        of = list(map(vars, modules))
        self._hooks = [one[name] for one in of for name in _HOOKS]
        self._adapters = [one for one in of if "scaling" in one or "merged_adapters" in one]
        self.foreign = code.foreign(modules)
        """Whose code is in it that may do something else at each call, which a graph would leave out."""
        self._facts: list[Any] | None = None
        self._hash = ""
        self.moved = any(map(moves, of))
        """Whether hooks of Accelerate or Diffusers, which may move weights or leave parts out, are in it."""

    def holds(self, lies: bool = False) -> bool:
        """Whether every module, attribute, function and class is the same, and every tensor lies as it lay;
        `lies`: where they lie was looked at just now."""
        return (
            (lies or self.lies())
            and self._attributes.hold()
            and self._layouts.hold()
            and list(map(type, self._modules)) == self._types
            and list(map(_value, self._numbers)) == self._values
            and all(map(is_, map(getattr, self._kinds, self._names, repeat(None)), self._functions))
            and all(map(is_, map(dict.get, self._spaces, self._globals), self._called))
        )

    def lies(self) -> bool:
        """Whether every tensor lies where it lay. They are held, so what was captured reads memory of theirs,
        whatever else became of the module."""
        try:
            return list(map(self._read, self._tensors)) == self._addresses
        except RuntimeError:  # one has no memory of its own any more
            return False

    def refuse(self, itself: bool, hooks: bool = True) -> str | None:
        """Why no call of the module, or in `itself` False of a method of it, stands for the next one; `hooks`
        says whether hooks are looked for, of which there are thousands of places."""
        if self.moved:
            return "hooks are at work in it that may move its weights (offloading, caching)"
        if hooks and self.hooked(itself):
            return "forward hooks are at work in it"
        if self.foreign:
            return f"{self.foreign} is somebody's own code, which may do something else at each call"
        return None

    def hooked(self, itself: bool = True) -> bool:
        """Whether somebody's forward hooks are at work in it, which a graph would leave out.

        Those at the module itself count where it is called and not, in `itself` False, a method of it.
        """
        if _module._global_forward_hooks or _module._global_forward_pre_hooks:
            return True  # at all modules there are
        hooks = self._hooks if itself else self._hooks[len(_HOOKS) :]
        return any(hooks) and not all(_records(hook) for held in hooks for hook in held.values())

    def adapters(self) -> str:
        """A hash of which adapters are on, at which scales, and what of them is merged; "" without any."""
        if not self._adapters:
            return ""
        facts = [_fact(held.get(name)) for held in self._adapters for name in _ADAPTER_FACTS]
        if facts != self._facts:
            self._facts = copy.deepcopy(facts)
            self._hash = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        return self._hash


def moves(held: dict[str, Any]) -> bool:
    """Whether hooks of Accelerate or Diffusers are at a module of these attributes. Pipelines of transformers
    (`cache_context`) leave a registry at them which holds none."""
    ones, registries = HOOKED
    registry = held.get(registries)
    return ones in held or bool(getattr(registry, "hooks", registry))


def _fact(value: Any) -> Any:
    """A fact that may be compared without waiting for a device: a tensor (a scale that may be swapped) is
    where it lies, since a graph reads it there, or the number it is."""
    if type(value) is dict:
        return {name: _place(one) if isinstance(one, Tensor) else one for name, one in value.items()}
    return value


def _place(tensor: Tensor) -> Any:
    return _value(tensor) if _is_number(tensor) else _address(tensor)


def _is_number(tensor: Tensor) -> bool:
    """Whether it is a number of the host's: operations on a device take its value and not its address."""
    return tensor.dim() == 0 and tensor.device.type == "cpu" and type(tensor) in _ORDINARY


def _value(number: Tensor) -> str:
    return repr(number.item())  # NaN is itself


def _records(hook: Any) -> bool:
    """Whether a hook is one with which Transformers collects hidden states: it changes nothing, and what it
    collects is among the outputs of the call that asked for it."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def _without_memory(tensor: Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor class without memory of its own
        return id(tensor)
