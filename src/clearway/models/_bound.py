"""A module's forward, put in place at that instance and taken away again; what must be so for that.

`module.forward = Bound(run, module)` shadows the class's forward for one module: no class is changed, hooks
and `__call__` stay as they are, and state_dict knows nothing of it. deepcopy and pickle take it along.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


class Instead(functools.partial[Any]):
    """`Instead(run, module, ...)`: `run(module, ..., *args)` in place of the forward of the module's class.

    A partial, so that torch.compile sees `run` itself: one frame of Python's for all kinds would share one
    cache of compiled code, and its limit.
    """

    @property
    def __signature__(self) -> inspect.Signature:
        """The class's own, for those who look what a forward takes."""
        return inspect.signature(MethodType(type(self.args[0]).forward, self.args[0]))


class Bound(Instead):
    """What `accelerate` puts in place and `restore` takes away."""

    before: Any = None
    """What stood at the instance before, to be put back: the class's own forward, as Accelerate leaves it."""

    def give_way(self) -> None:
        """From now on the class's own forward runs, for somebody who still holds this."""
        self.__setstate__((own, self.args[:1], {}, None))  # type: ignore[attr-defined]


class Cast(Instead):
    """What casts between parts of several dtypes: of a module's precision, hence not `restore`'s to take."""


_LIBRARIES = ("torch", "diffusers", "transformers")
_SAME: set[Callable[..., Any]] = set()


def same(run: Callable[..., Any]) -> Callable[..., Any]:
    """Says that `run` gives what the module's own forward gives, of the same weights: where it stands the
    module is plain all the same."""
    _SAME.add(run)
    return run


def own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the module's class does."""
    return type(module).forward(module, *args, **kwargs)


def needs_gradient(module: nn.Module, *inputs: Tensor | None) -> bool:
    """Whether this call may have to be differentiated."""
    if not torch.is_grad_enabled():
        return False
    given = (x for x in inputs if x is not None)
    return any(one.requires_grad for one in chain(given, module.parameters()))


def plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether a module is exactly of a class and nobody listens to it or stands in its place.

    Only such a one may be computed without being called.
    """
    return type(module) is kind and not _replaced(module) and unheard(module)


def unheard(module: nn.Module) -> bool:
    """Whether a call of the module is its forward and nothing else."""
    return not module._forward_hooks and not module._forward_pre_hooks and module._compiled_call_impl is None


def occupied(module: nn.Module) -> str | None:
    """Why this module's forward is somebody else's already."""
    if _replaced(module):
        return "its forward was replaced (offloading, or somebody's own)"
    if module._compiled_call_impl is not None:
        return "it is compiled"
    return None


def _replaced(module: nn.Module) -> bool:
    """Whether something else than its class's forward stands at this instance, or in the place of a library's
    at the class. Accelerate, when it takes a hook away, leaves the class's own there."""
    held, kind = module.__dict__, type(module)
    forward = held.get("forward")
    if "_conv_forward" in held:  # what makes pictures that tile in one direction
        return True
    theirs = getattr(kind, "forward", None)
    if _library(kind) and not _library(theirs):
        return True  # for everybody
    if isinstance(forward, Bound) and forward.func in _SAME:
        return False
    return forward is not None and getattr(forward, "__func__", None) is not theirs


def _library(what: Any) -> bool:
    return str(what.__module__).partition(".")[0] in _LIBRARIES


def plain_weight(weight: Any) -> bool:
    """Whether a weight is an ordinary floating-point tensor: not quantised, not a class of its own."""
    return type(weight) is nn.Parameter and type(weight.data) is Tensor and weight.is_floating_point()
