"""`clearway info FILE`: what a picture says of how it was made."""

from __future__ import annotations

import argparse
import json
from typing import Any

from clearway.cli.output import print_json, write

NAMES = ("info",)


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "info",
        help="read a picture's parameters",
        description="Reads pictures of Clearway, the WebUI and its kin, ComfyUI, NovelAI.",
    )
    parser.add_argument("file", metavar="FILE", help="a PNG, JPEG, WebP, AVIF or GIF")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the parameters found; exit code 0 also where there are none."""
    from clearway import infotext
    from clearway.image import read_metadata

    found = read_metadata(args.file)
    if args.json:
        parsed = infotext.parse(found.infotext) if found.infotext else None
        print_json(
            {
                "file": str(args.file),
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
        )
        return 0
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
        write(f"{args.file}: a {found.format} of {found.width} x {found.height} without parameters")
    return 0
