"""How much memory an implementation that materialises scores may take, by what the machine has now.

    attention_bytes = batch * heads * query_tokens * key_tokens * element_size
    estimated_peak  = 2.5 * attention_bytes
    budget          = min(10 % of total memory, 20 % of available memory, 1.5 GiB)

Over the budget the router takes what is bounded (attention's `streaming`). Memory is sampled once per
generation; the limit found is recorded and can be pinned, so that a repeat decides alike on a machine with
other programs open. On the CPU and on MPS it is the machine's memory, on CUDA the device's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clearway import device as machine
from clearway.device import Device, Memory

if TYPE_CHECKING:
    import torch

PEAK_FACTOR = 2.5  # scores, their softmax, and half of one more for what the allocator rounds up
CEILING_BYTES = 3 * 2**29
FRESH_S = 1.0  # outside a generation a sample serves for so long
LEAST_QUERIES = 128  # a chunk keeps so many query rows before it splits the keys: each split rescales


def attention_bytes(batch: int, heads: int, query_tokens: int, key_tokens: int, element_size: int) -> int:
    """Bytes of one matrix of scores."""
    return batch * heads * query_tokens * key_tokens * element_size


def estimated_peak(score_bytes: float) -> float:
    """Bytes that an implementation which materialises scores of `score_bytes` holds at its worst moment."""
    return PEAK_FACTOR * score_bytes


def limit(memory: Memory) -> float:
    """Bytes that may be taken: 10 % of the total, 20 % of what is available, at most 1.5 GiB."""
    return min(memory.total_bytes / 10, memory.available_bytes / 5, CEILING_BYTES)


@dataclass(slots=True)
class Sample:
    """The memory of one generation and what was decided by it.

    `largest_admitted` and `smallest_refused` are estimated peaks: any limit between them decides alike, which
    is when a graph captured under another sample still holds.
    """

    device: str
    total_bytes: int
    available_bytes: int
    limit_bytes: float
    pinned: bool = False
    largest_admitted: float = 0.0
    smallest_refused: float = math.inf

    def admits(self, peak: float) -> bool:
        """Whether `peak` bytes are within the limit; recorded."""
        if peak <= self.limit_bytes:
            self.largest_admitted = max(self.largest_admitted, peak)
            return True
        self.smallest_refused = min(self.smallest_refused, peak)
        return False

    def holds(self, limit_bytes: float) -> bool:
        """Whether what was decided here would be decided the same under another limit."""
        return self.largest_admitted <= limit_bytes < self.smallest_refused

    def follow(self, other: Sample) -> None:
        """Takes over what was decided under another sample: a captured graph decided for its replays."""
        self.largest_admitted = max(self.largest_admitted, other.largest_admitted)
        self.smallest_refused = min(self.smallest_refused, other.smallest_refused)

    def sentence(self, peak: float) -> str:
        """Why `peak` bytes are too many."""
        return (
            f"it would hold about {peak / 2**20:,.0f} MiB of scores and the budget is "
            f"{self.limit_bytes / 2**20:,.0f} MiB"
        )

    def record(self) -> dict[str, float | bool | str | None]:
        """What metadata keeps: the limit to pin for a repeat, and what it decided."""
        refused = None if math.isinf(self.smallest_refused) else self.smallest_refused
        return {
            "device": self.device,
            "limit_bytes": self.limit_bytes,
            "pinned": self.pinned,
            "over_budget": refused is not None,
            "largest_admitted_bytes": self.largest_admitted,
            "smallest_refused_bytes": refused,
        }


_current: ContextVar[Sample | None] = ContextVar("clearway_budget", default=None)
_outside: dict[torch.device, tuple[float, Sample]] = {}


def sample(device: Device, pinned_bytes: float | None = None) -> Sample:
    """The memory of `device` now, with the limit it sets, or with the limit of an earlier generation."""
    memory = machine.memory(device)
    chosen = limit(memory) if pinned_bytes is None else float(pinned_bytes)
    return Sample(
        str(device), memory.total_bytes, memory.available_bytes, chosen, pinned=pinned_bytes is not None
    )


@contextmanager
def sampled(device: Device, pinned_bytes: float | None = None) -> Iterator[Sample]:
    """Within it memory is not sampled again: one generation decides alike from its first step to its last."""
    taken = sample(device, pinned_bytes)
    token = _current.set(taken)
    try:
        yield taken
    finally:
        _current.reset(token)


def current(device: torch.device) -> Sample:
    """The sample of the generation at work; outside of one a sample of `device` that is a second old at
    most."""
    inside = _current.get()
    if inside is not None:
        return inside
    now = time.monotonic()
    kept = _outside.get(device)
    if kept is None or now - kept[0] > FRESH_S:
        kept = now, sample(Device(device.type, device.index))
        _outside[device] = kept
    return kept[1]


def forget() -> None:
    """Drops samples taken outside of a generation."""
    _outside.clear()


def chunks(
    limit_bytes: float, batch_heads: int, query_tokens: int, key_tokens: int, element_size: int
) -> tuple[int, int]:
    """(query, key) tokens of one chunk whose scores stay within the limit; (1, 1) where nothing would.

    Queries are split first, since that costs nothing; keys only below 128 queries, since each split of them
    rescales what was summed before.
    """
    pairs = int(limit_bytes / (PEAK_FACTOR * max(batch_heads, 1) * element_size))
    queries = min(query_tokens, pairs // max(key_tokens, 1))
    if queries >= max(min(query_tokens, LEAST_QUERIES), 1):
        return queries, max(key_tokens, 1)
    queries = max(1, min(query_tokens, LEAST_QUERIES, pairs))
    return queries, max(1, min(key_tokens, pairs // queries))
