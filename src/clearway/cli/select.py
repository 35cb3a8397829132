"""`clearway select`: finds out by whole generations what is fastest here, and keeps it with its evidence."""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearway.cli.options import add_request_options, names_dtypes, precision_from, request_from
from clearway.cli.output import print_json, say
from clearway.cli.select_text import list_all, tell
from clearway.errors import RequestError, UnavailableError, nearest, one_line
from clearway.request import Request

if TYPE_CHECKING:
    from clearway.measure.candidates import Candidate
    from clearway.measure.generations import Generations
    from clearway.measure.select import Outcome
    from clearway.measure.trial import Pictures, Terms
    from clearway.models import Model

NAMES = ("select",)
SHEETS = "contact-sheets"
SHEET_ROWS = 6
MODES = ("dry_run", "explain", "adopt", "forget", "abandon")
"""What is done in place of measuring."""


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "select",
        help="find out what is fastest here, and use it",
        description="Measures ways to run a model on this machine by whole generations that take turns, and "
        "stores the fastest that draws the same pictures, with its evidence; generate uses it from then on "
        "for this model, size class and dtypes. What changes pictures is measured only if asked for and used "
        "only if adopted by name. It can be stopped at any time: the same command goes on where it was.",
    )
    add = parser.add_argument
    add("--prompt", dest="prompts", action="append", metavar="TEXT", help="one of yours; may be repeated")
    add("--scenario", metavar="NAME", help="a named benchmark's request in place of prompts")
    add("--precision", action="store_true", help="also measure other dtypes: pictures change")
    add("--less-work", action="store_true", help="also measure NGMS, fewer steps: pictures change")
    add("--adopt", action="append", metavar="NAME", help="use one of those that were measured from now on")
    add("--abandon", action="store_true", help="stop using all that was adopted for this model")
    add(
        "--explain", action="store_true", help="show what was chosen, what lost and by how much; runs nothing"
    )
    add("--forget", action="store_true", help="delete what was chosen for this model and size")
    add("--dry-run", action="store_true", help="list the candidates; runs nothing")
    add("--fresh", action="store_true", help="measure anew what was measured before")
    add("--rounds", type=_positive, default=12, metavar="N", help="rounds of a trial, at least 6 (12)")
    add(
        "--limit-s",
        type=float,
        default=300.0,
        metavar="S",
        help="begin nothing after this many seconds (300)",
    )
    add(
        "--generations",
        type=_positive,
        default=50,
        metavar="N",
        help="how many generations a start is charged to (50)",
    )
    add("--max-memory", type=float, metavar="GIB", help="the most memory that a choice may need")
    add("--min-psnr", type=float, default=40.0, metavar="DB", help="what pictures must keep (40)")
    add("--sheets", default=SHEETS, metavar="DIR", help=f"where contact sheets go ({SHEETS})")
    add("--json", action="store_true", help="print one JSON object")
    add_request_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Selects, or does what the options ask in place of it; exit code 0, or what the error says."""
    from clearway.models import chosen

    if args.rounds < 6:
        raise RequestError(f"--rounds {args.rounds} cannot tell anything from noise; at least 6 are needed")
    if not args.limit_s > 0 or not 0 < (1.0 if args.max_memory is None else args.max_memory) < math.inf:
        raise RequestError("--limit-s and --max-memory must be above 0")
    if math.isnan(args.min_psnr):
        raise RequestError("--min-psnr nan is no number of dB; 40 is usual")
    modes = [f"--{name.replace('_', '-')}" for name in MODES if getattr(args, name)]
    if len(modes) > 1 and modes != ["--forget", "--abandon"]:
        raise RequestError(f"{' and '.join(modes)} were asked for at once; one of them is enough")
    model, request, prompts = _asked(args)
    with chosen.set_aside():
        assert request.width and request.height
        size = request.width, request.height
        if args.forget or args.abandon:
            return _forget(args, model, size)
        if args.explain:
            return _explain(args, model, size)
        if args.adopt:
            return _adopt(args, model, size)
        return _select(args, model, request, prompts)


def _asked(args: argparse.Namespace) -> tuple[Model, Request, tuple[str, ...]]:
    """The model, its request with nothing left open, and the prompts."""
    from clearway.device import pick
    from clearway.models import load
    from clearway.pipeline import check

    request, source, device = request_from(args), args.model, pick(args.device)
    prompts, dtypes = tuple(args.prompts or ()), None  # None: those that generate takes
    if args.scenario is not None:
        from clearway.measure.scenario import find

        scenario = find(args.scenario)
        if scenario.what != "whole":
            raise RequestError(
                f"scenario {args.scenario} is one call of {scenario.what}; whole generations decide"
            )
        sides = ("width", "height") if args.size else ()
        names = {one.name for one in fields(Request) if getattr(args, one.name, None) is not None}
        request = replace(scenario.request(0), **{one: getattr(request, one) for one in (*names, *sides)})
        dtypes = scenario.precision_on(device) if scenario.precision else None
        prompts = prompts or (scenario.prompt,)
        if source is None:
            source = scenario.model
            if source.endswith("-random"):
                raise RequestError(
                    f"scenario {args.scenario} draws with random weights, in which no picture can be judged; "
                    "give --model"
                )
    model = load(
        "embedded" if source is None else source,
        device=device,
        precision=precision_from(args, device) if names_dtypes(args) else dtypes,
        local_files_only=args.local_files_only,
        allow_pickle=args.allow_pickle,
        memory_limit_bytes=args.memory_limit_bytes,
    )
    for note in model.notes:
        say(note)
    if request.seed < 0:
        request = replace(request, seed=1)  # any will do, and the same one when this is run again
    return model, check(request.resolved(model.defaults)), prompts


def _select(args: argparse.Namespace, model: Model, request: Request, prompts: tuple[str, ...]) -> int:
    from clearway import home
    from clearway.measure import candidates
    from clearway.measure.generations import PROMPTS, Generations
    from clearway.measure.journal import Journal
    from clearway.measure.select import select
    from clearway.measure.trial import Terms
    from clearway.models.accelerate import OPS

    listed = candidates.list_candidates(model, request)
    if args.dry_run:
        return list_all(args.json, listed)
    wanted = {candidates.SAME}
    wanted |= {candidates.PRECISION} if args.precision else set()
    wanted |= {candidates.LESS} if args.less_work else set()
    if len(wanted) > 1:
        _make_folder(args.sheets)
    terms = Terms(
        rounds=args.rounds,
        limit_s=args.limit_s,
        generations=args.generations,
        max_memory_bytes=None if args.max_memory is None else int(args.max_memory * 2**30),
        min_psnr_db=args.min_psnr,
    )
    evaluator = Generations(model, request, prompts or PROMPTS, _loader(args, model))
    question = _question(model, request, evaluator.prompts, terms)
    journal = Journal(home.path("selecting"), question)
    if args.fresh:
        journal.drop()
    elif journal.resumed:
        say(f"{journal.resumed} measurements are there from before; --fresh would measure them anew")
    outcome = select(
        evaluator,
        [one for one in listed if one.section in wanted],
        terms,
        journal,
        propose=lambda findings: candidates.routed(findings, OPS),
        say=say,
        show=_shower(args, evaluator),
    )
    content = _content(model, request, evaluator.prompts, terms, outcome)
    _keep(model, request, outcome, content)
    if args.json:
        print_json(content)
    else:
        tell(content)
    return 0


def _loader(args: argparse.Namespace, model: Model) -> Any:
    """Gives the same model in other dtypes."""
    from clearway.models import load

    def again(precision: Any) -> Model:
        source = "embedded" if model.name == "embedded" else model.path
        return load(
            source,
            device=model.device,
            precision=precision,
            local_files_only=True,
            allow_pickle=args.allow_pickle,
            memory_limit_bytes=model.memory_limit_bytes,
        )

    return again


def _question(model: Model, request: Request, prompts: Sequence[str], terms: Terms) -> dict[str, Any]:
    """What an earlier measurement must have been about to count for this one."""
    import torch

    from clearway import __version__
    from clearway.models import chosen

    assert request.width and request.height
    rules = {name: value for name, value in asdict(terms).items() if name != "limit_s"}
    return {
        "clearway": __version__,
        "key": chosen.key(model, request.width, request.height),
        "model": [str(path) for path in model.weights_files],
        "request": request.as_dict(),
        "prompts": list(prompts),
        "terms": rules,
        "threads": torch.get_num_threads(),
    }


def _shower(args: argparse.Namespace, evaluator: Generations) -> Any:
    """Writes the contact sheet of a candidate; gives its path."""

    def show(one: Candidate, base: Pictures, arm: Pictures) -> str:
        from clearway.measure.contact_sheet import Row, write

        numbers = sorted(base.keys() & arm.keys())[:SHEET_ROWS]
        rows = [Row(evaluator.label(number), base[number][0], arm[number][0]) for number in numbers]
        file = "".join(sign if sign.isalnum() else "-" for sign in one.name.lower()) + ".png"
        names = ("as it is", one.name)
        return str(write(Path(args.sheets) / file, f"{one.section}: {one.name}, {one.why}", names, rows))

    return show


def _content(
    model: Model, request: Request, prompts: Sequence[str], terms: Terms, outcome: Outcome
) -> dict[str, Any]:
    """The selection with all its evidence, as it is stored and printed."""
    from clearway.measure.provenance import provenance

    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "choices": asdict(outcome.change.choices()),
        "batch_size": outcome.change.request.get("batch_size"),
        "tuned": {op: dict(table) for op, table in outcome.change.tuned.items()},
        "model": model.name,
        "request": request.as_dict(),
        "prompts": list(prompts),
        "terms": asdict(terms),
        "provenance": provenance(model.device, precision=asdict(model.precision)),
        "outcome": outcome.as_dict(),
    }


def _keep(model: Model, request: Request, outcome: Outcome, content: Mapping[str, Any]) -> None:
    """Stores the selection, and tuned routes for the device; an unfinished one replaces no finished one.

    What changes pictures and was measured before can still be adopted by its name.
    """
    from clearway.models import chosen
    from clearway.ops import state

    assert request.width and request.height
    size = request.width, request.height
    held = chosen.find(model, *size) or {}
    finished = held.get("outcome", {}).get("complete") is True
    stays = not outcome.complete and (finished or (bool(held) and not outcome.chosen))
    kept = chosen.store(model, *size, _adoptable(*((held, content) if stays else (content, held))))
    if stays:
        say("this did not get to an end: what was chosen before stays")
    elif outcome.change.tuned:
        kind = model.device.kind
        before = state.tuned_tables(kind)
        tables = {op: {**before.get(op, {}), **table} for op, table in outcome.change.tuned.items()}
        kept = state.store_tuned(kind, {**before, **tables}) and kept
    if not kept:
        say("the state folder cannot be written: what was found is not remembered")


def _adoptable(content: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """A selection with the rows of another one that can be adopted and that it lacks."""
    from clearway.measure.candidates import SAME

    outcome = content.get("outcome", {})
    rows = outcome.get("trials", [])
    names = {row["name"] for row in rows if row["status"] == "measured"}
    more = [
        row
        for row in other.get("outcome", {}).get("trials", [])
        if row["section"] != SAME and row["status"] == "measured" and row["name"] not in names
    ]
    kept = [row for row in rows if row["name"] not in {one["name"] for one in more}]
    return {**content, "outcome": {**outcome, "trials": [*kept, *more]}} if more else content


def _make_folder(name: str) -> None:
    """UnavailableError where contact sheets could not be written, said before anything is measured."""
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(f"--sheets {name} could not be made: {one_line(error)}") from error


def _explain(args: argparse.Namespace, model: Model, size: tuple[int, int]) -> int:
    """--explain: the stored evidence; or why there is none that holds."""
    from clearway.measure.trial import percent
    from clearway.models import chosen

    found, using = chosen.find(model, *size), _adopted(model)
    if args.json:
        old = [{"date": date, "differs": differs} for date, differs in chosen.outdated(model, *size)]
        print_json({"selection": found, "adopted": using, "outdated": old})
        return 0
    if found:
        floor = percent(math.exp(found["outcome"]["floor"]), sign=False)
        print(f"measured {found['date']}, noise floor {floor}")
        tell(found)
    else:
        print(
            f"nothing was selected for {model.name} at {size[0]} x {size[1]} in these dtypes: "
            f"it runs {chosen.described(chosen.default(model.device.kind))}"
        )
    for date, differs in chosen.outdated(model, *size):
        print(f"a selection of {date or 'unknown date'} does not hold: {'; '.join(differs)}")
    if using["names"]:
        print(f"adopted: {', '.join(using['names'])}")
    return 0


def _adopted(model: Model) -> dict[str, Any]:
    """What is adopted for the model, seen from outside `set_aside`."""
    from clearway.models import chosen

    return asdict(chosen.adopted(model.path, model.device.kind, aside=False))


def _adopt(args: argparse.Namespace, model: Model, size: tuple[int, int]) -> int:
    """--adopt NAME: what changes pictures, once it has been measured here."""
    from clearway.measure.candidates import SAME
    from clearway.models import chosen

    usual = replace(model, precision=precision_from(args, model.device))  # where adopted dtypes are in use
    rows: dict[str, Any] = {}
    for found in (chosen.find(usual, *size), chosen.find(model, *size)):
        rows |= {row["name"]: row for row in found["outcome"]["trials"]} if found else {}
    measured = {
        name: row for name, row in rows.items() if row["section"] != SAME and row["status"] == "measured"
    }
    for name in args.adopt:
        if name not in measured:
            hint = (
                f"nearest: {nearest(name, measured)}"
                if measured
                else "none was; see --precision, --less-work"
            )
            raise RequestError(f"--adopt {name!r}: it was not measured here for this model and size; {hint}")
    for name in args.adopt:
        change = measured[name]["change"]
        if chosen.adopt(model, name, change["precision"], change["request"]) is None:
            raise UnavailableError("the state folder cannot be written: nothing can be adopted")
        if not args.json:
            print(f"adopted: {name} ({measured[name]['why']})")
    if args.json:
        print_json(_adopted(model))
    return 0


def _forget(args: argparse.Namespace, model: Model, size: tuple[int, int]) -> int:
    """--forget and --abandon."""
    from clearway.models import chosen

    forgotten = args.forget and chosen.forget(model, *size)
    names = chosen.abandon(model) if args.abandon else ()
    if args.json:
        print_json({"forgotten": forgotten, "abandoned": list(names)})
        return 0
    if args.forget:
        runs = chosen.described(chosen.default(model.device.kind))
        print(f"forgotten: the model runs {runs}" if forgotten else "there was nothing to forget")
    if args.abandon:
        print(f"abandoned: {', '.join(names)}" if names else "nothing was adopted")
    return 0


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number above 0")
    return int(text)
