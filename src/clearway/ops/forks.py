"""Processes forked from one that has read PyTorch already, in place of ones that each read it themselves.

A first picture begins a dozen self-tests, a process each, and two that build kernels; reading PyTorch so many
times at once takes seconds of every core. Where that is to be expected the mother (_mother.py) is started
first, and `forked` gives what stands for a `subprocess.Popen`. It gives None where there is no mother, where
she takes too long, and once anything forked from her came to no good end, which is believed of nothing until
a process started afresh says the same. Linux only.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LARGEST = 2**18
"""Bytes of a message: a module's name and an environment."""
READY_S = 15.0
"""How long anybody waits for her to be ready."""
SPARE_S = 120.0
"""How long she is kept."""

_lock = threading.Lock()
_keyed = threading.Lock()
_mother: Mother | None = None


class Child:
    """A process forked from her, as a `subprocess.Popen` with three pipes of text."""

    def __init__(self, streams: tuple[int, int, int]) -> None:
        self.stdin = os.fdopen(streams[0], "w", encoding="utf-8")
        self.stdout = os.fdopen(streams[1], encoding="utf-8", errors="replace")
        self.stderr = os.fdopen(streams[2], encoding="utf-8", errors="replace")
        self.pid = 0
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        """It has ended so."""
        if self.returncode is None:
            self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        """How it ended; None while it is at work."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As poll, once it has ended; subprocess.TimeoutExpired where it has not by then."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


class Mother:
    """The process, and those forked from it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answered = threading.Condition()
        self._ready = threading.Event()
        self._numbers = itertools.count()
        self._asked: dict[int, Child] = {}
        """Those that she was asked for and has not told of, by number; the others by process."""
        self._children: dict[int, Child] = {}
        self.gone = False
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "clearway.ops._mother", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment({"OMP_NUM_THREADS": "1"}),
                    start_new_session=True,
                )
            threading.Thread(target=self._listen, name="clearway-mother", daemon=True).start()
            timer = threading.Timer(SPARE_S, self.close)
            timer.daemon = True
            timer.start()
        except BaseException:
            self._line.close()  # who is there to hear it ends
            raise

    def fork(self, module: str, environment: dict[str, str]) -> Child | None:
        """A process that runs `process()` of a module in such an environment; None where she cannot."""
        if not self._ready.wait(READY_S) or self.gone:
            return None
        with contextlib.ExitStack() as hers, contextlib.ExitStack() as mine:
            theirs, ours = list[int](), list[int]()
            try:
                for number in range(3):
                    read, write = os.pipe()
                    keep, give = (write, read) if number == 0 else (read, write)
                    mine.callback(os.close, keep)
                    hers.callback(os.close, give)
                    ours.append(keep)
                    theirs.append(give)
            except OSError:  # no more of them can be had
                return None
            mine.pop_all()
            child = Child((ours[0], ours[1], ours[2]))
            if not self._begun(child, module, environment, theirs):
                for stream in (child.stdin, child.stdout, child.stderr):
                    with contextlib.suppress(OSError):
                        stream.close()
                return None
            return child

    def _begun(self, child: Child, module: str, environment: dict[str, str], streams: list[int]) -> bool:
        with self._answered:
            number = next(self._numbers)
            asked = {"number": number, "module": module, "environment": environment, "folder": _folder()}
            data = json.dumps(asked).encode()
            if len(data) > LARGEST:
                return False
            self._asked[number] = child
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
            try:
                self._line.sendmsg([data], rights, socket.MSG_DONTWAIT)
            except OSError:  # she is gone, or reads no more
                del self._asked[number]
                return False
            self._answered.wait_for(lambda: child.pid or self.gone, READY_S)
            if not child.pid:
                self._asked.pop(number, None)
                self.close()
            return bool(child.pid)

    def close(self) -> None:
        """Lets her go; what was forked from her goes on, and she stays to tell how it ends."""
        self.gone = True
        self._ready.set()
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)

    def forget(self) -> None:
        """In a fork of this program: she is the program's, and nothing is told here."""
        self.gone = True
        with contextlib.suppress(OSError):
            self._line.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := self._line.recv(LARGEST):
                self._told(json.loads(data))
        with self._answered:
            self.gone = True
            left = list(self._children.values())
            self._answered.notify_all()
        self._ready.set()
        self._line.close()
        for child in left:  # she was killed
            _watch(child)
        self._process.wait()

    def _told(self, said: dict[str, Any]) -> None:
        with self._answered:
            if "began" in said:
                child = self._asked.pop(said["number"], None)
                if child is None:  # nobody waits for it any more; its streams are closed, and it ends
                    return
                child.pid = said["began"]
                self._children[child.pid] = child
            elif "ended" in said:
                child = self._children.pop(said["ended"], None)
                if child is not None:
                    child.end(said["code"])
            self._answered.notify_all()
        if "ready" in said:
            self._ready.set()


def expect() -> bool:
    """Starts her, once, where this system can; whether it did."""
    global _mother
    if sys.platform != "linux" or not hasattr(socket, "SOCK_SEQPACKET"):
        return False
    with _lock:
        if _mother is not None:
            return False
        try:
            _mother = Mother()
        except (OSError, ValueError, TypeError, RuntimeError):  # no process, or no thread, can be had
            return False
    return True


def forked(module: str, environment: dict[str, str]) -> Child | None:
    """A process forked from the mother that runs `process()` of `module`; None where there is none to be
    had so."""
    made = _mother
    return None if made is None else made.fork(module, environment)


def there() -> bool:
    """Whether there is one to fork from, or will be."""
    return _mother is not None and not _mother.gone


def distrust() -> None:
    """From now on nothing is forked any more."""
    if _mother is not None:
        _mother.close()


def environment(more: dict[str, str]) -> dict[str, str]:
    """This program's environment with `more`, for a process that is to find this package."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **more, "PYTHONPATH": path}


def each(tasks: list[Callable[[], bool]], most: int) -> Iterator[tuple[int, bool]]:
    """Runs each task in a fork of this process, `most` at once: the number of each once it has ended, and
    whether it said that it was done."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored nobody is told of an end
    running: dict[int, int] = {}
    for number, task in enumerate(tasks):
        if len(running) >= most:
            yield _ended(running)
        child = os.fork()
        if child == 0:
            done = False
            with contextlib.suppress(BaseException):
                done = task()
            os._exit(0 if done else 1)
        running[child] = number
    while running:
        yield _ended(running)


def _ended(running: dict[int, int]) -> tuple[int, bool]:
    child, status = os.wait()
    return running.pop(child), status == 0


@functools.cache
def _key_of_triton() -> Any:
    from triton.runtime import cache

    return cache.triton_key()


def key_of_triton() -> None:
    """Has Triton compute once what it knows itself by: a digest of its half a gigabyte, which every thread
    would compute that comes before the first is done."""
    with _keyed, contextlib.suppress(Exception):  # of a version that computes another way
        _key_of_triton()


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return os.sep


def _watch(child: Child) -> None:
    """Tells of the end of one whose mother was killed: how it ended nobody knows."""

    def watch() -> None:
        while child.returncode is None:
            try:
                state = (
                    Path(f"/proc/{child.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
                )
            except (OSError, ValueError, IndexError):
                state = "X"
            if state in "ZX":
                child.end(1)
            time.sleep(0.05)

    threading.Thread(target=watch, name="clearway-watch", daemon=True).start()


def _in_a_fork() -> None:
    """A program that forks itself leaves what it started to the one that did."""
    global _mother, _lock, _keyed
    made, _mother = _mother, None
    _lock, _keyed = threading.Lock(), threading.Lock()
    if made is not None:
        made.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)
atexit.register(distrust)
