"""What `clearway select` prints: the candidates, and a selection with its evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clearway.cli.output import print_json, print_table

if TYPE_CHECKING:
    from clearway.measure.candidates import Candidate

ORDER = ("chosen", "left out", "measured", "lost", "rejected", "not decided", "not here")


def list_all(as_json: bool, listed: Sequence[Candidate]) -> int:
    """Every candidate, with what asks for it or why it is not here."""
    if as_json:
        print_json([one.as_dict() for one in listed])
        return 0
    asks = {"same": "by default", "changed precision": "with --precision", "less work": "with --less-work"}
    rows = [
        (one.name, "not here", one.absent) if one.absent else (one.name, asks[one.section], one.why)
        for one in listed
    ]
    print_table([("CANDIDATE", "MEASURED", "WHAT"), *rows])
    print("Tuned routes are added when the shapes of a generation have been measured.")
    return 0


def tell(content: Mapping[str, Any]) -> None:
    """The outcome, for a person."""
    from clearway.measure.select import lost_by
    from clearway.measure.trial import percent

    outcome, request = content["outcome"], content["request"]
    trials = sorted(outcome["trials"], key=lambda row: ORDER.index(row["status"]))
    rows = []
    for row in trials:
        ratio = lost_by(row)
        time = "" if ratio is None else percent(ratio)
        rows.append((row["name"], row["section"], row["status"], time, row["why"]))
    print_table([("CANDIDATE", "SECTION", "STATUS", "TIME", "WHY"), *rows])
    for step in outcome["combination"]:
        if "pays" in step:
            print(f"{step['step']}: {step['why']}")
    sheets = [row["result"]["sheet"] for row in trials if row["result"] and row["result"].get("sheet")]
    for sheet in sheets:
        print(f"contact sheet: {sheet}")
    for note in outcome["notes"]:
        print(note)
    where = f"{content['model']}, {request['width']} x {request['height']}, {content['provenance']['device']}"
    if outcome["verification"]:
        print(f"chosen for {where}: {' + '.join(outcome['chosen'])}; {outcome['verification']['why']}")
    else:
        if outcome["complete"]:
            print(f"nothing was faster on {where}: it runs plainly")
        else:
            print(f"nothing was faster so far (the same command goes on) on {where}")
