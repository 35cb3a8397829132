"""Triton kernels built before they are needed, all at once instead of one after the other.

Which variants a network launches shows only when it runs: shapes, strides and alignments decide. So it is run
once with every launch of ours left out; each distinct one is built meanwhile, by threads, since most of the
time goes to the code generator, the assembler and the C compiler, none of which hold Python's lock. What that
run computes is thrown away.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearway.ops import state
from clearway.ops._allowance import cores
from clearway.ops._described import Described

MOST = 16  # threads

Calls = dict[tuple[str, tuple[Any, ...]], None]
"""Distinct calls of ops in order: the op's name, and its arguments, tensors as Shaped."""

_gathering: ContextVar[Gathering | None] = ContextVar("clearway_gathering", default=None)
_built, _seconds = 0, 0.0


class Like:
    """Stands for a tensor in what Triton asks of one before it builds: its dtype and where it lies."""

    __slots__ = ("address", "dtype")

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.address = tensor.dtype, tensor.data_ptr()

    def data_ptr(self) -> int:
        """Its address."""
        return self.address


class Shaped(NamedTuple):
    """What is known of a tensor without it; `offset` is how many elements past a multiple of 16 bytes."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> Shaped:
        """A tensor's."""
        name = str(tensor.dtype).removeprefix("torch.")
        past = tensor.data_ptr() % 16 // tensor.element_size()
        return cls(name, tuple(tensor.shape), tuple(tensor.stride()), past)


class Gathering:
    """The distinct launches of a run, each given to a thread that builds it; `calls` takes those of ops."""

    def __init__(self, threads: int | None = None, calls: Calls | None = None) -> None:
        self.calls = calls
        self.known = False
        """Whether somebody else builds what is added now: it is not built here, now or later."""
        self._threads = ThreadPoolExecutor(threads or max(min(cores(), MOST), 2), "clearway-build")
        self._seen: set[Any] = set()
        self._index = torch.cuda.current_device() if torch.cuda.is_available() else None

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Builds what `kernel.launch(grid, *args, **constants)` would run, unless it is under way."""
        names = kernel.function.__code__.co_varnames
        signs = [_sign(arg, name in kernel.counts) for arg, name in zip_longest(args, names[: len(args)])]
        key = (kernel, tuple(signs), tuple(constants.items()))
        if key in self._seen:
            return
        self._seen.add(key)
        if self.known:
            return
        with contextlib.suppress(Exception):  # why it cannot be built the launch itself will say
            jit = kernel.built()
            _ = jit.cache_key, jit.device_caches[self._index]  # made here, once: threads would make several
            given = [_like(arg) for arg in args]
            self._threads.submit(_build, jit, given, constants, self._index)

    def note(self, op: str, args: tuple[Any, ...]) -> None:
        """Takes down a call of an op, or a question which way it would take, where anybody wants to know."""
        if self.calls is not None:
            described = tuple(Shaped.of(arg) if isinstance(arg, Tensor) else arg for arg in args)
            with contextlib.suppress(TypeError):  # of a list, which ops on images have none of
                self.calls[op, described] = None

    def wait(self) -> None:
        """Comes back when all is built."""
        self._threads.shutdown()


def gathering() -> Gathering | None:
    """What takes launches now instead of the device; None where they are to be run."""
    return _gathering.get()


def build(
    run: Callable[[], Any],
    threads: int | None = None,
    calls: Calls | None = None,
    known: Callable[[], Any] = bool,
) -> int:
    """Builds the kernels that `run()` launches on torch's current device, by calling it once with launches
    left out; how many there were. `calls` takes down which ops were called with which arguments; `known` is
    called once they all are, before this waits for what is being built.

    `run` must not keep what it computes. An error that comes of the values it is given here is passed over;
    faults of the device, and want of memory, are not.
    """
    global _built, _seconds
    began, made = time.monotonic(), Gathering(threads, calls)
    token = _gathering.set(made)
    try:
        try:
            with state.trusting():  # nothing of ours is launched, so nothing need be known of it yet
                run()
        except (ArithmeticError, AssertionError, LookupError, ValueError):
            pass
        finally:
            _gathering.reset(token)
        with contextlib.suppress(Exception):  # what somebody else begins of it is not worth this call
            known()
    finally:
        made.wait()
        _built, _seconds = _built + len(made), _seconds + time.monotonic() - began
    return len(made)


def times() -> dict[str, float]:
    """Of this process: variants met in such runs, and the seconds they took."""
    return {"variants": _built, "seconds": round(_seconds, 3)}


def _sign(arg: Any, counts: bool = False) -> Any:
    """What Triton tells arguments apart by: dtype and alignment; whole numbers by width, and by 1 and by 16
    unless the argument only counts."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, Described):
        return arg.sign()
    if isinstance(arg, int) and not isinstance(arg, bool):
        told = (False, False) if counts else (arg == 1, arg % 16 == 0)
        return int, *told, -(2**31) <= arg < 2**31, arg < 2**63
    return type(arg) if isinstance(arg, float) else arg


def _like(arg: Any) -> Any:
    if isinstance(arg, Described):
        return arg.made(Like(arg.tensor))
    return Like(arg) if isinstance(arg, Tensor) else arg


def _build(jit: Any, args: list[Any], constants: dict[str, Any], index: int | None) -> None:
    with contextlib.suppress(Exception), contextlib.ExitStack() as within:
        if index is not None:
            within.enter_context(torch.cuda.device(index))
        made = jit.warmup(*args, grid=(1,), **constants)
        _ = made.run  # loads it, and builds what launches it
