"""One call of a module, as executors see it that keep something for the next such call."""

from __future__ import annotations

import enum
import numbers
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def owner_of(run: Callable[..., Any]) -> nn.Module | None:
    """The module that is called, or whose method is."""
    owner = run if isinstance(run, nn.Module) else getattr(run, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of one call, flat. `itself`: the module is called, not a method of it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: list[Any]
    tree: Any
    tensors: list[Tensor]
    owner: nn.Module | None
    itself: bool

    @classmethod
    def of(cls, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """A call of `run` with these arguments."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return cls(args, kwargs, leaves, tree, tensors, owner_of(run), isinstance(run, nn.Module))

    def refuse(self) -> str | None:
        """Why nothing of such a call can be kept for the next one; metadata only."""
        if not self.tensors:
            return "there is no tensor among its arguments"
        if torch.is_grad_enabled():
            weights = () if self.owner is None else self.owner.parameters()
            if any(tensor.requires_grad for tensor in (*self.tensors, *weights)):
                return "a gradient is needed"
        if torch.is_autocast_enabled(self.tensors[0].device.type):
            return "torch.autocast is at work"
        if torch._C._get_tracing_state() is not None:
            return "torch.jit is tracing"
        for leaf in self.leaves:
            if type(leaf) not in _PLAIN and not isinstance(leaf, _KEYS):
                return f"an argument is a {type(leaf).__name__}, which is no key"
        return at_work()

    def promises(self, names: Sequence[str]) -> list[bool]:
        """For each tensor, in order, whether it came under one of `names`, promised not to change."""
        given = [(False, argument) for argument in self.args]
        given += [(name in names, value) for name, value in self.kwargs.items()]
        return [promise for promise, value in given for _ in _tensors(value)]


_PLAIN = (type(None), bool, int, float, str)
_KEYS = (
    Tensor,
    numbers.Number,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""What an argument may be: nothing that can be changed, or that does something when it is called."""


def at_work() -> str | None:
    """Which mode of PyTorch's sees every operation of a call now and may do another, where there is one.

    `torch.device(...)` is none, being a part of keys; one with `watches` set says that it changes nothing.
    """
    if not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()):
        return None
    modes = (*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    for mode in modes:
        if not isinstance(mode, DeviceContext) and not getattr(mode, "watches", False):
            return f"{type(mode).__name__} sees its operations"
    return None


def defaults() -> tuple[Any, ...]:
    """What a tensor becomes that is made without being told: its dtype, its device where somebody set one."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device() if torch._C._len_torch_function_stack() else None,
    )


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in order; most values are one or none, for which no tree is walked."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in _PLAIN:
        return []
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def copied(output: Any) -> Any:
    """An output with tensors of its own in place of its tensors."""
    if type(output) is tuple and all(isinstance(one, Tensor) or type(one) in _PLAIN for one in output):
        return tuple(one.clone() if isinstance(one, Tensor) else one for one in output)
    return pytree.tree_map_only(Tensor, torch.clone, output)


def told(name: str, reasons: Counter[str], calls: int) -> list[str]:
    """A sentence for each reason why some of `calls` calls of what is called `name` ran eagerly."""
    return [
        f"{name} ran eagerly{'' if count == calls else ' at times'}: {reason}"
        for reason, count in reasons.items()
    ]
