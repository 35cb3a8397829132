"""Record files -> a report of four ledgers, as plain values, as Markdown and (in `page`) as one HTML file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clearway.measure import record
from clearway.measure.comparisons import comparisons
from clearway.measure.doubts import conditions, doubts, withheld
from clearway.measure.groups import Group, Report, arrange, build_words
from clearway.measure.markup import shown
from clearway.measure.tables import LEDGERS, Table, tables

TITLES = {
    "time": "Time of one call",
    "once": "Waited for once",
    "compared": "Compared in the same run",
    "operations": "Single operations",
    "correctness": "Against the reference",
    "memory": "Peaks",
}
MEANING = {
    "throughput": "Whole runs. Seconds are what a person waits for; lower is better.",
    "operations": "Single operations, alone. What is faster here need not make a picture faster.",
    "correctness": "Each contender's pictures against those of the reference named.",
    "memory": "Three meters: what the driver gave out, what PyTorch's allocator holds, what tensors use.",
}
_SPECIAL = re.compile(r"([\\`*\[\]|])")


def load(files: Iterable[str | Path]) -> Report:
    """The report of some record files; RequestError where one cannot be read or is no record file.

    A file named twice is read once; files of one name are told apart by their folder's, or by a number.
    """
    paths = list({Path(file).resolve(): Path(file) for file in files}.values())
    short = [path.name for path in paths]
    names: dict[str, Path] = {}
    for path in paths:
        name = path.name if short.count(path.name) == 1 else f"{path.resolve().parent.name}/{path.name}"
        same = sum(other.partition(" (")[0] == name for other in names)
        names[f"{name} ({same + 1})" if same else name] = path
    return arrange((shown(name), one) for name, path in names.items() for one in record.read(path))


def tally(group: Group) -> dict[str, int]:
    """How many results are shown, refused, failed, and how the comparisons went."""
    verdicts = ("faster", "slower", "no difference", "too few rounds")
    found = {"results": len(group.published()), **dict.fromkeys(verdicts, 0)}
    for entry in group.published():
        for row in comparisons(group, entry):
            found[row["verdict"]] += 1
    if not found["too few rounds"]:
        del found["too few rounds"]
    for what in ("refused", "failed"):
        found[what] = sum(row["what"] == what for row in withheld(group))
    return found


def as_json(report: Report) -> dict[str, Any]:
    """The whole report as plain values, with figures as computed anew."""
    return {
        "files": report.files,
        "machines": [
            {
                "machine": name,
                "builds": [
                    {
                        "channel": group.channel,
                        "runs": {run: dict(build_words(made)) for run, made in group.runs.items()},
                        "tally": tally(group),
                        **{
                            ledger: [table.as_json() for table in tables(group, ledger)] for ledger in LEDGERS
                        },
                        "withheld": withheld(group),
                        "doubts": doubts(group),
                    }
                    for group in groups
                ],
            }
            for name, groups in report.machines.items()
        ],
    }


def markdown(report: Report, level: int = 1) -> str:
    """The report as Markdown, its title a heading of that level."""
    lines = [_heading(level, "Measurements"), f"From {', '.join(map(_safe, report.files)) or 'no file'}.", ""]
    for name, groups in report.machines.items():
        lines += [_heading(level + 1, name)]
        for group in groups:
            lines += [*_build(group, level + 2), *_ledgers(group, level + 3)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _build(group: Group, level: int) -> list[str]:
    lines = [_heading(level, f"PyTorch {group.channel}")]
    for run, made in group.runs.items():
        words = "; ".join(f"{key} {value}" for key, value in build_words(made))
        lines += [f"Run {run}: {_safe(words)}.", ""]
    lines += [f"{words_of(tally(group))}.", ""]
    if withheld(group):
        headings = ("scenario", "contender", "run", "", "reason")
        lines += ["Refused or failed, so no figure is shown:", ""]
        lines += [*grid(headings, [_values(row) for row in withheld(group)]), ""]
    if doubts(group):
        lines += [
            "Figures that the records' own raw data contradict; the tables have what the raw data give:",
            "",
        ]
        lines += [*(f"- {_safe(words)}" for words in doubts(group)), ""]
    return lines


def _ledgers(group: Group, level: int) -> list[str]:
    lines = []
    for ledger in LEDGERS:
        found = tables(group, ledger)
        lines += [_heading(level, ledger.capitalize()), MEANING[ledger], ""]
        lines += [] if found else ["Nothing of it was recorded.", ""]
        for table in found:
            lines += [f"**{_safe(table.scenario)}** ({_safe(table.work_words)}) · {TITLES[table.name]}", ""]
            lines += [f"{_safe(table.workload)}.", ""] if table.name == "time" and table.workload else []
            lines += [*table_lines(table), ""]
    ran = [_values(row) for row in conditions(group)]
    headings = ("scenario", "contender", "run", "workload", "intended", "settings", "routes")
    return [*lines, _heading(level, "What ran"), *grid(headings, ran), ""]


def table_lines(table: Table) -> list[str]:
    """A table and its notes as lines of Markdown."""
    right = [column.right for column in table.columns]
    lines = grid([column.heading for column in table.columns], table.cells(), right)
    return [*lines, *(line for note in table.notes for line in ("", _safe(note)))]


def grid(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool] = ()) -> list[str]:
    """A Markdown table; columns that are empty throughout are left out."""
    kept = [index for index in range(len(headings)) if any(row[index] for row in rows)]
    rule = ["--:" if right and right[index] else "---" for index in kept]
    lines = [[_safe(headings[index]) for index in kept], rule]
    lines += [[_safe(row[index]) for index in kept] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def words_of(counts: dict[str, int]) -> str:
    """A tally in words; what is zero is said too, so that losses cannot hide."""
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _values(row: dict[str, Any]) -> list[str]:
    return ["" if value is None else str(value) for value in row.values()]


def _heading(level: int, text: str) -> str:
    return f"\n{'#' * level} {_safe(text)}\n"


def _safe(text: str) -> str:
    """Text in which Markdown and HTML see no sign of theirs."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", flat)
