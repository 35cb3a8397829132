"""`clearway warmup`: makes ready what a first picture would wait for, and says what it cost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from clearway.cli.generate import loaded
from clearway.cli.options import add_plain, add_request_options, request_from, size, with_adopted
from clearway.cli.output import print_json, print_table, say
from clearway.cli.progress import stoppable
from clearway.errors import RequestError

if TYPE_CHECKING:
    from clearway.warmup import WarmUp

NAMES = ("warmup",)
PARTS = {"text": ("text_encoder", "text_encoder_2"), "sampling": ("unet",), "vae": ("vae",)}
"""Which parts of a model run in which stage."""


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "warmup",
        help="make ready what a first picture would wait for",
        description="Draws a few steps at each size, so that kernels are tested, tuned and compiled before a "
        "picture is asked for. What lies on disk afterwards serves every later command; captured graphs live "
        "in one process, so a program of yours calls clearway.warm_up at its start.",
    )
    parser.add_argument("named", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument(
        "--sizes", type=_sizes, metavar="WxH,WxH", help="several sizes, e.g. 512x512,384x640 (the model's)"
    )
    parser.add_argument(
        "--windows", type=int, default=1, metavar="N", help="prompts of up to N times 75 tokens (1)"
    )
    add_request_options(parser)
    add_plain(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Warms up; exit code 0, or what the error says."""
    from clearway.models import chosen
    from clearway.pipeline import check
    from clearway.warmup import warm_up

    if args.named is not None and args.model is not None:
        raise RequestError("MODEL and --model were both given; one of them is enough")
    args.model = args.model if args.named is None else args.named
    if args.sizes and (args.size or args.width is not None or args.height is not None):
        raise RequestError("--sizes and --size, --width or --height were both given; one of them is enough")
    request = check(request_from(args))
    with stoppable() as stop, chosen.plainly(args.plain):
        model = loaded(args)
        request = with_adopted(request, args, model)
        stop.begin()
        made = warm_up(model, args.sizes, request=request, windows=args.windows, on_event=stop)
    for note in (*model.notes, *made.notes):
        say(note)
    if args.json:
        print_json(made.as_dict())
    else:
        _tell(made)
    return 0


def _tell(made: WarmUp) -> None:
    """Part by part: what it cost and what ran it."""
    rows = [("SIZE", "PART", "SECONDS", "RAN")]
    for one in made.sizes:
        batches = " and ".join(map(str, one.batch_sizes))
        label = f"{one.width} x {one.height}, batch {batches}"
        for name, seconds in one.seconds.items():
            if name in PARTS:
                rows.append((label, name, f"{seconds:.3f}", _routes(one.routes, PARTS[name])))
                label = ""
        rest = [value for name, value in one.seconds.items() if name not in PARTS]
        rows.append(("", "other", f"{sum(rest):.3f}", _ops(one.routes)))
    print_table(rows)
    print(f"{made.model} is warm on {made.device} after {made.total_s:.2f} s")


def _routes(routes: Any, parts: tuple[str, ...]) -> str:
    return ", ".join(
        f"{route} {count}" for route, count in routes.items() if route.partition("/")[0] in parts
    )


def _ops(routes: Any) -> str:
    """The implementations of ops that ran."""
    known = {part for parts in PARTS.values() for part in parts}
    ran = [f"{route} {count}" for route, count in routes.items() if route.partition("/")[0] not in known]
    return ", ".join(ran)


def _sizes(text: str) -> list[tuple[int, int]]:
    return [size(one) for one in text.split(",")]
