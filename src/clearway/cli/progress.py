"""A progress bar on a terminal, and Ctrl-C that waits for the step in hand."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from clearway.cli.output import write
from clearway.errors import Cancelled
from clearway.types import Event, StepDone


class Progress:
    """Shows steps, steps a second and the time that remains; silent where standard error is no terminal."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, event: Event) -> None:
        """Listens to a generation."""
        if not isinstance(event, StepDone) or not sys.stderr.isatty():
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=event.steps * event.groups, unit="it", file=sys.stderr)
        self._bar.update(1)

    def write(self, line: str) -> None:
        """A line on standard output that does not tear the bar."""
        if self._bar is not None:
            self._bar.clear()
        write(line)


class Stop:
    """Whether Ctrl-C was pressed. While `drawing` the first one waits for a step; else it stops at once."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.drawing = False

    def begin(self) -> None:
        """Drawing begins now. Raises Cancelled where Ctrl-C came before and something swallowed it."""
        if self.asked.is_set():
            raise Cancelled("stopped before drawing")
        self.drawing = True

    def __call__(self, event: Event) -> None:
        """Listens to a generation; raises Cancelled at the first step after Ctrl-C."""
        if self.asked.is_set() and isinstance(event, StepDone):
            raise Cancelled(f"stopped after step {event.step} of {event.steps}; finished pictures are kept")


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Within it Ctrl-C is noted in the Stop it yields; a second one interrupts at once.

    Outside the main thread, where no signal arrives, it does nothing.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(_signal: int, _frame: FrameType | None) -> None:
        at_once = stop.asked.is_set() or not stop.drawing
        stop.asked.set()
        if at_once:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
