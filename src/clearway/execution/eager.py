"""Eager execution: the module is called as it is, and counted.

On CUDA the first call of a shape has its kernels built at once beforehand, as for a captured graph: where
memory leaves no graphs, a first picture would wait for one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _every
from torch.utils import _pytree as pytree

from clearway.execution.calls import owner_of
from clearway.execution.code import foreign
from clearway.execution.kept import Frame, within
from clearway.ops import ahead, contract, other_sizes


@dataclass(slots=True)
class Eager:
    """Calls `module` and counts each call in `routes` as "<part>/<name>", or as what `module.ran` says.

    `built`: the shapes whose kernels were built, of all executors of that module; None where kernels are
    built as they come.
    """

    module: Callable[..., Any]
    part: str
    routes: Counter[str] = field(default_factory=Counter)
    name: str = "eager"
    built: set[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.built is not None:
            self._build(self.built, args, kwargs)
        out = self.module(*args, **kwargs)
        self.routes[f"{self.part}/{getattr(self.module, 'ran', self.name)}"] += 1
        return out

    def sentences(self, name: str) -> list[str]:
        """What `module`, where it is an executor too, says of itself under the name `name`."""
        told = getattr(self.module, "sentences", None)
        return list(told(name)) if callable(told) else []

    def _build(self, built: set[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Builds what this call will launch, once a shape; nothing that it computes is kept."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors or not takes_kernels(tensors[0]) or ahead.gathering() is not None or watched():
            return
        key = contract.route_key(), tuple((one.shape, one.dtype, one.stride()) for one in tensors)
        if key in built:
            return
        built.add(key)
        if torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing() or heard(self.module):
            return
        calls = ahead.Calls()
        with within(Frame(())):
            begin = partial(other_sizes.begin, tensors, calls)
            ahead.build(lambda: self.module(*args, **kwargs), calls=calls, known=begin)


def takes_kernels(tensor: Tensor) -> bool:
    """Whether kernels of ours may be launched for it: on CUDA."""
    return tensor.is_cuda


def watched() -> bool:
    """Whether a mode of PyTorch's sees every operation, who would count those of a call that is none."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def heard(run: Callable[..., Any]) -> bool:
    """Whether anybody listens to the module or to one within it, or to all there are, or has put code in it
    that may count its calls: who would hear of a call that is none."""
    owner: nn.Module | None = owner_of(run)
    if owner is None or _every._global_forward_hooks or _every._global_forward_pre_hooks:
        return True
    modules = list(owner.modules())
    if any(one._forward_hooks or one._forward_pre_hooks for one in modules):
        return True
    return foreign(modules) is not None
