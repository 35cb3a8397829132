"""Listens to one generation from outside: every stage, every network call, the arithmetic between them.

What is put on the flow (a wrapper around four methods, hooks on modules) is taken off exactly, whatever
happens; the flow itself knows nothing of it. A span's own time is what none of its children covers, so that
the own times of a run add up to the run: nothing is counted twice and nothing is lost.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearway.measure.clock import Timer
    from clearway.models import Model

RUN, STAGE, CALL, ARITHMETIC, WAIT, MODULE = "run", "stage", "call", "arithmetic", "wait", "module"
OVERFLOW = 400_000  # spans; a run that makes more (steps x modules) keeps the first ones


@dataclass(slots=True, eq=False)
class Span:
    """Something that ran: host seconds `begin` to `end`, device events where the device has them.

    `flops`, `bytes_moved`, `ops` and `reads` (scalars read back to the host) are those that ran directly in
    it, in none of its children; they stay 0 unless `counts.Counting` was on.
    """

    name: str
    kind: str
    parent: Span | None
    begin: float
    begin_event: Any = None
    end: float = 0.0
    end_event: Any = None
    shapes: tuple[tuple[int, ...], ...] = ()
    flops: int = 0
    bytes_moved: int = 0
    ops: int = 0
    reads: int = 0
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Host time."""
        return self.end - self.begin


class Recorder:
    """Collects the spans of one run. `events`: also record a device event at both ends of each.

    `meter`, where given, makes a context that measures memory; one is opened for every stage, outside its
    span, and what it found lies in the span's `memory`.
    """

    def __init__(self, timer: Timer, *, events: bool = True, meter: Callable[[], Any] | None = None) -> None:
        self.timer = timer
        self.spans: list[Span] = []
        self.stack: list[Span] = []
        self._events = events
        self._meter = meter

    def begin(self, name: str, kind: str, shapes: tuple[tuple[int, ...], ...] = ()) -> Span:
        """Opens a span inside the one that is open."""
        event = self.timer.event() if self._events else None
        parent = self.stack[-1] if self.stack else None
        span = Span(name, kind, parent, self.timer.now(), event, shapes=shapes)
        self.stack.append(span)
        return span

    def finish(self, span: Span) -> None:
        """Closes a span, and whatever an exception left open inside it."""
        span.end = self.timer.now()
        span.end_event = self.timer.event() if self._events else None
        if span in self.stack:
            del self.stack[self.stack.index(span) :]
        if len(self.spans) < OVERFLOW:
            self.spans.append(span)

    @contextmanager
    def span(self, name: str, kind: str) -> Iterator[Span]:
        """A span around the body, closed also when it raises."""
        span = self.begin(name, kind)
        try:
            yield span
        finally:
            self.finish(span)

    @contextmanager
    def stage(self, name: str) -> Iterator[Span]:
        """A stage: a span with memory meters around it."""
        meter = self._meter() if self._meter and not self.stack[1:] else None
        with ExitStack() as around:
            if meter is not None:
                around.enter_context(meter)
            with self.span(name, STAGE) as span:
                yield span
        if meter is not None:
            names = ("driver_peak_bytes", "allocator_peak_bytes", "live_peak_bytes")
            span.memory = {name: getattr(meter, name, None) for name in names}

    def device_seconds(self, span: Span) -> float | None:
        """Time between the span's two device events; None where the device has none. Waits for the device."""
        if span.begin_event is None or span.end_event is None:
            return None
        return self.timer.between(span.begin_event, span.end_event)

    def own(self, *, kinds: tuple[str, ...] = (RUN, STAGE, CALL, ARITHMETIC, WAIT)) -> Iterator[Own]:
        """Every span of these kinds with its own times: what its children of these kinds do not cover."""
        host: dict[Span, float] = defaultdict(float)
        device: dict[Span, float] = defaultdict(float)
        chosen = [span for span in self.spans if span.kind in kinds]
        found = {span: self.device_seconds(span) for span in chosen}
        for span in chosen:
            parent = span.parent
            while parent is not None and parent.kind not in kinds:
                parent = parent.parent
            if parent is not None:
                host[parent] += span.seconds
                device[parent] += found[span] or 0.0
        for span in chosen:
            total = found[span]
            yield Own(
                span,
                max(0.0, span.seconds - host[span]),
                None if total is None else max(0.0, total - device[span]),
            )


@dataclass(frozen=True, slots=True)
class Own:
    """A span with its own host and device seconds."""

    span: Span
    host_s: float
    device_s: float | None


@contextmanager
def listening(recorder: Recorder, model: Model | None = None) -> Iterator[None]:
    """Within it every generation of this process is recorded; with `model` also each of its modules.

    Afterwards classes, functions and modules are as before, also when the body raised.
    """
    from clearway import clock, guidance, models

    with ExitStack() as undo:
        undo.enter_context(patched(clock.Clock, "stage", functools.partial(_stage, recorder)))
        waiting = functools.partial(_named, recorder, name="wait", kind=WAIT)
        undo.enter_context(patched(clock, "synchronize", waiting))
        for executor in _executors():
            undo.enter_context(patched(executor, "__call__", functools.partial(_call, recorder)))
        for owner, name in ((guidance.Guided, "guidance"), (models.UNetDenoiser, "denoiser")):
            make = functools.partial(_named, recorder, name=name, kind=ARITHMETIC)
            undo.enter_context(patched(owner, "__call__", make))
        if model is not None:
            for part, module in parts(model).items():
                _hook(recorder, part, module, undo)
        yield


def parts(model: Model) -> dict[str, Any]:
    """The model's networks by the name that routes give them."""
    encoders = {
        f"text_encoder_{index + 1}" if index else "text_encoder": module
        for index, module in enumerate(model.text_encoders)
    }
    return {**encoders, "unet": model.unet, "vae": model.vae}


def _executors() -> list[type]:
    """The classes of the execution room whose instances run a named part of a model."""
    import clearway.execution

    home = clearway.execution.__name__
    found = {
        thing
        for name, room in list(sys.modules.items())
        if name.startswith(home)
        for thing in list(vars(room).values())
        if isinstance(thing, type) and thing.__module__.startswith(home)
    }
    return [
        one for one in found if "__call__" in vars(one) and "part" in getattr(one, "__dataclass_fields__", ())
    ]


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` replaced by `make` of it, and put back: the very object, where it was."""
    before = vars(owner)[name]
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _stage(recorder: Recorder, inner: Any) -> Any:
    @contextmanager
    def stage(self: Any, name: str) -> Iterator[None]:
        with recorder.stage(name), inner(self, name):
            yield

    return stage


def _named(recorder: Recorder, inner: Any, name: str, kind: str) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with recorder.span(name, kind):
            return inner(*args, **kwargs)

    return wrapped


def _call(recorder: Recorder, inner: Any) -> Any:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = str(getattr(self, "part", "network"))
        if any(span.kind == CALL and span.name == part for span in recorder.stack):
            return inner(self, *args, **kwargs)  # an executor that falls back to another one
        span = recorder.begin(part, CALL, _shapes(args))
        try:
            return inner(self, *args, **kwargs)
        finally:
            recorder.finish(span)

    return wrapped


def _hook(recorder: Recorder, part: str, root: Any, undo: ExitStack) -> None:
    """Hooks on every module below `root`: the first to run before it, the last after it."""
    for name, module in root.named_modules():
        if not name:  # the executor's span is the root's
            continue
        path = f"{part}.{name}"

        def before(_: Any, args: Any, path: str = path) -> None:
            recorder.begin(path, MODULE, _shapes(args))

        def after(_: Any, _args: Any, _output: Any, path: str = path) -> None:
            for span in reversed(recorder.stack):
                if span.kind == MODULE and span.name == path:
                    recorder.finish(span)
                    return

        undo.callback(module.register_forward_pre_hook(before, prepend=True).remove)
        undo.callback(module.register_forward_hook(after).remove)


def _shapes(args: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(arg.shape) for arg in args if hasattr(arg, "shape"))
