"""What a report says beside its tables: results without figures, what ran, what raw data contradict."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from clearway.measure import figures
from clearway.measure.comparisons import comparisons
from clearway.measure.figures import mapping, number, plain
from clearway.measure.groups import Entry, Group, workload
from clearway.measure.markup import shown

OLDER_WORDS = (("no difference", "too few rounds"), ("too few rounds", "no difference"))
"""Verdicts that say the same."""
_TOLD = ("scenario", "precision", "order", "ceilings")  # settings that stand elsewhere or are long


def withheld(group: Group) -> list[dict[str, Any]]:
    """What was refused or failed, with the reason."""
    return [
        {
            "scenario": shown(entry.record.scenario),
            "contender": shown(entry.record.contender),
            "run": group.letter(entry),
            "what": "refused" if entry.record.refused else "failed",
            "reason": shown(entry.record.refused or entry.record.failed),
        }
        for entry in group.entries
        if not entry.published
    ]


def conditions(group: Group) -> list[dict[str, Any]]:
    """For each published result: what was to run, under which settings, and which routes were counted."""
    return [
        {
            "scenario": shown(entry.record.scenario),
            "contender": shown(entry.record.contender),
            "run": group.letter(entry),
            "workload": workload(entry),
            "intended": _listed(entry.record.intended),
            "settings": _listed(_but(_settings(entry), _TOLD)),
            "routes": _listed(entry.record.routes, " × "),
        }
        for entry in group.published()
    ]


def _settings(entry: Entry) -> Mapping[str, Any]:
    return mapping(mapping(entry.record.provenance).get("settings"))


def _but(given: Any, names: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in mapping(given).items() if key not in names}


def _listed(given: Any, sign: str = " ") -> str:
    return shown(", ".join(f"{key}{sign}{value}" for key, value in figures.flat(given)))


def doubts(group: Group) -> list[str]:
    """A sentence for every figure in a record that its own raw data contradict."""
    found = []
    for entry in group.published():
        place = f"{shown(entry.record.scenario)}, {shown(entry.record.contender)} ({entry.file})"
        found += [f"{place}: {words}" for words in _contradictions(group, entry)]
    return found


def _contradictions(group: Group, entry: Entry) -> Iterable[str]:
    given = mapping(entry.record.throughput)
    if given:
        if not figures.numbers(given.get("samples_s")):
            yield "has no raw samples, so its summary is shown unchecked"
        anew = figures.throughput(given)
        for key in figures.SUMMARY:
            if figures.differs(given.get(key), anew[key]):
                yield f"says {key} {plain(number(given[key]))}, its samples give {plain(anew[key])}"
    for row in comparisons(group, entry, every=True):
        said, place = row["said"], f"against {row['against']}"
        if (said.get("verdict"), row["verdict"]) in OLDER_WORDS:
            continue
        if said.get("verdict") != row["verdict"]:
            yield f"says “{shown(said.get('verdict'))}” {place}, its data allow “{row['verdict']}”"
        for key in ("ratio", "low", "high", "p_value"):
            if row["anew"] and figures.differs(said.get(key), row[key]):
                yield f"says {key} {plain(number(said[key]))} {place}, the rounds give {plain(row[key])}"
    for one in figures.rows(entry.record.operations):
        for key, value in figures.operation(one).items():
            if figures.differs(one.get(key), value):
                said = plain(number(one[key]))
                yield f"{shown(one.get('name', ''))}: says {key} {said}, its raw data give {plain(value)}"
