"""Memory that captured graphs hold between calls, given back; executors stay and capture anew."""

from __future__ import annotations

from torch import nn

from clearway.execution.executor import _BUILT
from clearway.execution.pool import Pool


def release(module: nn.Module) -> int:
    """Drops the graphs of a module; how many. Their memory is free once no other module has any."""
    built, count = module.__dict__.get(_BUILT), 0
    for pool in built.held.values() if built is not None else ():
        if isinstance(pool, Pool):
            with pool.lock:
                count += len(pool.graphs)
                pool.clear()
    return count
