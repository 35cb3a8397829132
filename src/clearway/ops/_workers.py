"""Processes that take one job after another, several at once: what may kill a process is done in one of them.

A worker is started once and pays for starting torch and the device once. It is given one job at a time and
says what it begins before it begins it, so that after a crash or a hang the job, and where in it, is known. A
failure in a worker that had done other jobs may be theirs, and in one that was forked (forks.py) of that: it
is believed only if a fresh worker fails too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clearway.ops import forks
from clearway.ops.forks import Child

KILL_S = 10.0  # until a process that was killed is gone
START_S = 120.0  # until its first line: starting torch on a busy machine
COMMAND = ("-P", "-m", "clearway.ops.selftest")

_alive: weakref.WeakSet[Worker] = weakref.WeakSet()
_crews: weakref.WeakSet[Crew] = weakref.WeakSet()
_ending = threading.Event()


@dataclass(eq=False)
class Job:
    """What a worker is told, what it answered, and how it ended where not well ("died (signal 6)")."""

    content: dict[str, Any]
    limit_s: float
    """A worker that says nothing for so long hangs."""
    on_line: Callable[[dict[str, Any]], None] = lambda line: None
    then: Callable[[Job], None] = lambda job: None
    """Called once it is done, before those who wait for it go on."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    end: str | None = None
    scarce: str | None = None
    """What the machine had too little of just then, which says nothing of the implementation."""
    seconds: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    def failed(self) -> bool:
        """Whether something was found wrong, or it came to no good end."""
        return (
            self.end is not None or self.scarce is not None or any(line.get("problem") for line in self.lines)
        )


class Worker:
    """One process that takes jobs, of `command` (None: self-tests), with `afresh` never a fork of another.
    OSError, ValueError or TypeError where it cannot be started."""

    def __init__(
        self,
        environment: dict[str, str] | None = None,
        command: tuple[str, ...] | None = None,
        afresh: bool = False,
    ) -> None:
        if _ending.is_set():
            raise OSError("the program is ending")
        self.jobs = 0
        self._began = False
        self._process = _started(command or COMMAND, environment or {}, afresh)
        _alive.add(self)
        self._said: queue.Queue[str | None] = queue.Queue()
        self._errors: deque[str] = deque(maxlen=50)
        self._readers = [
            threading.Thread(target=_pass_on, args=(self._process.stdout, self._said.put), daemon=True),
            threading.Thread(target=_pass_on, args=(self._process.stderr, self._note), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def run(self, job: Job) -> None:
        """Gives it the job and waits for its end; one that came to no good end is of no more use."""
        began = time.monotonic()
        self.jobs += 1
        job.lines, job.end, job.scarce = [], None, None
        stream = self._process.stdin
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone: its silence is heard below
            stream.write(json.dumps(job.content) + "\n")
            stream.flush()
        job.end = self._heard(job)
        job.seconds = time.monotonic() - began

    @property
    def forked(self) -> bool:
        """Whether it is no process started afresh."""
        return isinstance(self._process, Child)

    def step_back(self) -> None:
        """From now on it takes only what no other process wants."""
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)

    def alive(self) -> bool:
        """Whether its process is there."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends it and what it started; one that is gone already is only collected."""
        _alive.discard(self)
        self._kill()
        for reader in self._readers:
            reader.join(timeout=1)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.close()

    def _heard(self, job: Job) -> str | None:
        while True:
            limit_s = job.limit_s if self._began else START_S
            try:
                text = self._said.get(timeout=limit_s)
            except queue.Empty:
                return f"was silent for {limit_s:g} s"
            if text is None:
                return self._death(job.limit_s)
            line = _parsed(text)
            if line is None:
                continue
            self._began = True
            if line.get("end"):
                job.scarce = line.get("scarce")
                return None
            job.lines.append(line)
            job.on_line(line)

    def _death(self, limit_s: float) -> str:
        try:
            code = self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"was silent for {limit_s:g} s"
        self._readers[1].join(timeout=1)
        words = [line.strip() for line in self._errors if line.strip()]
        what = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"died ({what}{', ' + words[-1][:200] if words and code > 0 else ''})"

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                if os.name == "posix" or isinstance(self._process, Child):
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)

    def _note(self, line: str | None) -> None:
        if line is not None:
            self._errors.append(line)


class Crew:
    """Workers that take jobs from one queue, as many at once as is allowed; they end when nothing is left."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self.begin_anew()
        _crews.add(self)

    def begin_anew(self) -> None:
        """Without workers and jobs."""
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._at_work = 0

    @property
    def at_work(self) -> int:
        """How many workers there are; one that is being ended is, until its process is gone."""
        return self._at_work

    def give(self, job: Job, most: int) -> bool:
        """Adds a job; another worker is started for it where fewer than `most` are at work. False, and it is
        not taken, where nobody is at work and nobody may be."""
        with self._changed:
            if most < 1 and not self._at_work:
                return False
            self._queue.append(job)
            more = self._at_work < most
            self._at_work += more
        if more:
            self._begin()
        return True

    def hire(self, most: int) -> None:
        """Starts more workers for the jobs that wait, up to `most` in all."""
        with self._changed:
            more = max(min(most - self._at_work, len(self._queue)), 0)
            self._at_work += more
        for _ in range(more):
            self._begin()

    def hurry(self, job: Job) -> None:
        """Puts a job that nobody has begun before the others."""
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)
                self._queue.appendleft(job)

    def wait(self) -> None:
        """Comes back when all is done and every worker's process is gone, with what it held of a device."""
        with self._changed:
            self._changed.wait_for(lambda: not self._at_work)

    def _begin(self) -> None:
        threading.Thread(target=self._serve, name="clearway-selftest", daemon=True).start()

    def _serve(self) -> None:
        worker: Any = None
        while True:
            with self._changed:
                job = self._queue.popleft() if self._queue else None
                if job is None and worker is None:
                    self._at_work -= 1
                    self._changed.notify_all()
                    return
            if job is None:  # ended before it counts as gone: what it holds is the device's memory
                worker.close()
                worker = None
            else:
                worker = self._done(job, worker)

    def _done(self, job: Job, worker: Any) -> Any:
        """The worker for the next job, once this one is done; None where that needs a fresh one."""
        try:
            try:
                used = worker is not None
                worker = worker or self._start()
                worker.run(job)
                forked = getattr(worker, "forked", False)
                if job.failed() and (used or forked):
                    if forked:
                        forks.distrust()
                    worker.close()
                    worker = self._start()
                    worker.run(job)
            except (OSError, ValueError, TypeError) as error:
                job.end = f"could not be started ({error})"
            if job.failed() and worker is not None:
                worker.close()
                worker = None
            job.then(job)
        except Exception:  # a bug here must not leave those who wait for the next job without a worker
            traceback.print_exc()
            if worker is not None:
                worker.close()
                worker = None
        finally:
            job.done.set()
        return worker


def _started(command: tuple[str, ...], more: dict[str, str], afresh: bool) -> subprocess.Popen[str] | Child:
    """A process of Python in this environment and `more`: forked, where that can and may be, or started
    afresh."""
    environment = forks.environment(more)
    if not afresh and command[:-1] == ("-P", "-m"):
        child = forks.forked(command[-1], environment)
        if child is not None:
            return child
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=os.name == "posix",
    )


def _in_a_fork() -> None:
    """A program that forks itself leaves them to the one that started them, and their jobs."""
    _alive.clear()
    for crew in list(_crews):
        crew.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)


@atexit.register
def _end_all() -> None:
    """No worker, not one that hangs, outlives the program, and none is started for jobs that are left."""
    _ending.set()
    for worker in list(_alive):
        worker._kill()


def _pass_on(stream: Any, to: Callable[[Any], None]) -> None:
    """Hands on each line of a stream, then None."""
    with contextlib.suppress(OSError, ValueError):
        for line in stream:
            to(line)
    to(None)


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None  # something the libraries print
    return line if isinstance(line, dict) and isinstance(line.get("case", ""), str) else None
