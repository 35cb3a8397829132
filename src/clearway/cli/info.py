"""`clearway info FILE…`: what pictures say of how they were made."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from clearway.cli.output import print_json, write

if TYPE_CHECKING:
    from clearway.image.read import Metadata

NAMES = ("info",)


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "info",
        help="read a picture's parameters",
        description="Reads pictures of Clearway, the WebUI and its kin, ComfyUI, NovelAI.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a PNG, JPEG, WebP, AVIF or GIF")
    parser.add_argument("--json", action="store_true", help="print JSON: an object, a list of several")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the parameters found; exit code 0 also where there are none."""
    from clearway.image import read_metadata

    several, separator = len(args.files) > 1, "\n"
    found = [(file, read_metadata(file)) for file in args.files]
    if args.json:
        values = [_values(file, one) for file, one in found]
        print_json(values if several else values[0])
        return 0
    for number, (file, one) in enumerate(found):
        if several:
            write(f"{separator if number else ''}== {file}")
        _print(file, one)
    return 0


def _values(file: str, found: Metadata) -> dict[str, Any]:
    """What was found as JSON values."""
    from clearway import infotext

    parsed = infotext.parse(found.infotext) if found.infotext else None
    return {
        "file": str(file),
        "kind": found.kind,
        "format": found.format,
        "width": found.width,
        "height": found.height,
        "infotext": found.infotext,
        "prompt": parsed.prompt if parsed else None,
        "negative_prompt": parsed.negative_prompt if parsed else None,
        "parameters": dict(parsed.values) if parsed else None,
        "comfyui": {
            "summary": found.summary,
            "prompt": found.comfyui_prompt,
            "workflow": found.comfyui_workflow,
        }
        if found.kind == "comfyui"
        else None,
        "evidence": found.evidence,
    }


def _print(file: str, found: Metadata) -> None:
    """What was found as text."""
    if found.infotext:
        write(found.infotext)
    if found.kind == "comfyui":
        write(f"ComfyUI picture, {found.width} x {found.height}")
        for key, value in (found.summary or {}).items():
            write(f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
        for name, graph in (("prompt", found.comfyui_prompt), ("workflow", found.comfyui_workflow)):
            if graph is not None:
                write(f"{name}: {json.dumps(graph, ensure_ascii=False)}")
    if found.evidence:
        write(f"evidence: {json.dumps(found.evidence, ensure_ascii=False)}")
    if not found.infotext and found.kind != "comfyui":
        write(f"{file}: a {found.format} of {found.width} x {found.height} without parameters")
