"""The dtypes, shapes and strides of many tensors, compared at once.

Other memory can be given to a tensor through `.data` without a version being raised, and the same memory in
another order, or read as another dtype, without an address changing. Asking each tensor for all three takes
Python half a microsecond; torch has one call that compares them for a list of tensors (what torch.compile
guards its code by), private as it is. Where that is missing, or says no, each tensor is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
_REMADE = 8
"""How often torch's answer is prepared anew, where it said no for a reason of its own."""


class Layouts:
    """How tensors lie in their memory; `hold` says whether they still do. Reads no values."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._were = list(map(_layout, self._tensors))
        plain = [_ordinary(tensor) for tensor in self._tensors]
        self._plain = [tensor for tensor, is_plain in zip(self._tensors, plain, strict=True) if is_plain]
        self._other = [tensor for tensor, is_plain in zip(self._tensors, plain, strict=True) if not is_plain]
        self._others_were = list(map(_layout, self._other))
        self._guards: dict[tuple[bool, bool], Any] = {}
        self._left = _REMADE

    def hold(self) -> bool:
        """Whether every tensor has the dtype, the shape and the strides it had."""
        mode = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        guard = self._guards.get(mode)
        if guard is not None and guard.check(*self._plain):
            return not self._other or list(map(_layout, self._other)) == self._others_were
        if list(map(_layout, self._tensors)) != self._were:
            return False
        if self._left:  # the first time in this mode, or something that is nobody's layout
            self._left -= 1
            self._guards[mode] = _guard(self._plain)
        return True


def _guard(tensors: Sequence[Tensor]) -> Any:
    """What compares these as they are in the modes that are on; None where torch has it not."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],  # type: ignore[misc]
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],  # type: ignore[misc]
        )
    except (ImportError, TypeError, RuntimeError):
        return None


def _ordinary(tensor: Tensor) -> bool:
    return type(tensor) in _ORDINARY and tensor.layout is torch.strided and not tensor.is_nested


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    try:
        return tensor.dtype, tensor.shape, tensor.stride()
    except (RuntimeError, NotImplementedError):  # sparse, or of a class without strides
        return tensor.dtype, tensor.layout
