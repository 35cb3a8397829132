"""Groups of records -> tables of one ledger, one scenario and one kind of work each.

Every figure is computed anew from the raw samples in the file; where a record's own summary says otherwise,
the table has the new figure and `doubts` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clearway.measure import figures
from clearway.measure.comparisons import comparisons
from clearway.measure.figures import count, mapping, number, plain, ratio, size, span
from clearway.measure.groups import Entry, Group, workload
from clearway.measure.markup import shown
from clearway.measure.record import WORK

LEDGERS = ("throughput", "operations", "correctness", "memory")
WORK_WORDS = {
    "same": "same arithmetic",
    "changed precision": "changed precision: not the same arithmetic",
    "less work": "less work: another job, not a faster one",
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column: its key in the rows, its heading, and how a row's value reads; `right` for figures."""

    key: str
    heading: str
    words: Callable[[Any], str] = shown
    right: bool = True

    def text(self, row: Row) -> str:
        """The cell; empty where the row has no value."""
        value = row.get(self.key)
        return "" if value is None else self.words(value)


@dataclass(frozen=True)
class Table:
    """One table: rows hold plain values, columns say how they read; columns without a value are left out."""

    name: str
    scenario: str
    work: str
    columns: tuple[Column, ...]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    workload: str = ""

    @property
    def work_words(self) -> str:
        """The kind of work in words."""
        return WORK_WORDS.get(self.work, self.work)

    def cells(self) -> list[list[str]]:
        """The rows as text."""
        return [[column.text(row) for column in self.columns] for row in self.rows]

    def as_json(self) -> dict[str, Any]:
        """The table as plain values."""
        keys = [column.key for column in self.columns]
        rows = [{key: row.get(key) for key in keys} for row in self.rows]
        return {
            "table": self.name,
            "scenario": self.scenario,
            "work": self.work,
            "rows": rows,
            "notes": self.notes,
        }


def _span(pair: tuple[float | None, float | None]) -> str:
    return span(*pair)


def _ratio_span(pair: tuple[float | None, float | None]) -> str:
    return "0–∞" if pair[1] is None else f"{ratio(pair[0])}–{ratio(pair[1])}"


def _percent(value: float) -> str:
    return f"{plain(100 * value, 2)} %"


def _floor(value: float) -> str:
    """A noise floor, |log ratio|, as the percentage it stands for."""
    return f"±{plain(100 * math.expm1(value), 2)} %" if value < 5 else "too wide"


def _p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _psnr(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1f} dB"


_LABEL = (Column("contender", "contender", right=False), Column("run", "run", right=False))
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "time": (
        Column("n", "n", count),
        Column("p50_s", "median, s", plain),
        Column("span_s", "p20–p80, s", _span),
        Column("device_p50_s", "on the device, s", plain),
        Column("outliers", "outliers", count),
        Column("images", "images a call", count),
        Column("images_per_hour", "images an hour", plain),
        Column("cost_per_1000", "cost of 1,000", plain),
    ),
    "once": (
        Column("ready_s", "made ready, s", plain),
        Column("first_s", "first call, s", plain),
        Column("new_size_s", "first call at a new size, s", plain),
    ),
    "compared": (
        Column("against", "against", right=False),
        Column("ratio", "time ratio", ratio),
        Column("interval", "95 % interval", _ratio_span),
        Column("floor", "noise floor", _floor),
        Column("n", "n", count),
        Column("p_value", "p", _p_value),
        Column("verdict", "verdict", right=False),
    ),
    "operations": (
        Column("place", "#", count),
        Column("name", "operation", right=False),
        Column("n", "n", count),
        Column("p50_ms", "median, ms", plain),
        Column("span_ms", "p20–p80, ms", _span),
        Column("bytes_moved", "moved", size),
        Column("gb_per_s", "GB/s", lambda value: plain(value, 3)),
        Column("gb_share", "of ceiling", _percent),
        Column("tflop_per_s", "TFLOP/s", lambda value: plain(value, 3)),
        Column("tflop_share", "of ceiling", _percent),
    ),
    "correctness": (
        Column("reference", "reference", right=False),
        Column("verified", "verified", right=False),
        Column("max_error", "largest error", lambda value: f"{value:.3g}"),
        Column("psnr_db", "PSNR", _psnr),
        Column("ssim", "SSIM", lambda value: f"{value:.4f}"),
        Column("latents_rel_l2", "latents, relative L2", lambda value: f"{value:.2g}"),
        Column("tolerance_rel_l2", "allowed", lambda value: f"{value:.2g}"),
        Column("latents_psnr_db", "latents, PSNR", _psnr),
    ),
    "memory": (
        Column("driver_peak_bytes", "driver, peak", size),
        Column("baseline_bytes", "driver, before", size),
        Column("allocator_peak_bytes", "allocator, peak", size),
        Column("live_peak_bytes", "live tensors, peak", size),
    ),
}
_NAMES = {
    "throughput": ("time", "compared", "once"),
    "operations": ("operations",),
    "correctness": ("correctness",),
    "memory": ("memory",),
}


def tables(group: Group, ledger: str) -> list[Table]:
    """The tables of one ledger: by scenario, then by kind of work; only what was published."""
    found = []
    for scenario, work, entries in scenarios(group):
        for name in _NAMES[ledger]:
            rows = [
                {"contender": shown(entry.record.contender), "run": group.letter(entry), **row}
                for entry in entries
                for row in _ROWS[name](group, entry)
            ]
            for place, row in enumerate(rows, 1):
                row["place"] = place
            if rows:
                kept = [
                    column for column in (*_LABEL, *_COLUMNS[name]) if any(column.text(row) for row in rows)
                ]
                found.append(
                    Table(
                        name,
                        scenario,
                        work,
                        tuple(kept),
                        rows,
                        _notes(name, entries, rows),
                        workload(entries[0]),
                    )
                )
    return found


def scenarios(group: Group) -> Iterable[tuple[str, str, list[Entry]]]:
    """Scenario, kind of work and their published entries: in the order of the files, kinds in WORK's."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in group.published():
        found.setdefault((shown(entry.record.scenario), shown(entry.record.work)), []).append(entry)
    names = list(dict.fromkeys(name for name, _ in found))
    kinds = [work for work in WORK if any(work == own for _, own in found)]
    for name in names:
        for work in kinds:
            if (name, work) in found:
                yield name, work, found[name, work]


def _time(group: Group, entry: Entry) -> list[Row]:
    given = mapping(entry.record.throughput)
    if not given:
        return []
    found = figures.throughput(given)
    return [
        {
            **found,
            "span_s": (found["p20_s"], found["p80_s"]),
            "device_p50_s": number(given.get("device_p50_s")),
            "images": number(given.get("images")),
        }
    ]


def _once(group: Group, entry: Entry) -> list[Row]:
    given = mapping(entry.record.throughput)
    row = {key: number(given.get(key)) for key in ("ready_s", "first_s", "new_size_s")}
    return [row] if any(value is not None for value in row.values()) else []


def _operations(group: Group, entry: Entry) -> list[Row]:
    roofs = ceilings(entry)
    found = []
    for given in figures.rows(entry.record.operations):
        anew = figures.operation(given)
        row: Row = {
            key: number(given.get(key)) for key in ("bytes_moved", "flops", "gb_per_s", "tflop_per_s")
        }
        row |= {"name": shown(given.get("name", ""))} | {
            key: value for key, value in anew.items() if value is not None
        }
        row["span_ms"] = anew["p20_ms"], anew["p80_ms"]
        for share, key in (("gb_share", "gb_per_s"), ("tflop_share", "tflop_per_s")):
            roof, rate = roofs.get(key), row[key]
            row[share] = rate / roof if roof and rate else None
        found.append(row)
    return found


def ceilings(entry: Entry) -> dict[str, float]:
    """The measured ceilings of an entry's machine: gb_per_s and tflop_per_s, where the record has them.

    They stand in the settings as `ceilings`, named so or as a `Ceilings` has them.
    """
    given = mapping(mapping(mapping(entry.record.provenance).get("settings")).get("ceilings"))
    found = {}
    for key, other, scale in (("gb_per_s", "bytes_per_s", 1e9), ("tflop_per_s", "flops_per_s", 1e12)):
        raw = number(given.get(other))
        found[key] = number(given.get(key)) if raw is None else raw / scale
    return {key: value for key, value in found.items() if value is not None and value > 0}


def _correctness(group: Group, entry: Entry) -> list[Row]:
    """A row against the reference, one each against the stock path and another environment, if any."""
    given = mapping(entry.record.correctness)
    if not given:
        return []
    latents = mapping(given.get("latents"))
    said = given.get("verified")
    first = _likeness(given) | {
        "verified": "yes" if said is True else "NO" if said is False else "not checked",
        "latents_rel_l2": number(latents.get("rel_l2")),
        "tolerance_rel_l2": number(given.get("tolerance_rel_l2")),
        "latents_psnr_db": _decibels(latents),
    }
    more = [mapping(given.get(key)) for key in ("stock", "other_environment")]
    known = given.get("reference")
    return [first, *(_likeness(one) for one in more if one and one.get("reference") != known)]


def _likeness(given: Mapping[str, Any]) -> Row:
    found: Row = {key: number(given.get(key)) for key in ("max_error", "ssim")}
    return found | {"reference": shown(given.get("reference") or ""), "psnr_db": _decibels(given)}


def _decibels(given: Mapping[str, Any]) -> float | str | None:
    return "identical" if given.get("identical") is True else number(given.get("psnr_db"))


def _memory(group: Group, entry: Entry) -> list[Row]:
    given = mapping(entry.record.memory)
    row: Row = {key: number(value) for key, value in given.items() if str(key).endswith("_bytes")}
    if not any(value is not None for value in row.values()):
        return []
    return [
        {**row, "sources": "; ".join(f"{key}: {words}" for key, words in figures.flat(given.get("sources")))}
    ]


_ROWS: dict[str, Callable[[Group, Entry], list[Row]]] = {
    "time": _time,
    "once": _once,
    "compared": comparisons,
    "operations": _operations,
    "correctness": _correctness,
    "memory": _memory,
}


def _notes(name: str, entries: list[Entry], rows: list[Row]) -> list[str]:
    """What must stand beneath a table, as sentences."""
    found = []
    if name == "time":
        for entry in entries:
            if mapping(entry.record.correctness).get("verified") is False:
                found.append(f"{shown(entry.record.contender)} gave wrong pictures: see Correctness.")
    if name == "memory":
        found += [
            f"How it was read: {words}." for words in dict.fromkeys(row["sources"] for row in rows) if words
        ]
    if name == "compared":
        tests = dict.fromkeys(row["test"] for row in rows if row["test"])
        found += [f"Test: {test}." for test in tests]
        if any(row["interval"][1] is None for row in rows):
            found.append(
                "An interval of 0–∞ comes of too few rounds: below six, nothing can be called a difference."
            )
        if any(row["floor"] is None for row in rows):
            found.append(
                "Where the noise floor was not measured, or has no bound, nothing is called a difference."
            )
    return found
