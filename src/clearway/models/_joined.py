"""Weights of several layers as one tensor of which they are views: in memory once, changes in place seen.

Nothing holds the whole but its parts. Whoever gives one of them other memory (moving, loading) parts it from
the others, and the whole is made anew when it is next asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from clearway.models._bound import plain, plain_weight


def joined(parts: Sequence[nn.Parameter]) -> Tensor:
    """The whole of some parameters along their first axis, of which each is a view from then on."""
    first = parts[0].data
    if not _side_by_side(parts):
        with kind_of(parts[0]), torch.no_grad():
            first = torch.cat([part.data for part in parts])
            for part, view in zip(parts, torch.split(first, [len(part) for part in parts]), strict=True):
                part.data = view
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def kind_of(weight: Tensor) -> AbstractContextManager[Any]:
    """The mode in which a weight was made, for what becomes its memory.

    An inference tensor has no version; with other memory no convolution takes it any more.
    """
    return torch.inference_mode(weight.is_inference())


def _side_by_side(parts: Sequence[nn.Parameter]) -> bool:
    """Whether the parts lie one after the other in one piece of memory."""
    first = parts[0]
    memory, address = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.data_ptr() != address or part.dtype != first.dtype or not part.is_contiguous():
            return False
        if part.untyped_storage().data_ptr() != memory:
            return False  # neighbours by chance
        address += part.nbytes
    return True


def ordinary(layer: Any) -> bool:
    """Whether a layer is a plain nn.Linear that may be computed without being called."""
    return plain(layer, nn.Linear) and plain_weight(layer.weight)


def alike(layers: Sequence[Any]) -> bool:
    """Whether ordinary layers go together: of one input, dtype, device and mode (inference or not), all with
    a bias or none."""
    first = layers[0]
    return all(
        layer.in_features == first.in_features
        and layer.weight.dtype == first.weight.dtype
        and layer.weight.device == first.weight.device
        and (layer.bias is None) == (first.bias is None)
        and layer.weight.is_inference() == first.weight.is_inference()
        and (first.bias is None or layer.bias.is_inference() == first.bias.is_inference())
        for layer in layers
    )


def unpack(layers: Sequence[Any]) -> None:
    """Gives weights memory of their own again, where they are parts of a larger tensor."""
    for layer in layers:
        for parameter in getattr(layer, "base_layer", layer).parameters(recurse=False):
            if parameter.data.untyped_storage().nbytes() != parameter.data.nbytes:
                with kind_of(parameter):
                    parameter.data = parameter.data.clone()
