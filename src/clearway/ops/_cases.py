"""Inputs for the ops' cases: seeded, float32, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0, mean: float = 0.0, deviation: float = 1.0) -> Tensor:
    """Normally distributed numbers; without storage inside `with torch.device("meta")`."""
    if torch.get_default_device().type == "meta":
        return torch.empty(shape)
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator).mul_(deviation).add_(mean)


def loose(x: Tensor) -> Tensor:
    """The same tensor whose axes of length 1 have the stride 1, which PyTorch may give them in any layout."""
    return x.as_strided(x.shape, [1 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)])
