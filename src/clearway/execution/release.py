"""Memory that captured graphs hold between calls, given back; executors stay and capture anew."""

from __future__ import annotations

from torch import nn

from clearway.execution.executor import pools


def release(module: nn.Module) -> int:
    """Drops the graphs of a module; how many. Their memory is free once no other module has any."""
    count = 0
    for pool in pools(module):
        with pool.lock:
            count += len(pool.held)
            pool.clear()
    return count
