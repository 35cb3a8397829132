"""`clearway ops`: what runs the arithmetic here. List, check in isolated processes, and explain choices."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from clearway.cli.output import print_json, print_table, say
from clearway.errors import RequestError, UnavailableError, nearest

if TYPE_CHECKING:
    from clearway.ops.contract import Implementation, Op
    from clearway.ops.state import Verdict

NAMES = ("ops",)


def add(commands: Any) -> None:
    """Adds the command and its two sub-commands to the parser."""
    parser = commands.add_parser(
        "ops",
        help="list, check and explain what runs the arithmetic",
        description="Lists every op with its implementations and what is known of each on this machine. "
        "`clearway ops check [OP]` runs every case of each in a process of its own; "
        "`clearway ops explain OP` says for each case what is taken and why the others are not.",
    )
    parser.add_argument("action", nargs="?", choices=("list", "check", "explain"), help="list if left out")
    parser.add_argument("op", nargs="?", metavar="OP", help="one op; check takes all if left out")
    parser.add_argument("--device", metavar="NAME", help="device to speak of (the best one here)")
    parser.add_argument(
        "--dtype", metavar="NAME", default="float32", help="for explain: the inputs' (float32)"
    )
    parser.add_argument("--output", metavar="FILE", help="for check: also write the JSON to this file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Lists, checks or explains; check gives exit code 3 where an implementation is not sound."""
    from clearway import device, ops

    known = ops.discover()
    if args.op is not None and args.op not in known:
        raise RequestError(f"op {args.op!r} is not known; nearest: {nearest(args.op, known)}")
    chosen = [known[args.op]] if args.op else list(known.values())
    if args.action == "explain":
        if args.op is None:
            raise RequestError(f"explain needs an op; one of {', '.join(known)}")
        return _explain(chosen[0], args)
    if args.action == "check":
        return _check(chosen, device.pick(args.device).kind, args)
    return _list(chosen, args)


def _list(ops: list[Op], args: argparse.Namespace) -> int:
    """Op, implementation, device and verdict; runs nothing."""
    rows = [
        {"op": op.name, "implementation": one.name, "device": one.device, **_standing(one, kind)}
        for op in ops
        for one in (*op.implementations, op.reference)
        for kind in [_kind(one)]
    ]
    if args.json:
        print_json(rows)
        return 0
    table = [
        (row["op"], row["implementation"], row["device"], row["verdict"] + row["detail"]) for row in rows
    ]
    print_table([("OP", "IMPLEMENTATION", "DEVICE", "HERE"), *table])
    return 0


def _kind(one: Implementation) -> str:
    """The device family to speak of: an implementation's own, or this machine's best."""
    from clearway import device

    return device.pick().kind if one.device == "any" else one.device


def _standing(one: Implementation, kind: str) -> dict[str, str]:
    """What is known of an implementation here: stock, sound, untested, failed, refused or absent."""
    from clearway import device
    from clearway.ops import state

    reason = device.absent(kind) or one.absent()
    if reason:
        return {"verdict": "absent", "detail": f": {reason}"}
    if one.stock:
        return {"verdict": "stock", "detail": ""}
    found = state.known(one, kind)
    if found is None:
        return {"verdict": "untested", "detail": ": tested before first use, or by clearway ops check"}
    if found.sound:
        wrong = f"; not used {found.reason}" if found.reason else ""
        return {"verdict": "sound", "detail": f" in {', '.join(found.dtypes)}, tested {found.date}{wrong}"}
    when = f", tested {found.date}" if found.tested else ""
    return {"verdict": _failed(found), "detail": f": {found.reason}{when}"}


def _failed(found: Verdict) -> str:
    """What an implementation that is not sound is said to be."""
    if not found.tested:
        return "untested"
    return "failed" if found.taken else "refused"


def _check(ops: list[Op], kind: str, args: argparse.Namespace) -> int:
    """Every case of every implementation that this machine may run, each in a process of its own."""
    import datetime

    from clearway import device
    from clearway.ops import state, verdicts

    results: list[dict[str, Any]] = []
    for op in ops:
        mine = [one for one in op.implementations if one.device in (kind, "any")]
        if not mine and not args.json:
            others = ", ".join(f"{one.name} is for {one.device}" for one in op.implementations)
            say(f"{op.name}: nothing to check on {kind}; {others}, and the reference is the yardstick")
        for one in mine:
            row: dict[str, Any] = {"op": op.name, "implementation": one.name, "device": kind}
            reason = one.absent()
            if reason:
                results.append({**row, "verdict": "absent", "reason": reason, "cases": []})
                continue
            cases: list[dict[str, str]] = []

            def heard(case: str, problem: str, cases: list[dict[str, str]] = cases) -> None:
                cases.append({"case": case, "problem": problem})

            found = verdicts.isolated(one, kind, every_case=True, on_line=heard)
            verdict = "sound" if found.sound else _failed(found)
            results.append({**row, "verdict": verdict, "reason": found.reason, "cases": cases})
            if not args.json:
                say(f"{op.name}/{one.name}: {len(cases)} cases, {_words(results[-1])}")
    failed = [row for row in results if row["verdict"] in ("failed", "untested")]
    report = {
        "machine": device.machine(),
        "device": device.describe(device.pick(kind)),
        "identity": state.identity(kind),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "results": results,
    }
    if args.output:
        _write(report, args.output)
    if args.json:
        print_json(report)
    else:
        rows = [(row["op"], row["implementation"], str(len(row["cases"])), _words(row)) for row in results]
        print_table([("OP", "IMPLEMENTATION", "CASES", f"ON {kind.upper()}"), *rows] if rows else [])
    return 3 if failed else 0


def _words(row: dict[str, Any]) -> str:
    return str(row["verdict"]) + (f": {row['reason']}" if row["reason"] else "")


def _write(report: dict[str, Any], file: str) -> None:
    import json
    from pathlib import Path

    from clearway.errors import one_line

    try:
        Path(file).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UnavailableError(f"--output {file} could not be written: {one_line(error)}") from error


def _explain(op: Op, args: argparse.Namespace) -> int:
    """What each case of an op takes and why it does not take the others; nothing is run."""
    import torch

    from clearway import device
    from clearway.ops import selftest

    kind = args.device.partition(":")[0] if args.device else device.pick().kind
    if kind not in device.KINDS:
        raise RequestError(f"device {args.device!r} is not known; it is one of {', '.join(device.KINDS)}")
    dtype = device.dtype(args.dtype)
    explained: list[dict[str, Any]] = []
    for name, given in op.cases():
        with torch.device("meta"), torch.no_grad():
            case = selftest.made(op, given)
            decisions = op.explain(*selftest._on(case, "meta", dtype), kind=kind)
        taken = next((decision for decision in decisions if decision.taken), None)
        explained.append(
            {
                "case": name,
                "taken": taken.implementation if taken else None,
                "note": taken.reason if taken else "",
                "refused": {d.implementation: d.reason for d in decisions if not d.taken},
            }
        )
    if args.json:
        print_json({"op": op.name, "device": kind, "dtype": args.dtype, "cases": explained})
        return 0
    print(f"{op.name} on {kind} in {args.dtype}, case by case")
    for entry in explained:
        note = f" ({entry['note']})" if entry["note"] else ""
        print(f"  {entry['case']}: {entry['taken']}{note}")
    print("not taken")
    for name, reason, cases in _reasons(explained):
        where = "" if len(cases) == len(explained) else f" [{', '.join(cases)}]"
        print(f"  {name}: {reason}{where}")
    return 0


def _reasons(explained: list[dict[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """(implementation, reason, cases) of what was not taken, each reason once, in order of appearance."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in explained:
        for name, reason in entry["refused"].items():
            found.setdefault((name, reason), []).append(entry["case"])
    order = list(dict.fromkeys(name for name, _ in found))
    return [
        (name, reason, cases) for wanted in order for (name, reason), cases in found.items() if name == wanted
    ]
