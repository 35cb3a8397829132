"""`clearway samplers` and `clearway schedule NAME --steps N`: what there is, and the sigmas themselves."""

from __future__ import annotations

import argparse
from typing import Any

from clearway.cli.output import print_json, print_table

NAMES = ("samplers", "schedule")


def add(commands: Any) -> None:
    """Adds both commands to the parser."""
    listing = commands.add_parser("samplers", help="list samplers and schedules")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=run_list)
    one = commands.add_parser("schedule", help="print the sigmas of a schedule")
    one.add_argument("name", metavar="NAME", help="a schedule's label (Karras) or a sampler's (DPM++ 2M)")
    one.add_argument("--steps", type=int, default=20, metavar="N", help="sampling steps (20)")
    one.add_argument("--sigma-min", type=float, metavar="S", help="smallest sigma above 0")
    one.add_argument("--sigma-max", type=float, metavar="S", help="largest sigma")
    one.add_argument("--rho", type=float, metavar="R", help="Karras' exponent (7)")
    one.add_argument("--json", action="store_true", help="print JSON")
    one.set_defaults(run=run_schedule)


def run_list(args: argparse.Namespace) -> int:
    """Prints every sampler and schedule with what it takes."""
    from clearway import sampling

    samplers: list[dict[str, Any]] = [
        {
            "name": sampler.label,
            "aliases": list(sampler.aliases),
            "schedule": sampler.default_schedule or sampler.own_schedule or "Automatic",
            "second_order": sampler.second_order,
            "noise": sampler.noise,
            "options": list(sampler.options),
        }
        for sampler in sampling.samplers()
    ]
    schedules: list[dict[str, Any]] = [
        {"name": schedule.label, "aliases": list(schedule.aliases), "options": list(schedule.options)}
        for schedule in sampling.schedules()
    ]
    if args.json:
        print_json({"samplers": samplers, "schedules": schedules})
        return 0
    print_table(
        [
            ("SAMPLER", "SCHEDULE", "NOISE", "OPTIONS"),
            *((s["name"], s["schedule"], s["noise"], " ".join(s["options"])) for s in samplers),
        ]
    )
    print()
    print_table([("SCHEDULE", "OPTIONS"), *((s["name"], " ".join(s["options"])) for s in schedules)])
    return 0


def run_schedule(args: argparse.Namespace) -> int:
    """Prints the sigmas of one schedule over SD 1.x's noise levels."""
    from clearway import sampling
    from clearway.errors import RequestError, nearest
    from clearway.models.noise_levels import scaled_linear

    given = {name: getattr(args, name) for name in ("sigma_min", "sigma_max", "rho")}
    options = {name: value for name, value in given.items() if value is not None}
    labels = {schedule.label.lower() for schedule in sampling.schedules()}
    names = labels | {alias.lower() for schedule in sampling.schedules() for alias in schedule.aliases}
    if args.steps < 1 or args.steps > 1000:
        raise RequestError(f"--steps {args.steps} is out of range; it goes from 1 to 1000")
    if args.name.lower() in names:
        label = sampling.resolve("Euler", args.name)[1]
        sigmas = sampling.schedule(args.name, args.steps, scaled_linear(), **options)
    else:
        try:
            sampler, label = sampling.resolve(args.name, None)
        except RequestError:
            known = [one.label for one in sampling.schedules()] + [one.label for one in sampling.samplers()]
            raise RequestError(
                f"{args.name!r} is neither a schedule nor a sampler; nearest: {nearest(args.name, known)}"
            ) from None
        sigmas = sampling.sigmas_for(sampler, label, args.steps, scaled_linear(), **options)
    if args.json:
        print_json({"schedule": label, "steps": args.steps, "sigmas": sigmas.tolist()})
    else:
        print("\n".join(f"{sigma:.6f}" for sigma in sigmas.tolist()))
    return 0
