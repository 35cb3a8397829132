"""The Python that a call of a module runs, as far as somebody may put other code in its place.

A function of a class, or one that a file of Diffusers' or PyTorch's calls by its name, can be replaced for
everybody (token merging, attention of other libraries do so). A captured graph knows nothing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_DIFFUSERS = "diffusers.models."
_OURS = "clearway."
_LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate", "clearway")
_OF_MODULES = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "forward")
"""What of PyTorch's base class a call passes through."""
_PURE = ("_conv_forward",)
"""Methods that are put at instances by code known to do the same at each call (pictures that tile)."""
_KEYED = ("scaled_dot_product_attention",)
"""Functions that are part of a graph's key: `device.switches`."""

Places = tuple[list[Any], list[str], list[Any]]


def of_classes(kinds: Iterable[type]) -> Places:
    """(classes, names, functions) of all that instances of `kinds` may call of themselves."""
    places: Places = ([], [], [])
    for kind in kinds:
        names = {
            name
            for base in kind.__mro__[:-1]
            for name, value in vars(base).items()
            if type(value) in (FunctionType, staticmethod, property)
            and (base is not nn.Module or name in _OF_MODULES)
        }
        _put(places, kind, {name: getattr(kind, name, None) for name in sorted(names)})
    return places


def of_modules(kinds: Collection[type]) -> Places:
    """(dicts, names, functions) of what the files of `kinds`, and torch's own functions, call by name."""
    places: Places = ([], [], [])
    files = {base.__module__ for kind in kinds for base in kind.__mro__ if issubclass(base, nn.Module)}
    for name in sorted(file for file in files if not file.startswith("torch.")):
        space = vars(sys.modules.get(name, sys))
        _put(places, space, {key: one for key, one in space.items() if isinstance(one, FunctionType)})
    space = vars(torch.nn.functional)
    called = {key: one for key, one in space.items() if callable(one) and key not in _KEYED}
    _put(places, space, {key: one for key, one in called.items() if not key.startswith("_")})
    return places


def _put(places: Places, holder: Any, found: dict[str, Any]) -> None:
    places[0].extend([holder] * len(found))
    places[1].extend(found)
    places[2].extend(found.values())


def foreign(modules: Iterable[nn.Module]) -> str | None:
    """The first attention processor, forward or other method that is not of a library known to do the same at
    each call.

    Those that edit a prompt, keep what they saw or leave out steps count their calls.
    """
    replaced: dict[type, bool] = {}
    for module in modules:
        held, kind = vars(module), type(module)
        processor = held.get("processor", module._modules.get("processor"))
        if processor is not None and not _known(type(processor), type(processor).__call__):
            return f"an attention processor ({type(processor).__name__})"
        theirs, forward = getattr(kind, "forward", None), held.get("forward")
        if kind not in replaced:
            replaced[kind] = _library(kind.__module__) and not _library(_home(theirs))
        own = getattr(forward, "__func__", None) is theirs
        if replaced[kind] or (
            forward is not None and not own and not type(forward).__module__.startswith(_OURS)
        ):
            return f"a forward of its {kind.__name__}"
        for name, value in held.items():
            method = isinstance(value, FunctionType | MethodType) and hasattr(kind, name)
            if method and name not in _PURE and not _library(_home(value)):
                return f"{name} of its {kind.__name__}"
    return None


def _known(kind: type, call: Any) -> bool:
    return kind.__module__.startswith((_DIFFUSERS, _OURS)) and _library(_home(call))


def _home(function: Any) -> str:
    return str(getattr(function, "__module__", ""))


def _library(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARIES
