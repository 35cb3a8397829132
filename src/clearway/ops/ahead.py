"""Triton kernels built before they are needed, all at once instead of one after the other.

Which variants a network launches shows only when it runs: shapes, strides and alignments decide. So it is run
once with every launch of ours left out, and what that computes is thrown away. Each distinct launch is built
then, by threads and, where there will be many, by another process (elsewhere.py). Not during the run: every
operation of PyTorch lets Python's lock go and would wait for it behind the threads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearway.ops import elsewhere, forks, state
from clearway.ops._allowance import cores
from clearway.ops._described import Described

MOST = 16  # threads
FEW = 4  # kernels that are not worth asking another process for
BESIDE = 2  # threads that build while that process is getting ready

Calls = dict[tuple[str, tuple[Any, ...]], None]
"""Distinct calls of ops in order: the op's name, and its arguments, tensors as Shaped."""

_gathering: ContextVar[Gathering | None] = ContextVar("clearway_gathering", default=None)
_under_way: dict[Any, Future[None]] = {}
"""What threads of this process build or have built, whoever asked for it first."""
_lock = threading.Lock()
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
    """The distinct launches of a run, for threads to build; `calls` takes those of ops."""

    def __init__(self, threads: int | None = None, calls: Calls | None = None) -> None:
        self.calls = calls
        self.known = False
        """Whether somebody else builds what is added now: it is not built here, now or later."""
        self._threads = threads or max(min(cores(), MOST), 2)
        self._seen: set[Any] = set()
        self._launchers: set[Any] = set()
        self._left: list[tuple[Any, _Build]] = []
        self._waited: list[Future[None]] = []
        self._index = torch.cuda.current_device() if torch.cuda.is_available() else None

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Takes down what `kernel.launch(grid, *args, **constants)` would run, to be built."""
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
            what = _Build(kernel, jit, [_like(arg) for arg in args], constants, self._index)
            launcher = kernel, tuple(map(_launched, signs))
            what.first = launcher not in self._launchers
            self._launchers.add(launcher)
            self._left.append(((jit, self._index, *key[1:]), what))

    def note(self, op: str, args: tuple[Any, ...]) -> None:
        """Takes down a call of an op, or a question which way it would take, where anybody wants to know."""
        if self.calls is not None:
            described = tuple(Shaped.of(arg) if isinstance(arg, Tensor) else arg for arg in args)
            with contextlib.suppress(TypeError):  # of a list, which ops on images have none of
                self.calls[op, described] = None

    def begin(self) -> None:
        """Has threads build what was taken down, but for what others in this process have begun; comes back
        at once."""
        new = []
        with _lock:
            for place, one in self._left:
                if place not in _under_way:
                    _under_way[place] = one.future
                    new.append(one)
                self._waited.append(_under_way[place])
        self._left.clear()
        if new:
            try:
                threading.Thread(
                    target=_all, args=(new, self._threads), name="clearway-build", daemon=True
                ).start()
            except RuntimeError:  # no thread can be had
                _all(new, 1)

    def wait(self) -> None:
        """Comes back when all that was begun is built, by whomever it was begun."""
        futures.wait(self._waited)


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
    try:
        _gather(run, made)
        made.begin()
        with contextlib.suppress(Exception):  # what somebody else begins of it is not worth this call
            known()
    finally:
        made.wait()
        _built, _seconds = _built + len(made), _seconds + time.monotonic() - began
    return len(made)


def taken_down(run: Callable[[], Any]) -> list[Callable[[], bool]]:
    """What builds the kernels that `run()` launches, one each, for forks; those that build what launches
    others too come first."""
    made = Gathering()
    _gather(run, made)
    return [partial(one, one.first) for _, one in sorted(made._left, key=lambda left: not left[1].first)]


def begin(run: Callable[[], Any]) -> int:
    """As `build`, without waiting for it; whoever needs one of these kernels later does."""
    made = Gathering()
    _gather(run, made)
    made.begin()
    return len(made)


def _gather(run: Callable[[], Any], made: Gathering) -> None:
    token = _gathering.set(made)
    try:
        with state.trusting():  # nothing of ours is launched, so nothing need be known of it yet
            run()
    except (ArithmeticError, AssertionError, LookupError, ValueError):
        pass
    finally:
        _gathering.reset(token)


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


def _launched(sign: Any) -> Any:
    """What of a sign decides which C function launches a kernel: not where an argument lies."""
    match sign:
        case (kind, one, _, *widths) if kind is int:
            return kind, one, *widths
        case (dtype, bool()):
            return dtype
    return sign


def _like(arg: Any) -> Any:
    if isinstance(arg, Described):
        return arg.made(Like(arg.tensor))
    return Like(arg) if isinstance(arg, Tensor) else arg


class _Build:
    """One kernel for one kind of arguments, to be built; `future` is done when it is, or cannot be."""

    def __init__(
        self, kernel: Any, jit: Any, args: list[Any], constants: dict[str, Any], index: int | None
    ) -> None:
        self._kernel, self._what, self.index = kernel, (jit, args, constants, index), index
        self.future, self._turn, self._built = Future[None](), threading.Lock(), False
        self.first = True
        """Whether it is the first of those that are launched by the same C function."""

    def __call__(self, loaded: bool = True) -> bool:
        """Builds it, once; whether it could. Not once the main thread has ended: a program that goes on in
        other threads then has each kernel built when it is launched. `loaded`: see `compiled`."""
        with self._turn:
            if not self.future.done():
                try:
                    self._built = threading.main_thread().is_alive() and compiled(*self._what, loaded)
                finally:
                    self.future.set_result(None)
        return self._built

    def launch(self) -> elsewhere.Launch | None:
        """What another process is told of it; None of a kernel that is nothing of a module."""
        _, args, constants, _ = self._what
        module = self._kernel.function.__module__
        there = vars(sys.modules.get(module, type)).items()
        name = next((name for name, value in there if value is self._kernel), None)
        return None if name is None else (module, name, args, constants, self.first)


def _all(new: list[_Build], threads: int) -> None:
    """Builds them by threads; where there are many and there is a process for it, most are built by that into
    Triton's cache, where threads find them."""
    forks.key_of_triton()
    left = deque(new)
    builder = elsewhere.builder() if len(new) > FEW else None
    with (
        contextlib.suppress(RuntimeError, MemoryError),  # no more threads can be had, or memory
        ThreadPoolExecutor(threads, "clearway-build") as pool,
    ):
        if builder is not None:
            for _ in range(BESIDE):
                pool.submit(_some, left, builder)
            if builder.ready(elsewhere.PATIENCE_S):
                _asked(builder, list(_taken(left)), pool)
        for one in _taken(left):
            pool.submit(one)
    for one in new:  # what is left then; somebody waits for every one
        with contextlib.suppress(Exception):
            one()


def _asked(builder: elsewhere.Builder, taken: list[_Build], pool: ThreadPoolExecutor) -> None:
    """Has the process build them, and threads read each that is done and build what it does not."""
    told = {number: launch for number, one in enumerate(taken) if (launch := one.launch()) is not None}
    numbers, done = sorted(told, key=lambda number: not taken[number].first), set[int]()

    def read(number: int) -> None:
        if number not in done and number < len(taken):
            done.add(number)
            pool.submit(taken[number])

    with contextlib.suppress(Exception), _on(taken[0].index):  # what cannot be told, say
        builder.build([told[number] for number in numbers], lambda place: read(numbers[place]))
    for number in range(len(taken)):
        read(number)


def _some(left: deque[_Build], builder: elsewhere.Builder) -> None:
    """Builds one after the other until there is somebody else for them."""
    while not builder.ready(0.0):
        one = next(_taken(left), None)
        if one is None:
            return
        one()


def _taken(left: deque[_Build]) -> Iterator[_Build]:
    """What is left, taken by one of several threads."""
    with contextlib.suppress(IndexError):
        while True:
            yield left.popleft()


def compiled(
    jit: Any, args: list[Any], constants: dict[str, Any], index: int | None, loaded: bool = True
) -> bool:
    """Builds a kernel for such arguments and such a device (None: the one there is on paper); whether it
    could, and why not its launch will say. `loaded` has a C compiler build what launches it too, which takes
    as long as the kernel, and which kernels that differ by constants and alignment share."""
    with contextlib.suppress(Exception), _on(index):
        made = jit.warmup(*args, grid=(1,), **constants)
        if loaded:
            with contextlib.suppress(Exception):  # where there is no device
                _ = made.run
        return True
    return False


def _on(index: int | None) -> Any:
    return contextlib.nullcontext() if index is None else torch.cuda.device(index)
