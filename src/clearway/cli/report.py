"""`clearway report FILE…`: measured records as four ledgers, in Markdown or as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from clearway.cli.output import print_json, say, write
from clearway.errors import RequestError, UnavailableError, one_line

NAMES = ("report",)
SUFFIXES = (".html", ".htm", ".md")


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="show measured records as tables and plots",
        description="Reads files that `clearway bench` wrote, here or elsewhere, and shows four ledgers: "
        "throughput, single operations, correctness, memory. Figures are computed anew from raw samples.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="a file of records, one JSON object a line")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write .html or .md (Markdown on standard output)"
    )
    parser.add_argument(
        "--pictures",
        metavar="DIR",
        help="for .html: show the PNGs that `clearway bench --pictures DIR` saved "
        "(SCENARIO--CONTENDER.png; of several machines: each in a folder named after the machine)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report, or writes it to the file named."""
    suffix = Path(args.output).suffix.lower() if args.output else ".md"
    if suffix not in SUFFIXES:
        raise RequestError(f"--output {args.output}: a report ends in {' or '.join(SUFFIXES)}")
    if args.pictures and suffix == ".md":
        raise RequestError("--pictures needs a page to stand in: --output FILE.html")
    from clearway.measure.report import as_json, load, markdown

    found = load(args.files)
    if not found.groups:
        raise RequestError(
            f"{', '.join(args.files)}: no record is in it; clearway bench --output writes them"
        )
    if args.output:
        _write(args.output, markdown(found) if suffix == ".md" else _page(found, args.pictures))
        say(f"wrote {args.output}")
    if args.json:
        print_json(as_json(found))
    elif not args.output:
        for line in markdown(found).splitlines():
            write(line)
    return 0


def _page(found: Any, folder: str | None) -> str:
    from clearway.measure.page import page
    from clearway.measure.pictures import pictures

    text = page(found, pictures(folder) if folder else None)
    if folder and "<img " not in text:
        say(f"no picture in {folder} is of one result with a correctness ledger (SCENARIO--CONTENDER.png)")
    return text


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnavailableError(f"--output {file} could not be written: {one_line(error)}") from error
