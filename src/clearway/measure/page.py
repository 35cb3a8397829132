"""A report as one HTML file: no script, nothing from the network, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from clearway import __version__
from clearway.measure import plots
from clearway.measure.doubts import conditions, doubts, withheld
from clearway.measure.groups import Entry, Group, Report, build_words
from clearway.measure.markup import Markup, shown, tag
from clearway.measure.panels import WIDE, panels, strips
from clearway.measure.pictures import GAIN, Pair, assign, pair
from clearway.measure.report import MEANING, TITLES, tally
from clearway.measure.tables import LEDGERS, WORK_WORDS, Column, Row, Table, scenarios, tables

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""What the page allows a browser: its own style and pictures inside it."""

Shots = Mapping[int, tuple[Path, Path | None]]
"""id of an entry -> its picture and its reference's."""

HOW_TO_READ = (
    "The four ledgers are four questions; nothing multiplies one by another. Machines and build channels are "
    "never in one table, nor are the three kinds of work: same arithmetic, changed precision, less work.",
    "Contenders took turns in one process. A ratio of times is the contender's over the other's, paired by "
    "round: below 1 is faster. A difference is called one only where the Wilcoxon signed-rank test finds it "
    "at 5 %, its 95 % interval excludes 1, and the ratio lies beyond the noise floor: what a contender "
    "differed by from itself, measured in the same run.",
    "Every figure was computed anew from the raw samples in the files. Losses stand beside wins.",
)


def page(report: Report, pictures: Mapping[str, Path] | None = None) -> str:
    """The whole page; `pictures` as `pictures.pictures` finds them."""
    title = "Clearway measurements"
    shots = assign(report, pictures or {})
    machines = [
        tag("section", *_machine(name, groups, shots), id=f"m{index}", class_="machine")
        for index, (name, groups) in enumerate(report.machines.items(), 1)
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8"))),
    )
    body = tag(
        "body",
        tag("header", tag("h1", title), _lead(report), class_="top"),
        _contents(report),
        tag("details", tag("summary", "How to read this"), *(tag("p", words) for words in HOW_TO_READ)),
        *machines,
        _side_by_side(report),
        tag("footer", f"Made by clearway report {__version__}."),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _lead(report: Report) -> Markup:
    return tag("p", f"From {', '.join(report.files) or 'no file'}.", class_="lead")


def _contents(report: Report) -> Markup:
    return tag(
        "nav",
        *(
            tag("a", tag("b", name), tag("span", *_chips(groups)), href=f"#m{index}")
            for index, (name, groups) in enumerate(report.machines.items(), 1)
        ),
    )


def _chips(groups: Sequence[Group]) -> list[Markup]:
    """How many results and comparisons went which way; zeros too."""
    total: dict[str, int] = {}
    for group in groups:
        for name, amount in tally(group).items():
            total[name] = total.get(name, 0) + amount
    return [
        tag(
            "span",
            tag("b", str(amount)),
            f" {name}",
            class_=f"chip {name.replace(' ', '-')}{'' if amount else ' nil'}",
        )
        for name, amount in total.items()
    ]


def _machine(name: str, groups: Sequence[Group], shots: Shots) -> list[Markup | None]:
    parts: list[Markup | None] = [tag("h2", name)]
    for group in groups:
        parts.append(tag("p", f"PyTorch {group.channel}", class_="channel"))
        parts += [_run(run, made, len(group.runs)) for run, made in group.runs.items()]
        parts.append(_apart(group))
        for index, ledger in enumerate(LEDGERS, 1):
            found = tables(group, ledger)
            parts.append(
                tag(
                    "section",
                    tag("h3", tag("span", str(index), class_="number"), ledger.capitalize()),
                    tag("p", MEANING[ledger], class_="meaning"),
                    *(_scenario(group, ledger, *key, found, shots) for key in _keys(found)),
                    None if found else tag("p", "Nothing of it was recorded.", class_="none"),
                    class_="ledger",
                )
            )
        parts.append(_conditions(group))
    return parts


def _run(run: str, made: Mapping[str, object], runs: int) -> Markup:
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in build_words(made)]
    return tag("div", tag("h4", f"Run {run}") if runs > 1 else None, tag("dl", *facts), class_="run")


def _apart(group: Group) -> Markup:
    """What has no figure, and what the raw data contradict."""
    held, wrong = withheld(group), doubts(group)
    parts = []
    if held:
        columns = [
            Column("scenario", "scenario", right=False),
            Column("contender", "contender", right=False),
            Column("run", "run", right=False),
            Column("what", "", right=False),
            Column("reason", "reason", right=False),
        ]
        parts += [tag("h4", "Refused or failed: no figure is shown"), _grid(columns, held)]
    if wrong:
        parts.append(
            tag("h4", "Contradicted by the records' own raw data: the tables have what the raw data give")
        )
        parts.append(tag("ul", *(tag("li", words) for words in wrong)))
    else:
        parts.append(tag("p", "Every summary in these records agrees with its raw data.", class_="none"))
    return tag("div", *parts, class_="apart")


def _keys(found: Sequence[Table]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((table.scenario, table.work) for table in found))


def _scenario(
    group: Group,
    ledger: str,
    scenario: str,
    work: str,
    found: Sequence[Table],
    shots: Shots,
) -> Markup:
    """One scenario and kind of work in one ledger: plots, then tables."""
    mine = [table for table in found if (table.scenario, table.work) == (scenario, work)]
    entries = next(kept for name, kind, kept in scenarios(group) if (name, kind) == (scenario, work))
    drawn = [_plot(title, one) for title, one in panels(group, ledger, entries, mine)]
    return tag(
        "article",
        tag("h4", scenario, tag("span", mine[0].work_words, class_=f"work {work.split()[0]}")),
        tag("p", mine[0].workload, class_="note") if ledger == "throughput" and mine[0].workload else None,
        tag("div", *drawn, class_="plots") if drawn else None,
        *(_table(table) for table in mine),
        _pictures(entries, shots) if ledger == "correctness" else None,
    )


def _plot(title: str, drawn: Markup) -> Markup:
    kind = "wide" if title in WIDE else None
    return tag("figure", tag("figcaption", title), drawn, class_=kind)


def _table(table: Table) -> Markup:
    notes = [tag("p", note, class_="note") for note in table.notes]
    caption = TITLES[table.name]
    return tag("div", _grid(table.columns, table.rows, caption), *notes, class_="table")


def _grid(columns: Sequence[Column], rows: Sequence[Row], caption: str | None = None) -> Markup:
    """A table; every cell carries its heading, so that a narrow screen can show rows as cards."""
    kept = [column for column in columns if any(column.text(row) for row in rows)]
    head = tag("tr", *(tag("th", column.heading, class_="num" if column.right else None) for column in kept))
    lines = (tag("tr", *(_cell(column, row) for column in kept)) for row in rows)
    title = tag("caption", caption) if caption else None
    return tag("table", title, tag("thead", head), tag("tbody", *lines))


def _cell(column: Column, row: Row) -> Markup:
    words = column.text(row)
    kind = words.replace(" ", "-").lower() if column.key in ("verdict", "verified", "what") else ""
    inside = tag("span", words, class_=f"verdict {kind}") if kind else words
    heading = column.heading or None
    return tag("td", inside, class_="num" if column.right else None, data_label=heading if words else None)


def _conditions(group: Group) -> Markup | None:
    rows = conditions(group)
    names = ("scenario", "contender", "run", "workload", "intended", "settings", "routes")
    columns = [Column(name, name, right=False) for name in names]
    return (
        tag("details", tag("summary", "What ran: settings and routes"), _grid(columns, rows))
        if rows
        else None
    )


def _pictures(entries: Sequence[Entry], shots: Shots) -> Markup | None:
    """The reference's picture, and each contender's beside its difference from it."""
    found = [
        (
            shown((entry.record.correctness or {}).get("reference") or ""),
            pair(shown(entry.record.contender), *shots[id(entry)]),
        )
        for entry in entries
        if id(entry) in shots
    ]
    drawn = [shot for name in dict.fromkeys(name for name, _ in found) for shot in _against(name, found)]
    words = "One round's pictures, without their reference."
    if any(one.difference for _, one in found):
        words = (
            f"One round's pictures; differences are shown × {GAIN}, and the figures below are of these two."
        )
    return tag("div", tag("p", words, class_="note"), *drawn, class_="pictures") if drawn else None


def _against(name: str, found: Sequence[tuple[str, Pair]]) -> list[Markup]:
    """The pairs with one reference, which stands once at their side."""
    mine = [one for own, one in found if own == name]
    reference = next((one.reference for one in mine if one.reference), None)
    shots = [shot for one in mine if reference is None or one.contender != name for shot in _shots(one)]
    if reference is None:
        return [tag("div", *shots, class_="shots")]
    side = tag("div", _shot(reference, f"{name}, the reference"), class_="reference")
    return [tag("div", side, tag("div", *shots, class_="shots"), class_="against")]


def _shots(one: Pair) -> list[Markup]:
    found = [_shot(one.picture, one.contender)]
    if one.difference and one.found:
        same = "identical" if one.found["identical"] else f"PSNR {one.found['psnr_db']:.1f} dB"
        words = f"difference × {GAIN}: largest {one.found['max_error']} of 255, {same}"
        found.append(_shot(one.difference, words, f"{one.contender}: difference"))
    return found


def _shot(address: str, words: str, alternative: str | None = None) -> Markup:
    return tag(
        "figure",
        tag("img", src=Markup(address), alt=alternative or words, loading="lazy"),
        tag("figcaption", words),
    )


def _side_by_side(report: Report) -> Markup | None:
    """Scenarios that several machines ran: a panel each, to one scale; no test is made across."""
    found: dict[tuple[str, str, str], dict[str, list[plots.Strip]]] = {}
    for group in report.groups:
        for name, work, entries in scenarios(group):
            if times := strips(group, entries):
                found.setdefault((name, work, group.channel), {})[group.machine] = times
    drawn = []
    for (name, work, channel), times_of in found.items():
        if len(times_of) > 1:
            most = max(plots.longest(times) for times in times_of.values())
            each = [_plot(machine, plots.strips(times, most=most)) for machine, times in times_of.items()]
            kind = tag("span", f"{WORK_WORDS[work]} · PyTorch {channel}", class_=f"work {work.split()[0]}")
            drawn.append(tag("article", tag("h4", name, kind), tag("div", *each, class_="plots")))
    if not drawn:
        return None
    words = "Seconds a call, one panel a machine, all to one scale. No test is made across machines."
    return tag(
        "section", tag("h2", "Side by side"), tag("p", words, class_="meaning"), *drawn, class_="machine"
    )
