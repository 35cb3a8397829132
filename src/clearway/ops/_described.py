"""A tensor as Hopper's copy engine reads and writes it: in blocks, and beyond its edges as zeros."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """`tensor`, its last axis contiguous and every other stride a multiple of 16 bytes, in blocks of
    `block`."""

    tensor: Tensor
    block: tuple[int, ...]

    def sign(self) -> tuple[Any, ...]:
        """What Triton tells descriptors apart by."""
        return self.tensor.dtype, self.block

    def made(self, base: Any = None) -> Any:
        """Triton's own object; `base` stands for the tensor where nothing is to be run."""
        kind, layout = _kind(self.tensor.dtype, self.block)
        shape, strides = list(self.tensor.shape), list(self.tensor.stride())
        return kind(self.tensor if base is None else base, shape, strides, list(self.block), layout)


@functools.cache
def _kind(dtype: torch.dtype, block: tuple[int, ...]) -> tuple[Any, Any]:
    """Triton's class of descriptors, and how a block of this dtype lies in shared memory."""
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = getattr(language, str(dtype).removeprefix("torch."))
    return TensorDescriptor, language.NVMMASharedLayout.get_default_for(list(block), element)
