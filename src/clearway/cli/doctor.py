"""`clearway doctor`: the machine, the versions, what is available and why something is not."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from clearway import __version__, home
from clearway.cli.output import print_json, print_table

NAMES = ("doctor",)


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("doctor", help="say what this machine can do, and why not")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def report() -> dict[str, Any]:
    """Everything `doctor` says, as one object."""
    from clearway import device
    from clearway.models import chosen, embedded_problem

    devices = {}
    for kind in device.KINDS:
        reason = device.absent(kind)
        devices[kind] = {
            "available": reason is None,
            "reason": reason,
            "name": None if reason else device.describe(device.pick(kind)),
        }
    chosen_device = device.pick()
    precision = device.default_precision(chosen_device)
    problem = embedded_problem()
    return {
        "clearway": __version__,
        "machine": device.machine(),
        "devices": devices,
        "default_device": str(chosen_device),
        "default_precision": {name: getattr(precision, name) for name in precision.__slots__},
        "default_choices": asdict(chosen.default(chosen_device.kind)),
        "runs": chosen.described(chosen.default(chosen_device.kind)),
        "plain": chosen.plain(),
        "embedded_model": {"available": problem is None, "reason": problem},
        "home": str(home.root()),
    }


def run(args: argparse.Namespace) -> int:
    """Prints the report; exit code 0 where at least the embedded model can draw, else 3."""
    found = report()
    usable = found["embedded_model"]["available"]
    if args.json:
        print_json(found)
        return 0 if usable else 3
    machine = found["machine"]
    rows = [
        ("clearway", found["clearway"]),
        ("system", machine["system"] + (f", macOS {machine['macos']}" if machine["macos"] else "")),
        (
            "processor",
            f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} torch threads",
        ),
        ("memory", f"{machine['memory_bytes'] / 2**30:.1f} GiB"),
        *((name, version) for name, version in machine["versions"].items()),
    ]
    for kind, state in found["devices"].items():
        rows.append((f"device {kind}", state["name"] if state["available"] else f"no: {state['reason']}"))
    rows += [
        ("default device", found["default_device"]),
        ("default dtypes", ", ".join(f"{k} {v}" for k, v in found["default_precision"].items())),
        ("networks run", _runs(found)),
        ("embedded model", "ready" if usable else f"no: {found['embedded_model']['reason']}"),
        ("state folder", found["home"]),
    ]
    print_table(rows)
    return 0 if usable else 3


def _runs(found: dict[str, Any]) -> str:
    """How networks run where nothing was selected, and what would change it."""
    if found["plain"]:
        return "plainly, since CLEARWAY_PLAIN is set"
    hint = (
        "clearway select may find better" if found["runs"] == "plainly" else "CLEARWAY_PLAIN=1 turns it off"
    )
    return f"{found['runs']} ({hint})"
