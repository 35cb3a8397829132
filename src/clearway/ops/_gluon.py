"""Gluon, Triton's language one level lower: kernels that say themselves who copies, who multiplies and when.

For Hopper's copy engine (TMA) and products of warpgroups, which Triton's own schedule leaves half idle where
a tile is not a power of two. Gluon is experimental, and nothing interprets it: its kernels are compiled
everywhere and tested on the device that they are for; one that another version of Triton does not build is
left out, and said.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from clearway.ops import _triton
from clearway.ops._described import Described
from clearway.ops._triton import Kernel

gl: Any = None
"""triton.experimental.gluon.language inside a kernel; op files import this name only so that it is one."""
hopper: Any = None
"""triton.experimental.gluon.language.nvidia.hopper inside a kernel."""

HOPPER = (9, 0)
PROCESSORS = 132
"""Multiprocessors where there is no device to ask: those of an H100 or H200."""


class GluonKernel(Kernel):
    """A function in Gluon's language; of `launch`'s arguments those Described become descriptors."""

    def language(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """What makes a function a kernel, and the modules that its text names."""
        from triton.experimental import gluon
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia import hopper as for_hopper

        return gluon.jit, {"gl": language, "hopper": for_hopper}

    def prepared(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as Triton takes them."""
        return tuple(arg.made() if isinstance(arg, Described) else arg for arg in args)


def counting(*counts: str) -> Callable[[Callable[..., Any]], GluonKernel]:
    """Makes a function in Gluon's language a kernel; `counts` as in `_triton.counting`."""
    return lambda function: GluonKernel(function, counts)


@functools.cache
def absent() -> str | None:
    """Why this machine cannot run Gluon kernels for Hopper; None where it can.

    cuda:0 decides: self-tests run there, and one that refuses every case would be held against a Hopper
    beside it. CUDA_VISIBLE_DEVICES can put that one first.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton does not interpret Gluon"
    why = _triton.absent()
    if why is not None:
        return why
    if importlib.util.find_spec("triton.experimental") is None or not _gluon_there():
        return "this version of Triton has no Gluon"
    if torch.version.hip is not None:  # whose gfx90a is of "capability" 9.0 too
        return "it is for Hopper, and this PyTorch is for ROCm"
    found = torch.cuda.get_device_capability(0)
    if found != HOPPER:
        return (
            f"it is for Hopper, compute capability 9.0; cuda:0, where kernels are tested, has"
            f" {found[0]}.{found[1]}"
        )
    return None


def _gluon_there() -> bool:
    return importlib.util.find_spec("triton.experimental.gluon") is not None


@functools.cache
def processors(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
