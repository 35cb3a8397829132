"""`clearway profile PROMPT`: one generation stage by stage, what bounds it, and what could save how much."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearway.cli import generate as drawing
from clearway.cli.options import add_plain, add_request_options, request_from, with_adopted
from clearway.cli.output import print_json, say
from clearway.cli.progress import stoppable
from clearway.errors import RequestError

if TYPE_CHECKING:
    from clearway.measure.profiling import Profile
    from clearway.models import Model
    from clearway.result import Result

NAMES = ("profile",)


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "profile",
        help="measure one generation stage by stage",
        description="Measures one generation stage by stage: time on host and device, rates against this "
        "machine's measured ceilings, memory, what bounds it and what could save how much at most. Takes "
        "what generate takes.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to draw")
    add_request_options(parser)
    add_plain(parser)
    out = parser.add_argument_group("output")
    out.add_argument(
        "-o", "--output", metavar="FILE|DIR", help="keep the pictures (they are saved and dropped)"
    )
    out.add_argument("--format", choices=("png", "jpg", "webp"), help="for folders (png)")
    out.add_argument("--evidence", action="store_true", help="also write machine, routes and times into it")
    out.add_argument(
        "--from", dest="source", metavar="FILE", help="this picture's request; options change it"
    )
    out.add_argument("--trace", metavar="FILE", help="write a trace for chrome://tracing or ui.perfetto.dev")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; exit code 0, or what the error says."""
    from clearway import image
    from clearway.measure import trace
    from clearway.models import chosen
    from clearway.pipeline import check

    repeated = drawing._read(args.source) if args.source is not None else None
    if args.prompt is None and repeated is None:
        raise RequestError('no prompt was given; try: clearway profile "a red apple"')
    request = check(request_from(args, repeated))
    args.format = drawing.chosen_format(args.format, args.output)
    if args.output is not None:
        image.check_target(args.output, request.count, format=args.format)
    if args.trace is not None:
        trace.check_target(args.trace)
    kept: list[Path] = []

    with (
        tempfile.TemporaryDirectory(prefix="clearway-profile-") as spare,
        stoppable() as stop,
        chosen.plainly(args.plain),
    ):
        begun = time.perf_counter()
        model = drawing.loaded(args, repeated)
        load_ms = (time.perf_counter() - begun) * 1000
        gc.freeze()
        if repeated is None:
            request = with_adopted(request, args, model)
        for note in model.notes:
            say(note)

        def save(result: Result, keep: bool) -> None:
            evidence = None
            if args.evidence:
                evidence = json.dumps(
                    drawing._evidence(result, model, {"load": load_ms, **result.timings_ms})
                )
            if keep and args.output is not None:
                kept.extend(drawing._save(result, args.output, args.format, evidence))
            else:
                image.save(result, spare, format=args.format, evidence=evidence)

        profiler = _profiler(model, save)
        profiler.on_event = stop
        if sys.stderr.isatty():
            say("drawing it several times, with and without listening")
        stop.begin()
        found = profiler.profile(request)
    about = _about(found, model, profiler.ceilings, load_ms)
    about["paths"] = [str(path) for path in kept]
    for note in found.result.notes:
        say(note)
    if args.json:
        print_json(about)
    else:
        from clearway.cli.profile_text import lines

        for line in lines(about):
            print(line)
    if args.trace is not None:  # last: a disk that is full costs no more than it
        trace.write(args.trace, trace.events(found.runs), {"provenance": about["provenance"]})
    return 0


def _profiler(model: Model, save: Any) -> Any:
    """The profiler of a model with the real clock, meters and ceilings."""
    from clearway.measure.ceilings import ceilings
    from clearway.measure.clock import HostTimer
    from clearway.measure.memory import Meter
    from clearway.measure.profiling import Profiler
    from clearway.pipeline import generate

    timer = HostTimer(model.device)

    @functools.cache
    def limits(dtype: str) -> Any:
        return ceilings(model.device, dtype, timer, tf32=model.precision.tf32)

    return Profiler(model, generate, save, timer, limits, lambda: Meter(model.device))


def _about(found: Profile, model: Model, ceilings: Any, load_ms: float) -> dict[str, Any]:
    """Everything that is said, as one object; the text is made of it."""
    import psutil
    import torch

    from clearway.measure.advice import Machine, advice, bottleneck
    from clearway.measure.inside import descend
    from clearway.measure.provenance import provenance

    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    choices = found.result.choices  # those of the device or of `select` where the model has none of its own
    machine = Machine(model.device.kind, cores, torch.get_num_threads(), ceilings, choices.executor)
    precision = {name: getattr(model.precision, name) for name in model.precision.__slots__}
    rows = [asdict(row) | {"ms": row.ms} for row in found.rows]
    dtypes = sorted({row.dtype for row in found.rows if row.tflop_per_s is not None})
    heaviest = max(found.calls_ms, key=lambda part: sum(found.calls_ms[part]), default="unet")
    return {
        "provenance": provenance(model.device, precision=precision, choices=asdict(choices)),
        "model": {"name": model.name, "hash": model.hash, "family": model.family.name},
        "device": str(model.device),
        "request": found.request.as_dict(),
        "load_ms": load_ms,
        "first_ms": found.first_ms,
        "whole_ms": found.whole_ms,
        "unprofiled_ms": found.unprofiled_ms,
        "profiled_ms": found.profiled_ms,
        "overhead": found.overhead,
        "ceilings": {dtype: asdict(ceilings(dtype)) for dtype in dtypes},
        "stages": rows,
        "calls_ms": found.calls_ms,
        "modules": [asdict(one) for one in found.inside],
        "heaviest_network": heaviest,
        "descent": [(depth, one.path) for depth, one in descend(found.inside, heaviest)],
        "routes": dict(found.result.routes),
        "compiler": found.compiler,
        "graphs": found.graphs,
        "unknown_operations": found.unknown,
        "bottleneck": bottleneck(found, machine),
        "advice": [asdict(one) | {"times": one.times} for one in advice(found, machine, model.precision)],
        "notes": [*model.notes, *found.result.notes, *found.notes],
    }
