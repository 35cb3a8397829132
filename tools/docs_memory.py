"""The table of docs/memory.md from the records of bench/memory_on_device.py: what was held under a cap."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "bench" / "results"
NAME = "memory.jsonl"
GIB = 2**30
HEADING = (
    "| case | size | the process's peak | within it | first picture | later ones | all resident | picture "
    "| how it was drawn |"
)
FROM_THE_START = (
    "Each case was a process of its own, capped from its start: its peak counts CUDA's context, loading and "
    "the first picture, and only after it was one drawn with everything resident. Times are seconds of a "
    "picture of {steps} steps."
)
RESIDENT_BEFORE = (
    "These processes had begun with everything resident, before the cap: the peak is that of later pictures, "
    "in brackets that of the whole process, so a first picture under the cap is not shown. Times are seconds "
    "of a picture of {steps} steps."
)

WITH_SELF_TESTS = (
    " With self-tests is what the whole device had in use at most, their processes included, less what other "
    "programs had before."
)


def memory_block() -> str:
    """The tables of every machine that has such a record; nothing where none has."""
    return "\n\n".join(table(read(path)) for path in sorted(RESULTS.glob(f"*/{NAME}")))


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(lines: list[dict[str, Any]]) -> str:
    """One record in Markdown."""
    about = lines[0]
    words = f"torch {about['torch']}, commit {str(about['commit'])[:10]}, {str(about['date'])[:10]}"
    rows = ["| " + " | ".join(row(line)) + " |" for line in lines]
    caption = FROM_THE_START if all(map(from_the_start, lines)) else RESIDENT_BEFORE
    steps = ", ".join(dict.fromkeys(str(line["steps"]) for line in lines))
    said = caption.format(steps=steps)
    said += WITH_SELF_TESTS if any(map(told_with_self_tests, lines)) else ""
    return "\n".join([f"{about['device']}, {words}:", "", HEADING, "|" + " --- |" * 9, *rows, "", said])


def from_the_start(line: dict[str, Any]) -> bool:
    """Whether the process was capped before it held anything."""
    return "memory_loading" in line


def told_with_self_tests(line: dict[str, Any]) -> bool:
    """Whether it holds what the whole device had in use, self-tests' processes included."""
    return bool(line.get("device_peak_bytes"))


def row(line: dict[str, Any]) -> list[str]:
    """The cells of one case."""
    peak, cap, psnr = line["process_peak_bytes"], line["cap_bytes"], line["psnr_db"]
    words, within = f"{peak / GIB:.2f} GiB", "yes" if peak <= cap else "**no**"
    if not from_the_start(line):
        later = line["memory"]["allocator_peak_bytes"] + line["outside_allocator_bytes"]
        words = f"{later / GIB:.2f} GiB ({words})"
        within = "later ones" if later <= cap < peak else within
    if told_with_self_tests(line):
        words += f", {max(line['device_peak_bytes'].values()) / GIB:.2f} GiB with self-tests"
        if not all(line[f"{when}_within_cap"] for when in line["device_peak_bytes"]):
            within = "**no**"
    return [
        line["case"],
        line["size"],
        words,
        within,
        f"{line['capped_first_s']:.2f}",
        f"{statistics.median(line['capped_s']):.2f}",
        f"{statistics.median(line['resident_s'][1:]):.2f}",
        "the same" if psnr is None else f"{psnr:.1f} dB",
        drawn(line["plan"]) + (", loaded on the host" if line["loaded_on"] == "host" else ""),
    ]


def drawn(plan: dict[str, Any]) -> str:
    """What lay where, and what ran without a graph."""
    places = ", ".join(f"{part} {plan[part]}" for part in ("text", "unet", "vae"))
    graphs = " and ".join(plan["graphs"])
    tiles = ", by tiles" if plan["tiled"] else ""
    rows = "" if plan["joined"] else ", guidance's halves one by one"
    return f"{places}{tiles}{rows}; {f'graphs of {graphs}' if graphs else 'no graphs'}"
