"""What commands print: JSON objects, aligned tables, and a progress bar on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def print_json(value: Any) -> None:
    """One JSON value on standard output, as UTF-8 whatever the locale."""
    print(json.dumps(value, indent=1, ensure_ascii=sys.stdout.encoding.lower() not in ("utf-8", "utf8")))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows in columns, two spaces apart; the last column is left as it is."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())


def say(text: str) -> None:
    """A note for the person, beside the output proper."""
    print(f"clearway: {text}", file=sys.stderr)
