"""`clearway models`: the model that ships here and those in the folders of CLEARWAY_MODELS."""

from __future__ import annotations

import argparse
from typing import Any

from clearway.cli.output import print_json, print_table, say

NAMES = ("models",)


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "models",
        help="list models that --model can name",
        description="Lists the embedded model and what lies in FOLDER and in the folders of CLEARWAY_MODELS.",
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="further folders to look in")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints each model with its family, or why it cannot be used; only file headers are read."""
    from clearway.models import available, library

    found = available(args.folders)
    if args.json:
        print_json(
            [
                {
                    "name": entry.name,
                    "path": str(entry.path),
                    "family": entry.family,
                    "problem": entry.problem,
                    "bytes": entry.size_bytes,
                }
                for entry in found
            ]
        )
        return 0
    rows = [
        (
            entry.name,
            f"{entry.size_bytes / 2**20:,.0f} MiB",
            entry.family or f"cannot be used: {entry.problem}",
        )
        for entry in found
    ]
    print_table([("NAME", "SIZE", "FAMILY"), *rows])
    for place in library.folders():
        if not place.is_dir():
            say(f"{library.VARIABLE} names {str(place)!r}, which is no folder")
    return 0
