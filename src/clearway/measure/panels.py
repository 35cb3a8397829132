"""Which plots stand over the tables of a ledger, made from the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clearway.measure import figures, plots
from clearway.measure.comparisons import BASE
from clearway.measure.figures import mapping, number
from clearway.measure.groups import Entry, Group
from clearway.measure.markup import Markup, shown
from clearway.measure.tables import Row, Table, ceilings

STAGES = "Where the time goes"
WIDE = (STAGES,)
"""Titles of plots that take the whole width."""
_SANE = (1e-9, 1e12)  # of what goes on a logarithmic axis, or is added up


def panels(
    group: Group, ledger: str, entries: Sequence[Entry], found: Sequence[Table]
) -> list[tuple[str, Markup]]:
    """Titles and plots of one ledger, scenario and kind of work; none where the records lack the data."""
    return _PANELS[ledger](group, entries, [row for table in found for row in table.rows])


def strips(group: Group, entries: Sequence[Entry]) -> list[plots.Strip]:
    """Each entry's samples and percentiles in seconds, for `plots.strips`."""
    found: list[plots.Strip] = []
    for entry in entries:
        given = mapping(entry.record.throughput)
        anew = figures.throughput(given)
        low, middle, high = (anew[key] for key in ("p20_s", "p50_s", "p80_s"))
        if low is not None and middle is not None and high is not None and 0 <= low <= middle <= high:
            found.append((_label(group, entry), figures.numbers(given.get("samples_s")), low, middle, high))
    return found


def _label(group: Group, entry: Entry) -> str:
    letter = group.letter(entry)
    return f"{shown(entry.record.contender)}{f' · run {letter}' if letter else ''}"


def _throughput(group: Group, entries: Sequence[Entry], rows: Sequence[Row]) -> list[tuple[str, Markup]]:
    drawn = []
    if times := strips(group, entries):
        drawn.append(("Seconds a call", plots.strips(times)))
    ratios = [row for row in rows if row.get("ratio", 0) > 0]
    others = list(dict.fromkeys(row["against"] for row in ratios))
    base = BASE if BASE in others else next(iter(others), "")
    compared = [
        (row["contender"], row["ratio"], *row["interval"], row["floor"], row["verdict"])
        for row in ratios
        if row["against"] == base
    ]
    if compared:
        drawn.append((f"Ratio of times to {base}, 95 % interval, noise floor shaded", plots.forest(compared)))
    bars = []
    for entry in entries:
        given = mapping(mapping(entry.record.throughput).get("stages_ms"))
        taken = {shown(name): number(value) or 0.0 for name, value in given.items()}
        sane = {name: value for name, value in taken.items() if _SANE[0] < value < _SANE[1]}
        if sane:
            bars.append((_label(group, entry), sane))
    return [*drawn, (STAGES, plots.stages(bars))] if bars else drawn


def _operations(group: Group, entries: Sequence[Entry], rows: Sequence[Row]) -> list[tuple[str, Markup]]:
    roofs = next((roof for entry in entries if len(roof := ceilings(entry)) == 2), None)
    points = [
        (row["place"], row["name"], row["flops"] / row["bytes_moved"], row["tflop_per_s"])
        for row in rows
        if row["flops"] and row["bytes_moved"] and row["tflop_per_s"]
    ]
    points = [point for point in points if all(_SANE[0] < value < _SANE[1] for value in point[2:])]
    if not roofs or not points or not all(_SANE[0] < value < _SANE[1] for value in roofs.values()):
        return []
    return [("Operations under this machine's measured ceilings", plots.roofline(points, **roofs))]


def _memory(group: Group, entries: Sequence[Entry], rows: Sequence[Row]) -> list[tuple[str, Markup]]:
    series = []
    for entry in entries:
        given = mapping(entry.record.memory).get("timeline")
        points = [figures.numbers(one) for one in given] if isinstance(given, list) else []
        line = sorted((one[0], one[1]) for one in points if len(one) == 2 and min(one) >= 0)
        if len(line) > 1:
            series.append((_label(group, entry), line))
    return [("Driver's bytes over the run, peak beside the name", plots.timeline(series))] if series else []


_PANELS: dict[str, Callable[[Group, Sequence[Entry], Sequence[Row]], list[tuple[str, Markup]]]] = {
    "throughput": _throughput,
    "operations": _operations,
    "correctness": lambda group, entries, rows: [],
    "memory": _memory,
}
