"""Brownian paths whose value at any two times follows from a seed alone: torchsde's numbers, drawn sparingly.

[low, high] is halved, and each half again, down to the grid of RESOLUTION_DIGITS decimals. An interval's
increment is halved by a Brownian bridge whose normal has a seed of its own, made of the path's seed, the
interval's place in its row and its depth. The increment over [first, last] is the sum of those of the largest
intervals between them, from left to right. Each step is rounded as torchsde 0.2.6 rounds it, so the values
are the same bits; but an interval is halved once for both its halves, and what a query used is kept for the
next one, whose times in samplers are one old and one new.
Source: behaviour of torchsde 0.2.6's BrownianTree (Li et al. 2020, arXiv:2001.01328; Kidger et al. 2021,
arXiv:2105.13493); O'Neill's seed_seq_fe as NumPy's SeedSequence has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RESOLUTION_DIGITS = 6  # torchsde's default tolerance, 1e-6: what k-diffusion's trees have
POOL_WORDS = 24  # of a path's SeedSequence
_WORD = 0xFFFFFFFF
_POOL = (0x43B0D7E5, 0x931E8875)  # NumPy's INIT_A, MULT_A
_MIX = (0xCA01F9DD, 0x4973F715)  # MIX_MULT_L, MIX_MULT_R
_STATE = (0x8B51F9DD, 0x58F38DED)  # INIT_B, MULT_B

Fill = Callable[[int, "Tensor", float], object]
Span = tuple[float, float, float]


class BrownianTree:
    """B paths side by side over [low, high], each from its own seed, N(0, t) after time t, float32.

    `shape` is one path's, `seeds` has one seed a path, from 0 on. `fill(seed, row, scale)` fills one path's
    memory with `scale` times N(0, 1); None: by torch's own generator on `device`. The increments that the
    latest query used are kept, at most four tensors of (B, *shape) for each of the
    log2((high - low) * 10**RESOLUTION_DIGITS) depths. Memory is used again: fresh memory costs the host as
    much as the arithmetic in it.
    """

    def __init__(
        self,
        low: float,
        high: float,
        seeds: Sequence[int],
        shape: Sequence[int],
        *,
        device: str | torch.device = "cpu",
        fill: Fill | None = None,
    ) -> None:
        import torch

        self._shape, self._device = (len(seeds), *shape), torch.device(device)
        self._fill = _filled_by_torch(self._device, math.prod(shape)) if fill is None else fill
        self._low, self._high = round(low, RESOLUTION_DIGITS), round(high, RESOLUTION_DIGITS)
        self._spare: list[Tensor] = []
        sequences = [np.random.SeedSequence(seed, pool_size=POOL_WORDS) for seed in seeds]
        self._pools = [int(sequence.pool[0]) for sequence in sequences]
        with torch.inference_mode():
            words = [int(sequence.generate_state(1)[0]) for sequence in sequences]
            whole = self._normal(words, math.sqrt(high - low))
        self._kept = {1: whole}  # increments of intervals; the halves of interval n are 2n and 2n + 1

    def increment(self, first: float, last: float) -> Tensor:
        """W(last) - W(first), (B, *shape), of times on the grid; 0 where last is not above first.

        Times outside the path count as its ends. It is an inference tensor, which is not to be written to
        outside of torch.inference_mode.
        """
        import torch

        first, last = (min(max(round(t, RESOLUTION_DIGITS), self._low), self._high) for t in (first, last))
        with torch.inference_mode():
            if not first < last:
                return torch.zeros(self._shape, dtype=torch.float32, device=self._device)
            parts, spans = self._parts(first, last)
            for node in self._to_halve(parts):
                self._halve(node, *spans[node])
            total = self._kept[parts[0]].clone()
            for node in parts[1:]:
                total.add_(self._kept[node])
        return total

    def _parts(self, first: float, last: float) -> tuple[list[int], dict[int, Span]]:
        """The largest intervals that make up [first, last], from left to right; what is halved for them."""
        spans: dict[int, Span] = {}

        def split(node: int, start: float, end: float) -> float:
            middle = round(0.5 * (end + start), RESOLUTION_DIGITS)
            spans[node] = start, middle, end
            return middle

        node, start, end = 1, self._low, self._high
        while (start, end) != (first, last):
            middle = split(node, start, end)
            if last <= middle:
                node, end = 2 * node, middle
            elif first >= middle:
                node, start = 2 * node + 1, middle
            else:
                break
        else:
            return [node], spans
        fork, at_fork, final = node, middle, end
        parts: list[int] = []
        node, end = 2 * fork, at_fork
        while start != first:
            middle = split(node, start, end)
            if first < middle:
                parts.append(2 * node + 1)
                node, end = 2 * node, middle
            else:
                node, start = 2 * node + 1, middle
        parts = [node, *reversed(parts)]
        node, start, end = 2 * fork + 1, at_fork, final
        while end != last:
            middle = split(node, start, end)
            if last > middle:
                parts.append(2 * node)
                node, start = 2 * node + 1, middle
            else:
                node, end = 2 * node, middle
        return [*parts, node], spans

    def _to_halve(self, parts: list[int]) -> list[int]:
        """What is yet to be halved for `parts`, parents first; if anything is, the rest is freed."""
        needed, order = {1}, list[int]()
        for node in parts:
            chain: list[int] = []
            while node not in self._kept and node not in needed:
                needed.update((node, node ^ 1))
                node >>= 1
                chain.append(node)
            needed.add(node)
            order += reversed(chain)
        if order:
            self._spare += [self._kept.pop(node) for node in self._kept.keys() - needed]
        return order

    def _halve(self, node: int, start: float, middle: float, end: float) -> None:
        """By a Brownian bridge: the left half has its share of the increment, and variance l r / (l + r)."""
        import torch

        left, right, reciprocal = middle - start, end - middle, 1 / (end - start)
        seeds = [_node_seed(pool, node) for pool in self._pools]
        whole, half = self._kept[node], self._normal(seeds, math.sqrt(left * right * reciprocal))
        rest = torch.mul(whole, left, out=self._empty()).mul_(reciprocal)
        half.add_(rest)
        self._kept[2 * node], self._kept[2 * node + 1] = half, torch.sub(whole, half, out=rest)

    def _normal(self, seeds: Sequence[int], scale: float) -> Tensor:
        drawn = self._empty()
        rows = drawn.unbind() if len(seeds) > 1 else (drawn,)
        for seed, row in zip(seeds, rows, strict=True):
            self._fill(seed, row, scale)
        return drawn

    def _empty(self) -> Tensor:
        import torch

        if self._spare:
            return self._spare.pop()
        return torch.empty(self._shape, dtype=torch.float32, device=self._device)


def _filled_by_torch(device: torch.device, count: int) -> Fill:
    """torch scales while it draws, but in double precision below 16 elements: then the bits are others."""
    import torch

    generator = torch.Generator(device)
    if count < 16 or device.type not in ("cpu", "cuda"):
        return lambda seed, row, scale: row.normal_(generator=generator.manual_seed(seed)).mul_(scale)
    return lambda seed, row, scale: row.normal_(0, scale, generator=generator.manual_seed(seed))


def _node_seed(pool: int, node: int) -> int:
    """First word of SeedSequence(entropy, spawn_key=(place in the row, depth), pool_size=POOL_WORDS).

    It depends on the pool's first word alone, which is `pool` once the entropy is mixed in: POOL_WORDS ** 2
    hashes so far, and POOL_WORDS for each word of the key, of which the first goes into the first word.
    """
    depth = node.bit_length() - 1
    place = node - (1 << depth)
    words = (place & _WORD, place >> 32, depth) if place >> 32 else (place, depth)
    for constant, word in zip(_KEY_CONSTANTS, words, strict=False):
        hashed = _hashed(word, constant, _POOL[1])
        pool = (pool * _MIX[0] - hashed * _MIX[1]) & _WORD
        pool ^= pool >> 16
    return _hashed(pool, *_STATE)


def _hashed(word: int, constant: int, factor: int) -> int:
    word = ((word ^ constant) * (constant * factor & _WORD)) & _WORD
    return word ^ word >> 16


_KEY_CONSTANTS = tuple(
    _POOL[0] * pow(_POOL[1], POOL_WORDS * (POOL_WORDS + word), 1 << 32) & _WORD for word in range(3)
)
