"""The table of claims from the records of bench/claims.py: what each contender took beside the others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearway.measure.groups import Entry, Group
    from clearway.measure.record import Record

RESULTS = Path(__file__).parents[1] / "bench" / "results"
FOLDER = "claims"
AGAINST = {"diffusers": "Diffusers", "diffusers-compile": "with `torch.compile`"}
HEADING = (
    "| | contender | seconds | of it PNG | over Diffusers | over Diffusers with `torch.compile` "
    "| PSNR to eager | error over eager's |"
)
CAPTION = (
    "Seconds are the median of a picture (of a network: of a call); times over the others' are below 1 where "
    "it is faster, with the 95 % interval, and in brackets where nothing may be called a difference. The "
    "picture is compared with Diffusers' eager one in the same dtype; the error is that of the latents (of a "
    "network: of its output) against float32, over the one that eager itself has in this dtype."
)


def claims_block() -> str:
    """The tables of every machine that has records of claims; nothing where none has."""
    from clearway.measure import record

    files = sorted(RESULTS.glob(f"*/{FOLDER}/*.jsonl"))
    found = [(path.relative_to(RESULTS).as_posix(), one) for path in files for one in record.read(path)]
    return "\n".join(lines(found))


def lines(records: Iterable[tuple[str, Record]]) -> list[str]:
    """The tables of records with the names of their files, in Markdown; empty where nothing is published."""
    from clearway.measure.groups import arrange

    made: list[str] = []
    for group in arrange(records).groups:
        rows = [row for entry in group.published() if (row := _row(group, entry))]
        if not rows:
            continue
        made += [f"**{group.machine}**, {_builds(group)}:", "", HEADING, f"|{' --- |' * 2}{' --: |' * 6}"]
        made += ["| " + " | ".join(row) + " |" for row in _without_repeats(rows)]
        made.append("")
    return [*made, CAPTION] if made else []


def _row(group: Group, entry: Entry) -> list[str] | None:
    """The cells of one contender; None where it was not timed."""
    from clearway.measure.figures import mapping, number, plain
    from clearway.measure.markup import shown

    given = mapping(entry.record.throughput)
    median = number(given.get("p50_s"))
    if median is None:
        return None
    images = number(given.get("images")) or 1.0
    png, found = number(given.get("png_p50_s")), mapping(entry.record.correctness)
    stock, latents = mapping(found.get("stock")), mapping(found.get("latents"))
    psnr, error = number(stock.get("psnr_db")), number(latents.get("rel_l2"))
    budget = number(found.get("budget_rel_l2"))
    beside = _ratios(group, entry)
    return [
        shown(entry.record.scenario),
        shown(entry.record.contender),
        plain(median / images, 3),
        "" if png is None else plain(png / images, 2),
        *(beside.get(name, "") for name in AGAINST),
        "equal" if stock.get("identical") else "" if psnr is None else f"{psnr:.1f} dB",
        f"{error / budget:.2f}" if error is not None and budget else "",
    ]


def _ratios(group: Group, entry: Entry) -> dict[str, str]:
    """The time over that of the others, by their names."""
    from clearway.measure.comparisons import comparisons
    from clearway.measure.figures import ratio

    made = {}
    for row in comparisons(group, entry, every=True):
        low, high = row["interval"]
        words = ratio(row["ratio"])
        words += f" ({ratio(low)}–{ratio(high)})" if high is not None else ""
        made[row["against"]] = words if row["verdict"] in ("faster", "slower") else f"[{words}]"
    return made


def _without_repeats(rows: list[list[str]]) -> Iterable[list[str]]:
    """The rows with the scenario's name only where it changes."""
    last = None
    for name, *cells in rows:
        yield ["" if name == last else name, *cells]
        last = name


def _builds(group: Group) -> str:
    """The builds of all runs, each once with its commits."""
    from clearway.measure.markup import shown

    made: dict[str, dict[str, None]] = {}
    for run in group.runs.values():
        build = f"PyTorch {shown(run.get('torch') or '')}, Diffusers {shown(run.get('diffusers') or '')}"
        made.setdefault(build, {})[_when(run)] = None
    return "; ".join(f"{build}, {', '.join(whens)}" for build, whens in made.items())


def _when(run: dict[str, Any]) -> str:
    from clearway.measure.markup import shown

    commit, date = str(run.get("commit") or "")[:10], str(run.get("date") or "")[:10]
    return f"commit {shown(commit)} ({date})" if commit else date
