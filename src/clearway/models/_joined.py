"""Weights of several layers as one tensor of which they are views: in memory once, changes in place seen.

Whoever gives a weight other memory (moving, loading) parts it from the whole, which is then made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearway.models._bound import plain, plain_weight


class Joined:
    """The whole of some parameters, along their first axis; made at first use, again once they lie elsewhere.

    A copy of it, by deepcopy or pickle, starts without: its parameters are other ones.
    """

    def __init__(self) -> None:
        self._whole: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Joined, ()

    def __deepcopy__(self, memo: Any) -> Joined:
        return Joined()

    def get(self, parts: Sequence[nn.Parameter]) -> Tensor:
        """The whole, of which each part is from now on a view."""
        if self._whole is None or not _are_parts(parts, self._whole):
            with torch.inference_mode(False), torch.no_grad():
                self._whole = torch.cat([part.data for part in parts])
                for part, view in zip(
                    parts, torch.split(self._whole, [len(part) for part in parts]), strict=True
                ):
                    part.data = view
        return self._whole


def _are_parts(parts: Sequence[nn.Parameter], whole: Tensor) -> bool:
    address, size = whole.data_ptr(), whole.element_size()
    for part in parts:
        if part.dtype != whole.dtype or part.data_ptr() != address:
            return False
        address += part.numel() * size
    return address == whole.data_ptr() + whole.numel() * size


def ordinary(layer: Any) -> bool:
    """Whether a layer is a plain nn.Linear that may be computed without being called."""
    return plain(layer, nn.Linear) and plain_weight(layer.weight)


def alike(layers: Sequence[Any]) -> bool:
    """Whether ordinary layers go together: one input, one dtype, one device, all with a bias or none."""
    first = layers[0]
    return all(
        layer.in_features == first.in_features
        and layer.weight.dtype == first.weight.dtype
        and layer.weight.device == first.weight.device
        and (layer.bias is None) == (first.bias is None)
        for layer in layers
    )


def unpack(layers: Sequence[Any]) -> None:
    """Gives weights memory of their own again, where they are parts of a larger tensor."""
    for layer in layers:
        for parameter in getattr(layer, "base_layer", layer).parameters(recurse=False):
            if parameter.data.untyped_storage().nbytes() != parameter.data.nbytes:
                parameter.data = parameter.data.clone()
