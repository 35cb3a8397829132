"""Saver: finished pictures are encoded and written in a thread of its own, while the next ones are drawn."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from clearway.cli.output import say
from clearway.result import Result

AHEAD = 2
"""Groups that may wait to be saved; drawing waits when there are more, so that memory stays bounded."""


class Saver:
    """Saves results in the order in which they are put, by `save`; `told` hears of each path, in the thread
    that puts.

    What saving raises is raised again by the next `put` or `collect`, or at the end of the `with`. Leaving it
    waits until all that was put is saved, also when an exception is why: a picture that is finished is kept.
    Ctrl-C at that point gives up those that still wait.
    """

    def __init__(self, save: Callable[[Result], list[Path]], told: Callable[[Path], None]) -> None:
        self.paths: list[Path] = []
        self.seconds = 0.0
        self._save, self._told = save, told
        self._waiting: queue.Queue[Result | None] = queue.Queue(AHEAD)
        self._saved: queue.SimpleQueue[list[Path]] = queue.SimpleQueue()
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given_up = False

    def put(self, result: Result) -> None:
        """Has a group saved; waits where AHEAD groups wait already."""
        self.collect()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="clearway-saver")
            self._thread.start()
        self._waiting.put(result)

    def collect(self) -> None:
        """Tells of what has been saved since; raises what went wrong."""
        while not self._saved.empty():
            for path in self._saved.get():
                self.paths.append(path)
                self._told(path)
        if not self._errors.empty():
            raise self._errors.get()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        try:
            self._waiting.put(None)
            self._thread.join()
        except KeyboardInterrupt:
            self._given_up = True
            self._waiting.put(None)
            raise
        failed = error
        while not (self._saved.empty() and self._errors.empty()):
            try:
                self.collect()
            except Exception as later:
                if failed is not None:
                    say(str(later))
                failed = failed or later
        if failed is not None and failed is not error:
            raise failed

    def _run(self) -> None:
        while (result := self._waiting.get()) is not None:
            if self._given_up:
                continue
            begun = time.perf_counter()
            try:
                self._saved.put(self._save(result))
            except Exception as error:
                self._errors.put(error)
            self.seconds += time.perf_counter() - begun
