"""Spans as a Chrome trace, which chrome://tracing and ui.perfetto.dev open.

Source: "Trace Event Format" (Google): complete events "X", counters "C", names "M"; times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearway.errors import RequestError, UnavailableError, one_line
from clearway.measure.stages import Recorder

HOST, DEVICE = 1, 2


def events(runs: Mapping[str, Recorder]) -> list[dict[str, Any]]:
    """The trace events of each named run, a process of its own each: host on one line, device on another.

    Device times begin where the run's first device event was recorded. A counter shows each stage's driver
    peak from where the stage begins.
    """
    made: list[dict[str, Any]] = []
    for process, (name, recorder) in enumerate(runs.items(), 1):
        # what ends last began first, where the clock cannot tell
        spans = sorted(reversed(recorder.spans), key=lambda span: (span.begin, -span.end))
        made.append(_name(process, "process_name", name))
        made.append(_name(process, "thread_name", "host", HOST))
        if not spans:
            continue
        zero, first_event = spans[0].begin, spans[0].begin_event
        if first_event is not None:
            made.append(_name(process, "thread_name", "device", DEVICE))
        for span in spans:
            details = {
                key: value
                for key, value in (
                    ("shapes", [list(shape) for shape in span.shapes]),
                    ("flops", span.flops),
                    ("bytes_moved", span.bytes_moved),
                    *span.memory.items(),
                )
                if value
            }
            common = {"name": span.name, "cat": span.kind, "ph": "X", "pid": process, "args": details}
            made.append({**common, "tid": HOST, "ts": _us(span.begin - zero), "dur": _us(span.seconds)})
            if peak := span.memory.get("driver_peak_bytes"):
                counter = {"name": "driver memory", "ph": "C", "pid": process, "tid": HOST}
                made.append({**counter, "ts": _us(span.begin - zero), "args": {"peak bytes": peak}})
            begun = None if first_event is None else recorder.timer.between(first_event, span.begin_event)
            took = recorder.device_seconds(span)
            if begun is not None and took is not None:
                made.append({**common, "tid": DEVICE, "ts": _us(begun), "dur": _us(took)})
    return made


def check_target(path: str | Path) -> None:
    """RequestError where a trace could not be written to `path`: said before anything is measured."""
    target = Path(path)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise RequestError(f"--trace {path}: it is a folder, or the folder it would lie in does not exist")


def write(path: str | Path, made: list[dict[str, Any]], about: Mapping[str, Any]) -> None:
    """Writes a trace file; `about` goes into its metadata. UnavailableError where it cannot be written."""
    document = {"traceEvents": made, "displayTimeUnit": "ms", "otherData": dict(about)}
    try:
        Path(path).write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise UnavailableError(f"--trace {path} could not be written: {one_line(error)}") from error


def _name(process: int, what: str, name: str, thread: int = 0) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e6, 3)
