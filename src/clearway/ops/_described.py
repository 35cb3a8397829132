"""A tensor as Hopper's copy engine reads and writes it: in blocks, and beyond its edges as zeros."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """`tensor`, its last axis contiguous and every other stride a multiple of 16 bytes, in blocks of `block`;
    strides of axes of length 1, which lead nowhere, may be any."""

    tensor: Tensor
    block: tuple[int, ...]

    def sign(self) -> tuple[Any, ...]:
        """What Triton tells descriptors apart by."""
        return self.tensor.dtype, self.block

    def strides(self) -> list[int]:
        """The tensor's strides; those of axes of length 1 are what they would be were it dense there. PyTorch
        gives these any value, and the copy engine takes none that is no multiple of 16 bytes."""
        strides = list(self.tensor.stride())
        if 1 in self.tensor.shape:
            step = 1
            for axis in reversed(range(len(strides))):
                if self.tensor.shape[axis] == 1:
                    strides[axis] = step
                step = strides[axis] * self.tensor.shape[axis]
        return strides

    def made(self, base: Any = None) -> Any:
        """Triton's own object; `base` stands for the tensor where nothing is to be run."""
        kind, layout = _kind(self.tensor.dtype, self.block)
        shape = list(self.tensor.shape)
        return kind(self.tensor if base is None else base, shape, self.strides(), list(self.block), layout)


@functools.cache
def _kind(dtype: torch.dtype, block: tuple[int, ...]) -> tuple[Any, Any]:
    """Triton's class of descriptors, and how a block of this dtype lies in shared memory."""
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = getattr(language, str(dtype).removeprefix("torch."))
    return TensorDescriptor, language.NVMMASharedLayout.get_default_for(list(block), element)
