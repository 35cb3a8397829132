"""Whether weights that something was computed from still hold what they held.

A change in place raises a tensor's version, whoever makes it, except through `.data` or memory taken out of
PyTorch (PEFT merges an adapter through `.data`). So a few elements of each weight are compared as well,
spread over it: an adapter's product touches nearly all of a weight's elements. A change through `.data` that
spares all of those goes unseen; whoever makes one calls `execution.forget`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

PROBES = 8
"""Elements of each weight that are compared, at every call."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Unchanged:
    """Weights as they were at one moment; `holds` says whether they are still the same."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self._versions = [weight._version for weight in self._weights]
        views: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for weight in self._weights:
            if weight.numel():
                views[weight.dtype].append(_probe(weight.detach()))
        self._views = list(views.values())
        self._bits = [_bits(group) for group in self._views]

    def holds(self) -> bool:
        """Whether no version was raised and no probed element is another, to the bit."""
        return [weight._version for weight in self._weights] == self._versions and all(
            torch.equal(_bits(group), before) for group, before in zip(self._views, self._bits, strict=True)
        )


def refuse(weights: Sequence[Tensor]) -> str | None:
    """Why nothing can be said of these."""
    if any(weight.is_inference() for weight in weights):
        return "its weights were made under inference_mode, where no change of them is noticed"
    return None


def _probe(weight: Tensor) -> Tensor:
    """A view of some elements of it, spread over its memory."""
    count = weight.numel()
    dense = sorted(zip(weight.stride(), weight.shape, strict=True))
    expected = 1
    for stride, size in dense:
        if size > 1 and stride != expected:
            return (
                weight.flatten()[:: max(count // PROBES, 1)][:PROBES]
                if weight.is_contiguous()
                else weight[(0,) * weight.dim()].reshape(1)
            )
        expected *= size
    step = max((count - 1) // max(PROBES - 1, 1), 1)
    return weight.as_strided((min(PROBES, count),), (step,), weight.storage_offset())


def _bits(group: list[Tensor]) -> Tensor:
    """All of them in a row, as whole numbers: NaN is equal to itself."""
    return torch.cat(group).view(_BITS[group[0].element_size()])
