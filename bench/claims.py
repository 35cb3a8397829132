"""The table of claims, measured: scenarios in order within a time limit, one file of records for each.

    CLEARWAY_COMMIT=... python bench/claims.py --part 1 --limit-s 540 --out bench/results/<machine>/claims
    python bench/claims.py --dry      # every part on this CPU with tiny models, two rounds, nothing kept

Part 1 is SDXL, part 2 SD 1.5 and the embedded model, part 3 what they leave out; `--only` picks scenarios of
any part. Within a part the model is built once and each network compiled once a size. A scenario's file is
written anew whenever more is known: what a limit cuts off is there, refused, with what it had. A scenario
that the time left is too short for is not begun, and said. The table ends the output.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clearway import device as machine
from clearway.device import Device
from clearway.measure import contenders, scenario
from clearway.measure.compiled import keeping
from clearway.measure.harness import Plan, bench
from clearway.measure.record import Record
from clearway.measure.record import replace as write
from clearway.measure.scenario import Scenario

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from docs_claims import lines

WHOLE = ("clearway", "diffusers-clearway", "diffusers", "diffusers-compile")
NETWORK = ("clearway", "diffusers", "diffusers-compile")
PAIR = ("clearway", "diffusers")
SPARE_S = 15.0  # of a part's limit: for writing down what there is
NEW_SIZE_S = 30.0  # what takes longer to get ready is not made ready for another size


@dataclass(frozen=True)
class Step:
    """One scenario: who runs it, how, how long it may take, and the least time it is begun with."""

    name: str
    arms: tuple[str, ...]
    least_s: float
    limit_s: float
    rounds: int = 10
    floor_rounds: int = 8
    pictures: int | None = None
    new_size: bool = True


PARTS = {
    1: (
        Step("sdxl-30", WHOLE, 200, 420),
        Step("unet-sdxl", NETWORK, 40, 150, rounds=12),
        Step("vae-1024", NETWORK, 35, 100, rounds=12),
        Step("sdxl-20-batch", ("clearway",), 60, 120, 6, 1, pictures=1, new_size=False),
    ),
    2: (
        Step("sd15-tuned-512-half-vae", WHOLE, 90, 240, rounds=20, floor_rounds=20),
        Step("unet-sd15", NETWORK, 20, 120, rounds=20, floor_rounds=20),
        Step("embedded", PAIR, 20, 60, rounds=20, floor_rounds=20),
        Step("sd15-tuned-384x640-half-vae", WHOLE, 90, 200, rounds=20, floor_rounds=20),
    ),
    3: (
        Step("sdxl-20-batch", PAIR, 120, 240, 6, 6, pictures=1, new_size=False),
        Step("sdxl-20-batch-bf16", ("clearway",), 60, 120, 4, 1, pictures=1, new_size=False),
        Step("sdxl-768x1344", WHOLE[:3], 60, 120),
        Step("sd15-batch-4", PAIR, 40, 80, pictures=1),
        Step("vae-512", PAIR, 20, 60, rounds=20, floor_rounds=20),
    ),
}


def main() -> int:
    """Runs what was asked for; exit code 1 where a scenario could not be run or was not begun."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=PARTS, help="which scenarios (all parts)")
    parser.add_argument("--only", metavar="A,B", default="", help="of these the ones named")
    parser.add_argument("--limit-s", type=float, default=float("inf"), metavar="S", help="for all of it")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where <scenario>.jsonl goes")
    parser.add_argument("--device", metavar="NAME", help="auto, cuda, cuda:1, mps or cpu (auto)")
    parser.add_argument("--dry", action="store_true", help="the same on the CPU with tiny models, two rounds")
    args = parser.parse_args()
    if args.out is None and not args.dry:
        parser.error("--out says where the records go")
    steps = [step for part, steps in PARTS.items() if args.part in (None, part) for step in steps]
    if args.only:
        named = args.only.split(",")
        every = {step.name: step for steps in reversed(PARTS.values()) for step in steps} | {
            step.name: step for step in steps
        }
        if unknown := [name for name in named if name not in every]:
            parser.error(f"no part has {', '.join(unknown)}")
        steps = [every[name] for name in named]
    out = args.out or Path(tempfile.mkdtemp(prefix="claims-"))
    if args.dry:
        torch.compile = functools.partial(torch.compile, backend="eager")  # type: ignore[assignment]
    return run(steps, machine.pick("cpu" if args.dry else args.device), out, args.limit_s, args.dry)


def run(steps: Sequence[Step], device: Device, out: Path, limit_s: float, dry: bool) -> int:
    """Measures the steps one after the other and prints the table; the exit code."""
    begun, kept, done = time.perf_counter(), dict[Any, Any](), list[Record]()
    missing: list[str] = []

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begun:.0f} s] {text}", flush=True)

    say(f"{device}, records go to {out}")
    with keeping():
        for step in steps:
            left = limit_s - SPARE_S - (time.perf_counter() - begun)
            if left < step.least_s:
                say(f"{step.name} is not begun: {left:.0f} s are left and it takes {step.least_s:.0f}")
                missing.append(step.name)
                continue
            try:
                done += measured(step, device, out, min(step.limit_s, left), dry, kept, say)
            except Exception as error:
                traceback.print_exc(file=sys.stdout)
                missing.append(step.name)
                if isinstance(error, getattr(torch, "AcceleratorError", ())):
                    say("the device has a fault: nothing measured on it after this would mean anything")
                    break
    say("done")
    print("\n".join(lines([("this run", one) for one in done])), flush=True)
    for one in done:
        if one.failed or one.refused:
            print(f"{one.scenario}, {one.contender}: {one.failed or one.refused}")
    if missing:
        print(f"without a complete result: {', '.join(missing)}")
    return 1 if missing else 0


def measured(
    step: Step, device: Device, out: Path, limit_s: float, dry: bool, kept: dict[Any, Any], say: Any
) -> list[Record]:
    """The records of one step, written to its file as they come in."""
    one, file = scenario.find(step.name), out / f"{step.name}.jsonl"
    plan = Plan(
        rounds=step.rounds,
        floor_rounds=step.floor_rounds,
        limit_s=limit_s,
        pictures=step.pictures,
        new_size=step.new_size,
        new_size_s=NEW_SIZE_S,
    )
    if dry:
        one, plan = tiny(one), replace(plan, rounds=2, floor_rounds=1)
    for name in step.arms:
        contenders.find(name)

    def keep(records: list[Record]) -> None:
        write(file, records)

    records = bench(one, step.arms, device, plan, tell=say, on_records=keep, kept=kept)
    write(file, records)
    for record in records:
        if record.throughput:
            say(f"{record.scenario}, {record.contender}: median {1000 * record.throughput['p50_s']:.2f} ms")
    return records


def tiny(one: Scenario) -> Scenario:
    """The scenario with a tiny model, a small picture and few steps, under its own name."""
    if one.model == "embedded":
        return replace(one, width=128, height=128, steps=2)
    return replace(
        one,
        model=f"tiny-{one.model}",
        width=64 * max(1, one.width // 512),
        height=64 * max(1, one.height // 512),
        steps=min(one.steps, 2),
        calls=min(one.calls, 2),
    )


if __name__ == "__main__":
    sys.exit(main())
