"""Counts the bytes of tensors that are alive, on any device and on meta: what a network holds at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Within it the memory that operations make is followed until it is freed; `peak_bytes` was the most.

    What was there before (weights, inputs) does not count. A storage counts once, however many view it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._sweep()
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and (key := _key(value)) not in self._alive:
                self._before.add(key)
        out = func(*args, **(kwargs or {}))
        self._sweep()
        for value in pytree.tree_leaves(out):
            if isinstance(value, torch.Tensor):
                key = _key(value)
                if key not in self._alive and key not in self._before:
                    storage = value.untyped_storage()
                    self._alive[key] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return out

    def _sweep(self) -> None:
        for key in [key for key, (reference, _) in self._alive.items() if reference.expired()]:
            del self._alive[key]


class FusedAttention(TorchFunctionMode):
    """Within it attention makes its output and nothing else, as flash and its kin do; values are lost."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            q, _, v = args[:3]
            return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        return func(*args, **(kwargs or {}))


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def measured(run: Any) -> int:
    """The most bytes that are alive while `run` runs, attention without scores."""
    with torch.inference_mode(), FusedAttention(), Live() as live:
        run()
    return live.peak_bytes
