"""The process that builds kernels for another which waits for them: see elsewhere.py.

It has no device, and has read PyTorch, Triton and the ops before it is asked; then each kernel is built by a
fork of its own, as many at once as there are cores, into Triton's cache. What a fork finds wrong is left to
the one who asked.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from clearway import ops
from clearway.ops import _on_paper, ahead, forks, selftest
from clearway.ops.elsewhere import Launch


def work(job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Builds a job's launches, telling of each by its number once it is done; one of none is for getting
    ready."""
    if "launches" not in job:
        get_ready()
        tell({"started": True})
        return
    from triton import knobs

    knobs.cache.dir = job["folder"]
    _on_paper.build_for(*job["target"])
    launches: list[Launch] = pickle.loads(base64.b64decode(job["launches"]))
    for number, done in forks.each([partial(built, one) for one in launches], job["most"]):
        if done:
            tell({"case": str(number)})


def get_ready() -> None:
    """Reads once what every fork needs."""
    ops.discover()
    forks.key_of_triton()
    with contextlib.suppress(ImportError):
        import_module("triton.experimental.gluon.language.nvidia.hopper")


def built(launch: Launch) -> bool:
    """Builds one launch, into Triton's cache; whether it could."""
    module, name, args, constants, loaded = launch
    kernel = getattr(import_module(module), name)
    return ahead.compiled(kernel.built(), args, constants, None, loaded)


def process() -> int:
    """The process itself."""
    return selftest.main(work)


if __name__ == "__main__":
    sys.exit(process())
