"""`clearway bench [SCENARIO…]`: named work, several contenders in turns, one record each, four ledgers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearway.cli.output import print_json, print_table, say, write
from clearway.errors import RequestError, UnavailableError, one_line

if TYPE_CHECKING:
    from clearway.device import Device
    from clearway.measure.harness import Plan
    from clearway.measure.record import Record
    from clearway.measure.scenario import Scenario

NAMES = ("bench",)
DEFAULT = "embedded"


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="time named work against other engines",
        description="Runs named scenarios: several contenders on the same weights in one process, taking "
        "turns, warmed, checked against a reference made in the same run. Results are records, one JSON "
        "object a line, which `clearway report` shows; one whose intended path did not run is refused.",
    )
    add = parser.add_argument
    add("scenarios", metavar="SCENARIO", nargs="*", help=f"a scenario's name or JSON file ({DEFAULT})")
    add("--list", action="store_true", help="list scenarios and contenders, run nothing")
    add("--contenders", metavar="A,B", help="who runs; also clearway:executor=…,layout=… (the usual ones)")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="change the scenario, e.g. steps=4")
    add("--device", metavar="NAME", help="auto, cuda, cuda:1, mps, xpu or cpu (auto)")
    add("--rounds", type=int, metavar="N", help="rounds in which every contender runs once (10)")
    add(
        "--floor-rounds",
        type=int,
        metavar="N",
        help="rounds of one contender against itself (--rounds)",
    )
    add("--limit-s", type=float, metavar="S", help="bound a scenario's time: nothing long is begun after it")
    add("--price-per-hour", type=float, metavar="X", help="the machine's, for the cost of 1,000 pictures")
    add("--against", metavar="PYTHON", help="alternate with another environment's interpreter")
    add("--no-check", action="store_true", help="make no reference: nothing is verified")
    add("--output", metavar="FILE", help="add the records to this file; until a scenario ends: FILE.partial")
    add("--share", metavar="FILE", help="write the records to this file without anything private")
    add("--pictures", metavar="DIR", help="save each contender's picture and the reference's, for `report`")
    add("--json", action="store_true", help="print the records as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the scenarios; exit code 3 where a named contender was refused or failed, or nobody succeeded."""
    from clearway.measure import contenders, scenario

    if args.list:
        return _list(args.json)
    plan, names = _plan(args), _names(args.contenders or "")
    chosen = [one.changed(_changes(args.set)) for one in scenario.every(args.scenarios or [DEFAULT])]
    for name in names:
        contenders.find(name)
    if args.against:
        from clearway.measure.against import check_python

        if ops := next((one.name for one in chosen if one.what == "ops"), None):
            raise RequestError(f"--against alternates contenders, and {ops} times the ops' implementations")
        check_python(args.against)
    _check_targets(args)
    from clearway import device as machine

    device = machine.pick(args.device)
    named = bool(names)
    names = names or ([contenders.OWN] if args.against else contenders.usual(device.kind))
    records: list[Record] = []
    kept: dict[Any, Any] = {}
    try:
        for one in chosen:
            if args.against:
                found = _against(args, one, names, device, plan)
            else:
                found = _bench(args, one, names, device, plan, kept)
            records += found
            for record in found if args.output else ():
                _append(args.output, record)
            if args.output:
                Path(f"{args.output}.partial").unlink(missing_ok=True)
    finally:  # also where one of several scenarios fails, or is stopped: what was measured is shown
        if records:
            _print(records, args.json)
    if not records:
        raise UnavailableError(f"nothing was measured: the limit of {args.limit_s} s had passed before")
    if args.share:
        from clearway.measure import share

        share.write(args.share, records)
        say(f"wrote {args.share}: the same figures, nothing private")
    withheld = [one for one in records if one.refused or one.failed]
    # what nobody named may be unable to do the scenario's work; what was named must
    return 3 if withheld and (named or len(withheld) == len(records)) else 0


def _check_targets(args: argparse.Namespace) -> None:
    """UnavailableError where what is measured could not be written, said before anything is."""
    for option in ("output", "share", "pictures"):
        name = getattr(args, option)
        if name is None:
            continue
        target = Path(name)
        folder = target if option == "pictures" else target.parent
        try:
            while not folder.exists() and folder != folder.parent:
                folder = folder.parent
            if option != "pictures" and target.is_dir():
                why = "it is a folder"
            elif not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
                why = f"{folder} is no folder to write to"
            elif target.exists() and not os.access(target, os.W_OK):
                why = "it is read-only"
            else:
                continue
        except OSError as error:
            why = one_line(error)
        raise UnavailableError(f"--{option} {name} could not be written: {why}")
    if args.output and args.share and Path(args.output).resolve() == Path(args.share).resolve():
        raise RequestError("--output and --share name one file; what is shared replaces what is in its file")


def _bench(
    args: argparse.Namespace,
    scenario: Scenario,
    names: list[str],
    device: Device,
    plan: Plan,
    kept: dict[Any, Any],
) -> list[Record]:
    from clearway.measure.harness import bench
    from clearway.measure.record import replace

    partial = (lambda found: replace(f"{args.output}.partial", found)) if args.output else None
    folder = args.pictures
    keep = (lambda whose, images: _save(folder, scenario.name, whose, images)) if folder else None
    return bench(scenario, names, device, plan, tell=say, on_picture=keep, on_records=partial, kept=kept)


def _against(
    args: argparse.Namespace, scenario: Scenario, names: list[str], device: Device, plan: Plan
) -> list[Record]:
    from clearway.measure.against import Worker, alternate

    records = []
    for name in names:
        with Worker(sys.executable) as this, Worker(args.against) as other:
            records += alternate(scenario, name, device, plan, (this.ask, other.ask), say)
    return records


def _plan(args: argparse.Namespace) -> Plan:
    from clearway.measure.clock import FEWEST
    from clearway.measure.harness import ROUNDS, Plan

    rounds = ROUNDS if args.rounds is None else args.rounds
    given = (("rounds", rounds, 1), ("floor-rounds", args.floor_rounds, 1), ("limit-s", args.limit_s, 0))
    for name, value, least in given:
        if value is not None and not value >= least:
            raise RequestError(f"--{name} {value:g} is out of range; it goes from {least}")
    if args.price_per_hour is not None and not args.price_per_hour >= 0:
        raise RequestError(f"--price-per-hour {args.price_per_hour:g} is out of range; it goes from 0")
    if rounds < FEWEST:
        say(f"{rounds} rounds are too few to call any difference; that takes {FEWEST} or more")
    return Plan(
        rounds=rounds,
        floor_rounds=args.floor_rounds,
        limit_s=args.limit_s,
        price_per_hour=args.price_per_hour,
        check=not args.no_check,
    )


def _changes(pairs: list[str]) -> dict[str, str]:
    """What --set says, by field."""
    found = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise RequestError(f"--set {pair!r:.60} is not KEY=VALUE, e.g. steps=4")
        found[key] = text
    return found


def _names(text: str) -> list[str]:
    """Contenders separated by commas; a further choice belongs to the "clearway:…" before it."""
    names: list[str] = []
    for piece in filter(None, (one.strip() for one in text.split(","))):
        if names and ":" in names[-1] and "=" in piece and ":" not in piece:
            names[-1] += f",{piece}"
        else:
            names.append(piece)
    return names


def _list(as_json: bool) -> int:
    """The named scenarios and contenders."""
    from clearway.measure import contenders, scenario

    scenarios = [(one.name, one.title) for one in scenario.every()]
    known = [(one.name, one.title) for one in contenders.CONTENDERS.values()]
    if as_json:
        print_json({"scenarios": dict(scenarios), "contenders": dict(known)})
        return 0
    print_table([("SCENARIO", ""), *scenarios])
    print()
    print_table([("CONTENDER", ""), *known])
    return 0


def _append(file: str, record: Record) -> None:
    from clearway.measure.record import append

    try:
        append(file, record)
    except OSError as error:
        raise UnavailableError(f"--output {file} could not be written: {one_line(error)}") from error


def _save(folder: str, scenario: str, whose: str, images: Any) -> None:
    """Writes the first of some pictures under the name that `clearway report` looks for."""
    from PIL import Image

    from clearway.measure.pictures import picture_name

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[0]).save(Path(folder) / picture_name(scenario, whose))
    except OSError as error:
        raise UnavailableError(f"--pictures {folder} could not be written: {one_line(error)}") from error


def _print(records: list[Record], as_json: bool) -> None:
    """The records as JSON, or as the report's four ledgers."""
    from clearway.measure.record import to_line

    if as_json:
        print_json([json.loads(to_line(one)) for one in records])
        return
    from clearway.measure.groups import arrange
    from clearway.measure.report import markdown

    for line in markdown(arrange(("this run", one) for one in records)).splitlines():
        write(line)
