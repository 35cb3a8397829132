"""A journal of finished measurements, so that a long run that was stopped goes on where it was.

One file a question, named after its digest; one JSON line a finished step. Whatever changes the question
(machine, source, model, request, rules) is in the digest and so begins another journal. One that nobody has
added to for KEPT_DAYS is deleted when another is opened: no question is asked in just those words any more.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Result = dict[str, Any]
KEPT_DAYS = 30


class Journal:
    """The finished steps of one question, in `folder` (None: kept for this process only)."""

    def __init__(self, folder: Path | None, question: Mapping[str, Any]) -> None:
        text = json.dumps(question, sort_keys=True, default=str)
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"{self.digest}.jsonl"
        self._done = dict(_lines(self.path)) if self.path else {}
        if folder is not None:
            _clear(folder, self.path)
        self.resumed = len(self._done)

    def __contains__(self, step: str) -> bool:
        return step in self._done

    def step(self, name: str, compute: Callable[[], Result | None]) -> Result | None:
        """What the step `name` gave before, else compute(), kept unless it is None: not finished.

        JSON's own types come back either way, so that a resumed run sees what the first one saw.
        """
        if name not in self._done:
            made = compute()
            if made is None:
                return None
            line = json.dumps({"step": name, "result": made}, ensure_ascii=False)
            self._append(line)
            self._done[name] = json.loads(line)["result"]
        return self._done[name]

    def drop(self) -> None:
        """Forgets everything: the question is answered, or asked anew."""
        self._done.clear()
        if self.path:
            try:
                self.path.unlink(missing_ok=True)
            except OSError:
                self.path = None

    def _append(self, line: str) -> None:
        """Adds a line and has the disk keep it; a disk that does not costs only the resuming."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b") as file:
                start = b""
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    start = b"" if file.read(1) == b"\n" else b"\n"  # a line that was cut off spoils no other
                file.write(start + line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self.path = None


def _clear(folder: Path, mine: Path | None) -> None:
    """Deletes the journals in `folder`, but `mine`, that are older than KEPT_DAYS, where that is allowed."""
    oldest = time.time() - KEPT_DAYS * 86400
    for path in folder.glob("*.jsonl"):
        try:
            if path != mine and path.stat().st_mtime < oldest:
                path.unlink()
        except OSError:
            continue


def _lines(path: Path) -> list[tuple[str, Result]]:
    """The finished steps of a file; a line that was cut off is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    found = []
    for line in data.splitlines():
        try:
            value = json.loads(line)
            step, result = value["step"], value["result"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(step, str) and isinstance(result, dict):
            found.append((step, result))
    return found
