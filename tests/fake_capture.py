"""A stand-in for CUDA's graphs that runs on any device: what a real one bakes in, it keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clearway.ops import contract


class Recorder:
    """Captures by keeping the call: a replay does it again, into the same output."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.warm_ups, self.captures = error, 0, 0
        self.lock = threading.RLock()

    def absent(self, device: torch.device) -> str | None:
        return None

    def enter(self, buffers: Callable[[], Iterable[torch.Tensor]]) -> None:
        pass

    def warm_up(self, run: Callable[[], Any], times: int) -> Any:
        for _ in range(times):
            output = run()
        self.warm_ups += times
        return output

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.captures += 1
        if self.error is not None:
            raise self.error
        output, frame = run(), copy_context()  # the buffers that a real graph would have baked in

        def replay() -> None:
            fresh = frame.copy().run(uncounted, run)
            for mine, new in zip(pytree.tree_leaves(output), pytree.tree_leaves(fresh), strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(new)

        return replay, output


def uncounted(run: Callable[[], Any]) -> Any:
    """A graph on a device runs no Python, which alone counts ops."""
    with contract.recording({}):
        return run()
