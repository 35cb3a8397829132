"""Normal noise as an NVIDIA GPU makes it, on any machine: the WebUI's random number source "NV".

Philox4x32 with 10 rounds gives thread i of a launch four words; the first two make one normal by Box and
Muller. The counter is (draw, 0, i, 0), the key the seed, so the values are those of torch.randn on CUDA while
a picture has no more elements than the GPU has threads at once, up to the last bits of sine and logarithm.
Source: Salmon et al. 2011 (Random123); cuRAND's curand_normal; behaviour of the WebUI v1.10.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)


def philox(counter: np.ndarray, key: Sequence[int]) -> np.ndarray:
    """Philox4x32-10: counter uint32 (4, n), key two words -> uint32 (4, n)."""
    a, b, c, d = (word.astype(np.uint64) for word in counter)
    k0, k1 = (np.uint64(word) for word in key)
    for number in range(ROUNDS):
        if number:
            k0, k1 = (k0 + np.uint64(WEYL[0])) & _LOW, (k1 + np.uint64(WEYL[1])) & _LOW
        first, second = a * np.uint64(MULTIPLIERS[0]), c * np.uint64(MULTIPLIERS[1])
        a, b, c, d = (
            (second >> np.uint64(32)) ^ b ^ k0,
            second & _LOW,
            (first >> np.uint64(32)) ^ d ^ k1,
            first & _LOW,
        )
    return np.stack((a, b, c, d)).astype(np.uint32)


class Generator:
    """One picture's source: every draw continues where the last one ended."""

    def __init__(self, seed: int) -> None:
        self.seed, self.drawn = seed, 0

    def normal(self, shape: Sequence[int]) -> Tensor:
        """The next draw, N(0, 1), float32 on the CPU."""
        import torch

        count = math.prod(shape)
        counter = np.zeros((4, count), np.uint32)
        counter[0], counter[2] = self.drawn, np.arange(count, dtype=np.uint32)
        self.drawn += 1
        x, y, _, _ = philox(counter, (self.seed & 0xFFFFFFFF, self.seed >> 32)).astype(np.float64)
        radius = np.sqrt(-2 * np.log(x * 2.0**-32 + 2.0**-33))
        angle = 2 * math.pi * (y * 2.0**-32 + 2.0**-33)
        return torch.from_numpy((radius * np.sin(angle)).astype(np.float32)).reshape(*shape)
