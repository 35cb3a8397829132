"""What a captured graph has baked in of a module: its code, the addresses of its tensors, its adapters.

A graph reads weights where they lay at capture. So it holds while every module, forward and processor is the
same object, every weight lies where it lay and every setting is what it was (FreeU's factors, an image
adapter's scale); a change of weights in place is seen by it. Adapters put numbers (scales, which are on) into
the graph, hence a state of their own: a graph may be kept for each.
"""

from __future__ import annotations

import copy
import enum
import hashlib
from itertools import chain
from operator import call, eq, is_, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module

_HELD = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CODE = ("forward", "processor", "_compiled_call_impl")
_TRAINING = itemgetter("training")
_ADAPTER_FACTS = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters", "use_dora")
"""What PEFT's layers hold; a layer with one of the first or the fourth is taken for one."""

_IDLE = (nn.Linear, nn.Dropout, nn.ModuleList, nn.Sequential, nn.SiLU, nn.Identity)
"""Modules of torch's that read no settings in inference but which class they are and whether they train."""
_DIFFUSERS = "diffusers.models."
_OURS = "clearway."

_NO_SETTINGS = (*_ADAPTER_FACTS, "training")
_PLAIN = (bool, int, float, str, type(None))


class Fingerprint:
    """A module as it was at one moment; `holds` says whether it still is. Reads no values.

    It is asked at every replay, so the loops are C's, over lists that were made once. What that takes of the
    host's time is in bench/results/amd-epyc-2-cores/host_time.jsonl, beside what it overlaps. Tags of dicts
    (TorchDynamo's `dict_version`) would take less, but CPython 3.13 does not tell them of attributes that are
    set at an instance.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = self._modules = list(module.modules())
        self._types = list(map(type, modules))
        self._vars = [vars(one) for one in modules]
        processors = [getattr(held.get("processor"), "__dict__", None) for held in self._vars]
        self._grown = [*self._vars, *(held for held in processors if held is not None)]
        held_by = [held[name] for held in self._vars for name in _HELD]
        self._filled = [held for held in held_by if held]  # most modules lack two of the three
        self._empty = [held for held in held_by if not held]
        self._sized = [*self._grown, *self._filled]
        self._sizes = list(map(len, self._sized))
        self._values = list(chain.from_iterable(map(dict.values, self._filled)))
        loose = [(held, name) for held in self._vars for name in held if isinstance(held[name], Tensor)]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._tensors += [held[name] for held, name in loose]  # attributes of modules that are no buffers
        self._addresses = list(map(_address, self._tensors))
        self._read = _address if any(map(_without_memory, self._tensors)) else Tensor.data_ptr
        self._hooks = [held[name] for held in self._vars for name in _HOOKS]
        code = [*((held, name) for held in self._vars for name in _CODE if name in held), *loose]
        self._code_of, self._code_names = [held for held, _ in code], [name for _, name in code]
        self._code = [held[name] for held, name in code]
        self._training = list(map(_TRAINING, self._vars))
        self._adapters = [held for held in self._vars if "scaling" in held or "merged_adapters" in held]
        settings = [found for one in modules for found in _settings(one)]
        self._set_of, self._set_by = [held for held, _, _ in settings], [read for _, read, _ in settings]
        self._set = [value for _, _, value in settings]
        self.foreign = _foreign(modules)
        """Whose code is in it that may do something else at each call, which a graph would leave out."""
        self._facts: list[Any] | None = None
        self._hash = ""
        self.moved = any(map(moves, self._vars))
        """Whether hooks of Accelerate or Diffusers, which may move weights or leave parts out, are in it."""

    def holds(self) -> bool:
        """Whether every module, forward, processor and weight is the same and lies where it lay."""
        return (
            not any(self._empty)
            and list(map(len, self._sized)) == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self._values))
            and all(map(is_, map(type, self._modules), self._types))
            and self.lies()
            and all(map(is_, map(dict.get, self._code_of, self._code_names), self._code))
            and self._set_alike()
        )

    def lies(self) -> bool:
        """Whether every tensor lies where it lay. They are held, so what was captured reads memory of theirs,
        whatever else became of the module."""
        try:
            return list(map(self._read, self._tensors)) == self._addresses
        except RuntimeError:  # one has no memory of its own any more
            return False

    def _set_alike(self) -> bool:
        """Whether all settings are what they were."""
        try:
            if list(map(_TRAINING, self._vars)) != self._training:
                return False
            # one after the other: so many tuples at once would set off the garbage collector
            return all(map(eq, map(call, self._set_by, self._set_of), self._set))
        except (KeyError, RuntimeError):  # gone, or a tensor now
            return False

    def refuse(self, itself: bool) -> str | None:
        """Why no call of the module, or in `itself` False of a method of it, stands for the next one."""
        if self.moved:
            return "hooks are at work in it that may move its weights (offloading, caching)"
        if self.hooked(itself):
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
    registry = held.get("_diffusers_hook")
    return "_hf_hook" in held or bool(getattr(registry, "hooks", registry))


def _fact(value: Any) -> Any:
    """A fact that may be compared without waiting for a device: a tensor (a scale that may be swapped) is
    where it lies, since a graph reads it there."""
    if type(value) is dict:
        return {name: _address(one) if isinstance(one, Tensor) else one for name, one in value.items()}
    return value


def _settings(module: nn.Module) -> list[tuple[dict[str, Any], itemgetter[Any], Any]]:
    """(attributes, what reads the plain ones, their values) of a module, and of its processor."""
    found = []
    for one in (module, vars(module).get("processor")):
        held = getattr(one, "__dict__", None)
        if not held or type(one) in _IDLE:
            continue
        names = [name for name, value in held.items() if name not in _NO_SETTINGS and _is_plain(value)]
        if names:
            read = itemgetter(*names)
            found.append((held, read, copy.deepcopy(read(held))))
    return found


def _foreign(modules: list[nn.Module]) -> str | None:
    """The first attention processor, or forward at an instance, that is neither Diffusers' nor ours.

    Those that edit a prompt, keep what they saw or leave out steps count their calls.
    """
    for module in modules:
        held = vars(module)
        processor, forward = held.get("processor"), held.get("forward")
        if processor is not None and not type(processor).__module__.startswith((_DIFFUSERS, _OURS)):
            return f"an attention processor ({type(processor).__name__})"
        own = getattr(forward, "__func__", None) is type(module).forward
        if forward is not None and not own and not type(forward).__module__.startswith(_OURS):
            return f"a forward of its {type(module).__name__}"
    return None


def _is_plain(value: object) -> bool:
    """Numbers, words and flags, and lists, tuples and dicts of them: never a tensor, never a module."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return type(value) in _PLAIN or isinstance(value, enum.Enum)


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
