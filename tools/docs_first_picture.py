"""The table of docs/accelerate.md from the records of bench/first_picture.py: what first pictures take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "bench" / "results"
NAME = "first_picture.jsonl"
HEADING = (
    "| model | cores | caches | self-tests begun | first picture | a warm one "
    "| first ones of other sizes, over warm ones | commit |"
)


def first_picture_block() -> str:
    """The tables of every machine that has such a record; nothing where none has."""
    return "\n\n".join(table(read(path)) for path in sorted(RESULTS.glob(f"*/{NAME}")))


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record that hold pictures."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "pictures" in line]


def table(lines: list[dict[str, Any]]) -> str:
    """One record in Markdown; seconds."""
    about = lines[0]["provenance"]
    words = f"{about['device']}, torch {about['torch']}, triton {about['triton']}"
    rows = ["| " + " | ".join(row(line)) + " |" for line in lines]
    return "\n".join(
        [f"{words}, seconds of pictures of {steps(lines)} steps:", "", HEADING, "|" + " --- |" * 8, *rows]
    )


def steps(lines: list[dict[str, Any]]) -> str:
    """How many steps the pictures have."""
    return ", ".join(dict.fromkeys(str(line["steps"]) for line in lines))


def row(line: dict[str, Any]) -> list[str]:
    """One run."""
    first, *others = line["pictures"].values()
    size = f"{first['width']}x{first['height']}"
    about = line["provenance"]
    return [
        f"{line['model']} {size}",
        str(about["cores"]),
        line["caches"],
        line["begun"],
        f"{first['first_s']:.2f}",
        f"{first['warm_s']:.2f}",
        ", ".join(f"{one['over_warm_s']:.2f}" for one in others),
        f"{about['commit'][:10]}, {about['date'][:10]}",
    ]
