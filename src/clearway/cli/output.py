"""What commands print: results on standard output, notes beside it, both fit for any terminal."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONGEST_NOTE = 1000


def prepare_streams() -> None:
    """Makes both streams take any text: what the terminal's encoding lacks is shown escaped, not raised.

    A stream that was closed before we started becomes one that goes nowhere.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for good
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def plain(text: str) -> str:
    """The text with control signs shown as \\x1b and the like: it may come from a stranger's file."""
    return _CONTROL.sub(lambda sign: f"\\x{ord(sign[0]):02x}", text)


def write(line: str) -> None:
    """A line on standard output. A reader that has gone silences it, and the work goes on."""
    try:
        print(plain(line), flush=True)
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: Any) -> None:
    """One JSON value on standard output; what JSON has no number for (NaN, infinity) is null."""
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    write(json.dumps(_finite(value), indent=1, ensure_ascii=encoding != "utf8"))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows in columns, two spaces apart; the last column is left as it is."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print(plain("  ".join([*cells, row[-1]]).rstrip()))


def say(text: str) -> None:
    """A note for the person, beside the output proper."""
    shown = plain(text).replace("\n", " ")
    if len(shown) > _LONGEST_NOTE:
        shown = f"{shown[: _LONGEST_NOTE // 2]} … {shown[-_LONGEST_NOTE // 2 :]}"
    print(f"clearway: {shown}", file=sys.stderr)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
