"""A progress bar on a terminal, and Ctrl-C that waits for the step in hand."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

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
        print(line, flush=True)


@contextmanager
def stoppable() -> Iterator[Callable[[Event], None]]:
    """Within it Ctrl-C is noted, and the listener it yields raises Cancelled at the next step.

    A second Ctrl-C interrupts at once. Outside the main thread, where no signal arrives, it does nothing.
    """
    asked = threading.Event()

    def listen(event: Event) -> None:
        if asked.is_set() and isinstance(event, StepDone):
            raise Cancelled(f"stopped after step {event.step} of {event.steps}; finished pictures are kept")

    if threading.current_thread() is not threading.main_thread():
        yield listen
        return

    def note(_signal: int, _frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield listen
    finally:
        signal.signal(signal.SIGINT, before)
