"""`clearway generate PROMPT`: draws, saves each group while the next is drawn, says where it is."""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearway.cli.options import (
    add_plain,
    add_request_options,
    names_dtypes,
    precision_from,
    request_from,
    with_adopted,
)
from clearway.cli.output import print_json, say
from clearway.cli.progress import Progress, stoppable
from clearway.cli.saver import Saver
from clearway.errors import ClearwayError, RequestError
from clearway.types import Event, PicturesDone

if TYPE_CHECKING:
    from clearway.models import Model
    from clearway.request import Request
    from clearway.result import Result

NAMES = ("generate",)
FOLDER = "pictures"
EMBEDDED = "embedded"


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="draw pictures from words",
        description="Draws pictures from words. What is left open comes from the model's own defaults.",
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help='what to draw; "(word:1.2)" stresses a word'
    )
    add_request_options(parser)
    add_plain(parser)
    out = parser.add_argument_group("output")
    out.add_argument(
        "-o", "--output", metavar="FILE|DIR", default=None, help=f"where to (the folder {FOLDER})"
    )
    out.add_argument("--format", choices=("png", "jpg", "webp"), help="for folders (png)")
    out.add_argument("--evidence", action="store_true", help="also write machine, routes and times into it")
    out.add_argument("--from", dest="source", metavar="FILE", help="repeat this picture; options change it")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def chosen_format(asked: str | None, target: str | None) -> str:
    """The format for folders; RequestError where a file's name says another one."""
    from clearway.image import FORMATS

    text = target or ""
    suffix = "" if text.endswith("/") or Path(text).is_dir() else Path(text).suffix.lower()
    if asked is not None and suffix in FORMATS and FORMATS[suffix] != FORMATS[f".{asked}"]:
        raise RequestError(f"--format {asked} was asked for and the output is {target}; one of them would do")
    return asked or "png"


def run(args: argparse.Namespace) -> int:
    """Draws; exit code 0, or what the error says."""
    from clearway import image
    from clearway.models import chosen
    from clearway.pipeline import check, generate

    repeated = _read(args.source) if args.source is not None else None
    if args.prompt is None and repeated is None:
        raise RequestError('no prompt was given; try: clearway generate "a red apple"')
    request = check(request_from(args, repeated))
    target = FOLDER if args.output is None else args.output
    args.format = chosen_format(args.format, target)
    image.check_target(target, request.count, format=args.format)
    load_ms = 0.0

    def save(result: Result) -> list[Path]:
        timings = {"load": load_ms, **result.timings_ms}
        evidence = json.dumps(_evidence(result, model, timings)) if args.evidence else None
        return _save(result, target, args.format, evidence)

    def told(path: Path) -> None:
        if not args.json:
            progress.write(str(path))

    with (
        stoppable() as stop,
        Progress() as progress,
        chosen.plainly(args.plain),
        Saver(save, told) as saver,
    ):
        begun = time.perf_counter()
        model = loaded(args, repeated)
        load_ms = (time.perf_counter() - begun) * 1000
        if repeated is None:
            request = with_adopted(request, args, model)
        gc.freeze()  # what is loaded stays: the collector need not walk it again
        for note in model.notes:
            say(note)

        def listen(event: Event) -> None:
            progress(event)
            if isinstance(event, PicturesDone):
                saver.put(event.result)
            saver.collect()
            stop(event)

        stop.begin()
        result = generate(request, model, listen)
    for note in result.notes:
        say(note)
    suffix = Path(target).suffix.lower()
    if any(path.suffix.lower() != suffix for path in saver.paths if suffix and not Path(target).is_dir()):
        say(f"{suffix} cannot hold every picture or its parameters; those are saved as PNG")
    timings = {"load": load_ms, **result.timings_ms, "save": saver.seconds * 1000}
    if args.json:
        print_json(_summary(result, model, saver.paths, timings))
    return 0


def _save(result: Result, target: str, format: str, evidence: str | None) -> list[Path]:
    """Saves where it was asked; where that fails, in the temporary folder, and says so: nothing is lost."""
    from clearway import image

    try:
        return image.save(result, target, format=format, evidence=evidence)
    except ClearwayError as error:
        rescue = Path(tempfile.gettempdir()) / "clearway-pictures"
        try:
            kept = image.save(result, rescue, format="png", evidence=evidence)
        except ClearwayError:
            raise error from None
        names = ", ".join(map(str, kept))
        raise type(error)(f"{error}; the pictures of this group are kept as {names}") from error


def _read(source: str) -> str:
    """The infotext of the picture to repeat."""
    from clearway.image import read_metadata

    found = read_metadata(source)
    if not found.infotext:
        raise RequestError(f"--from {source}: the picture carries no parameters that can be repeated")
    return found.infotext


def loaded(args: argparse.Namespace, repeated: str | None = None) -> Model:
    """The model that was named, or the one that the repeated picture names, on the device that was."""
    from clearway import infotext
    from clearway.device import pick
    from clearway.models import load

    values = infotext.parse(repeated).values if repeated else {}
    device = pick(args.device)
    model = load(
        _known(values) if args.model is None else args.model,
        device=device,
        precision=precision_from(args, device, repeated) if repeated or names_dtypes(args) else None,
        local_files_only=args.local_files_only,
        allow_pickle=args.allow_pickle,
        memory_limit_bytes=args.memory_limit_bytes,
    )
    wanted = values.get("Model hash")
    if wanted and wanted != model.hash:
        say(f"the picture was made by model {wanted}, this is {model.name} ({model.hash}); it will differ")
    if repeated:
        for key in infotext.unread(repeated):
            say(f"the picture's {key!r} is not applied")
    return model


def _known(values: Mapping[str, str]) -> str | Path:
    """The model a picture names, among this machine's: a stranger's picture chooses no path and no hub."""
    from clearway.models import find

    name = values.get("Model", EMBEDDED)
    if name == EMBEDDED:
        return name
    found = find(name)
    if found is None:
        raise RequestError(
            f"the picture was made with model {name!r}, which is in no folder of CLEARWAY_MODELS; "
            "--model says where it is, or which other one to use"
        )
    return found


def _evidence(result: Result, model: Model, timings_ms: dict[str, float]) -> dict[str, Any]:
    """Machine, routes and stage times, for the picture's separate text chunk."""
    from clearway import __version__, device

    return {
        "clearway": __version__,
        "machine": device.machine(),
        "device": device.describe(model.device),
        "model": {"name": model.name, "hash": model.hash, "family": model.family.name},
        "precision": {name: getattr(model.precision, name) for name in model.precision.__slots__},
        "choices": asdict(result.choices),
        "routes": dict(result.routes),
        "timings_ms": {name: round(value, 3) for name, value in timings_ms.items()},
    }


def _summary(result: Result, model: Model, paths: list[Path], timings_ms: dict[str, float]) -> dict[str, Any]:
    request: Request = replace(result.request)
    return {
        "paths": [str(path) for path in paths],
        "seeds": list(result.seeds),
        "timings_ms": {name: round(value, 3) for name, value in timings_ms.items()},
        "choices": asdict(result.choices),
        "routes": dict(result.routes),
        "model": {"name": model.name, "hash": model.hash, "family": model.family.name},
        "device": str(model.device),
        "precision": {name: getattr(model.precision, name) for name in model.precision.__slots__},
        "request": request.as_dict(),
        "infotexts": list(result.infotexts),
        "notes": [*model.notes, *result.notes],
    }
