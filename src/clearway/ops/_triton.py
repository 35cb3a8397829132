"""Triton, imported when a kernel is first launched: op files name their kernels without it."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import subprocess
import types
from collections.abc import Callable
from typing import Any

import torch

from clearway import device
from clearway.errors import one_line
from clearway.ops import ahead
from clearway.ops.state import BuildError

tl: Any = None
"""triton.language inside a kernel; op files import this name only so that it is one."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 16384  # elements of a row that one program keeps in registers


class Kernel:
    """A function in Triton's language; `launch` builds and runs it. `counts`: see `counting`."""

    def __init__(self, function: Callable[..., Any], counts: tuple[str, ...] = ()) -> None:
        self.function = function
        self.name = function.__name__
        self.counts = counts
        self._built: Any = None

    def built(self) -> Any:
        """The function as Triton's own object: compiled, or interpreted under TRITON_INTERPRET=1."""
        if self._built is None:
            jit, language = self.language()
            named = self.function.__globals__
            scope = {**named, **language}
            for name in self.function.__code__.co_names:
                if isinstance(named.get(name), Kernel):
                    scope[name] = named[name].built()
            copy = types.FunctionType(self.function.__code__, scope, self.name)
            copy.__annotations__ = inspect.get_annotations(self.function)
            copy.__module__, copy.__qualname__ = self.function.__module__, self.name
            self._built = jit(copy, do_not_specialize=list(self.counts))
        return self._built

    def language(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """What makes a function a kernel, and the modules that its text names."""
        import triton
        import triton.language

        return triton.jit, {"tl": triton.language}

    def launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Runs it on torch's current device and stream; within `ahead.build` it is only built.

        BuildError where it could not be built: no compiler, a version that refuses it, too little
        shared memory.
        """
        gathering = ahead.gathering()
        if gathering is not None:
            gathering.add(self, args, constants)
            return
        try:
            self.built()[grid](*self.prepared(args), **constants)
        except Exception as error:
            if not _is_build_failure(error):
                raise  # a fault of the device, or a bug: falling back would hide it
            raise BuildError(
                f"Triton could not build {self.name} ({type(error).__name__}: {one_line(error)})"
            ) from error

    def prepared(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as Triton takes them."""
        return args


def kernel(function: Callable[..., Any]) -> Kernel:
    """Makes a function in Triton's language a Kernel; imports nothing."""
    return Kernel(function)


def counting(*counts: str) -> Callable[[Callable[..., Any]], Kernel]:
    """As `kernel`, where the arguments called `counts` say how many there are and not where they lie.

    Whether such a number is 1 or a multiple of 16 tells Triton nothing that it could load wider by, so one
    variant serves all, and another size of a picture needs none built. Not for the axis along which memory is
    read.
    """
    return lambda function: Kernel(function, counts)


def _is_build_failure(error: Exception) -> bool:
    if isinstance(error, ImportError | OSError | subprocess.CalledProcessError):
        return True
    if any(kind.__name__ == "TritonError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in ("C compiler", "active drivers", "PTXAS", "ptxas")
    )


@functools.cache
def absent() -> str | None:
    """Why this machine cannot run Triton kernels; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return device.absent("cuda")


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def warps(elements: int) -> int:
    """Warps for a program that holds so many elements: at most 32 a thread, 1 to 16 warps."""
    return min(max(power_of_two(elements) // 1024, 1), 16)


def row_tile(width: int) -> tuple[int, int]:
    """(rows, padded width) of a tile of whole rows: about 2048 elements where rows are short."""
    block = power_of_two(width)
    return max(2048 // block, 1), block
