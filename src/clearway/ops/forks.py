"""Processes forked from one that has read PyTorch already, in place of ones that each read it themselves.

A first picture begins a dozen self-tests, a process each, and two that build kernels; fourteen of them that
read PyTorch at once take five seconds of a machine of sixteen cores. Where that is to be expected the mother
(_mother.py) is started first, and `forked` gives what stands for a `subprocess.Popen`. It gives None where
there is no mother, where she takes too long, and once anything forked from her came to no good end, which is
believed of nothing until a process started afresh says the same. Linux only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
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

    def kill(self) -> None:
        """Ends it and what it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

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
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "clearway.ops._mother", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
        except BaseException:
            self._line.close()
            raise
        self._turn = threading.Lock()
        self._answered = threading.Condition()
        self._ready = threading.Event()
        self._began: int | None = None
        self._children: dict[int, Child] = {}
        self._ends: dict[int, int] = {}
        self.gone = False
        threading.Thread(target=self._listen, name="clearway-mother", daemon=True).start()
        timer = threading.Timer(SPARE_S, self.close)
        timer.daemon = True
        timer.start()

    def fork(self, module: str, environment: dict[str, str]) -> Child | None:
        """A process that runs `process()` of a module in such an environment; None where she cannot."""
        if not self._ready.wait(READY_S) or self.gone:
            return None
        with self._turn, contextlib.ExitStack() as opened:
            ours, theirs = [], []
            for number in range(3):
                read, write = os.pipe()
                mine, hers = (write, read) if number == 0 else (read, write)
                ours.append(mine)
                theirs.append(hers)
                opened.callback(os.close, hers)
            child = Child((ours[0], ours[1], ours[2]))
            asked = json.dumps({"module": module, "environment": environment}).encode()
            try:
                if len(asked) > LARGEST:
                    raise OSError("the environment is too large")
                socket.send_fds(self._line, [asked], theirs)
            except OSError:
                _close(child)
                return None
            with self._answered:
                self._answered.wait_for(lambda: self._began is not None or self.gone, READY_S)
                if self._began is None:
                    self.gone = True  # an answer that comes later would be taken for another's
                    _close(child)
                    return None
                child.pid, self._began = self._began, None
                self._children[child.pid] = child
                if child.pid in self._ends:
                    child.end(self._ends.pop(child.pid))
            return child

    def close(self) -> None:
        """Ends her; what was forked from her goes on."""
        self.gone = True
        self._ready.set()
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := self._line.recv(LARGEST):
                self._told(json.loads(data))
        with self._answered:
            self.gone = True
            for child in self._children.values():
                threading.Thread(target=_watched, args=(child,), daemon=True).start()
            self._answered.notify_all()
        self._ready.set()
        self._line.close()
        self._process.wait()

    def _told(self, said: dict[str, Any]) -> None:
        with self._answered:
            if "began" in said:
                self._began = said["began"]
            elif "ended" in said:
                child = self._children.pop(said["ended"], None)
                if child is None:
                    self._ends[said["ended"]] = said["code"]
                else:
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
        except (OSError, ValueError, TypeError):  # no process can be had
            return False
    return True


def forked(module: str, environment: dict[str, str]) -> Child | None:
    """A process forked from the mother that runs `process()` of `module`; None where there is none to be
    had so."""
    made = _mother
    return made.fork(module, environment) if made is not None and there() else None


def there() -> bool:
    """Whether there is one to fork from, or will be."""
    return _mother is not None and not _mother.gone


def distrust() -> None:
    """From now on nothing is forked any more."""
    if _mother is not None:
        _mother.close()


def each(tasks: list[Callable[[], None]], most: int) -> Iterator[int]:
    """Runs each task in a fork of this process, `most` at once; the number of each once it has ended."""
    running: dict[int, int] = {}
    for number, task in enumerate(tasks):
        if len(running) >= most:
            yield _ended(running)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                task()
            os._exit(0)
        running[child] = number
    while running:
        yield _ended(running)


def _ended(running: dict[int, int]) -> int:
    child, _ = os.wait()
    return running.pop(child)


@functools.cache
def _key_of_triton() -> Any:
    from triton.runtime import cache

    return cache.triton_key()


def key_of_triton() -> None:
    """Has Triton compute once what it knows itself by: a digest of its half a gigabyte, which every thread
    would compute that comes before the first is done."""
    with _keyed, contextlib.suppress(Exception):  # of a version that computes another way
        _key_of_triton()


def _close(child: Child) -> None:
    for stream in (child.stdin, child.stdout, child.stderr):
        with contextlib.suppress(OSError):
            stream.close()


def _watched(child: Child) -> None:
    """Waits for the end of one whose mother was killed: how it ended nobody tells."""
    while child.returncode is None:
        try:
            at_work = Path(f"/proc/{child.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        except (OSError, ValueError):
            at_work = " X"
        if at_work.split()[0] in "ZX":
            child.end(1)
        if child._ended.wait(0.05):
            return
