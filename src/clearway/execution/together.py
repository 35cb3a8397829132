"""Values held for a graph that are linear layers' products of one input, made by one call of an op.

One by one a prompt's keys and values, 32 products in SD 1.x and 140 in SDXL, keep a device waiting for the
host before the first step of each picture. Together they lie in one piece of memory, of which each is a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearway.ops.grouped_linear import grouped_linear

LIMIT_BYTES = 2**26
"""Of one group: what the op gives lies beside it for a moment."""


@dataclass(slots=True, eq=False)
class Together:
    """Products of `source` with `weights`, held under `keys`; `whole` is what the op gives."""

    keys: tuple[Any, ...]
    source: Tensor
    weights: list[Tensor]
    whole: Tensor

    def make(self) -> None:
        """Makes them anew, of what the source is now."""
        with torch.no_grad():
            self.whole.copy_(grouped_linear(self.source, self.weights))


def groups(
    source: Tensor, held: Iterable[tuple[Any, Sequence[Tensor], Sequence[Tensor]]]
) -> tuple[list[Together], dict[Any, tuple[Tensor, ...]]]:
    """(groups, their parts by key) of the products (key, weights, values) of one source.

    Parts have the shapes of the values and not yet what they are. One that would be alone stays as it is, and
    so does what is not the plain product that it is said to be.
    """
    runs: list[list[tuple[Any, Sequence[Tensor], Sequence[Tensor]]]] = [[]]
    size = 0
    for key, weights, values in held:
        if not _products(source, weights, values):
            continue
        bytes_ = sum(value.nbytes for value in values)
        if runs[-1] and size + bytes_ > LIMIT_BYTES:
            runs.append([])
            size = 0
        runs[-1].append((key, weights, values))
        size += bytes_
    made, parts = [], dict[Any, tuple[Tensor, ...]]()
    for run in runs:
        if len(run) < 2:
            continue
        every = [value for _, _, values in run for value in values]
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.empty(
                sum(value.numel() for value in every), dtype=source.dtype, device=source.device
            )
            pieces = iter(torch.split(whole, [value.numel() for value in every]))
            parts |= {
                key: tuple(next(pieces).view(value.shape) for value in values) for key, _, values in run
            }
        weights = [weight for _, several, _ in run for weight in several]
        made.append(Together(tuple(key for key, _, _ in run), source, weights, whole))
    return made, parts


def _products(source: Tensor, weights: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether each value can be the product of the source with the weight in its place."""
    return len(weights) == len(values) and all(
        weight.dim() == 2
        and value.shape == (*source.shape[:-1], len(weight))
        and value.is_contiguous()
        and value.dtype == weight.dtype == source.dtype
        and value.device == weight.device == source.device
        for weight, value in zip(weights, values, strict=True)
    )
