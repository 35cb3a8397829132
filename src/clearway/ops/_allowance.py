"""How many self-tests may run at once: by cores, and by the memory of the GPU that they share with a model.

Each is a process with a context and tensors of its own on the very device that a model is on or on its way
to. So no more are begun than there is room for: a part of what is free where a model may be coming, within a
limit no more than that leaves, and in a generation no more than its plan leaves. Where there is no room for
one, none is begun; what becomes of the implementation then verdicts.py says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from clearway import device
from clearway.device import Device

MOST = 8
"""Workers at once: their contexts wait for one another. Of 4, 6, 8 and 12 eight were done first (H200, 16
cores)."""
CASES_BYTES = 2**28  # what the small cases may take: a worker's allocator is kept to it
WORKER_BYTES = device.CONTEXT_BYTES + CASES_BYTES
"""What a worker takes of a GPU at most: its context and its cases."""
SHARE = 4
"""Workers take one part of so many of the GPU memory that is free: a model may be on its way there."""

_spare: ContextVar[int | None] = ContextVar("clearway_spare", default=None)


@contextmanager
def leaving(spare_bytes: int | None) -> Iterator[None]:
    """Within it self-tests take no more than so many bytes: the rest of what is free is promised. None: no
    such bound."""
    token = _spare.set(spare_bytes)
    try:
        yield
    finally:
        _spare.reset(token)


def most(kind: str, share: int = SHARE) -> int:
    """How many workers may be at work at once, those included that are; 0 where there is no room for one.

    They take no more than one of `share` parts of what is free, but one may take all of it.
    """
    count = max(min(cores() - 1, MOST), 1)
    if kind == "cpu":
        return count
    free = device.memory(tested(kind)).available_bytes
    spare = _spare.get()
    if spare is not None:
        free = min(free, spare)
    if free < WORKER_BYTES:
        return 0
    return max(min(count, free // (share * WORKER_BYTES)), 1)


def short(kind: str) -> bool:
    """Whether a GPU has less free than one worker may need, whatever limits there are: what fails then says
    nothing of an implementation."""
    return kind != "cpu" and device.memory(tested(kind)).available_bytes < WORKER_BYTES


def tested(kind: str) -> Device:
    """The device of a kind that kernels are tested on: the first."""
    return Device(kind, 0 if kind == "cuda" else None)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
