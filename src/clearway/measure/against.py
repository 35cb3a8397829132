"""Two environments against each other: the same scenario in two interpreters that take turns.

Each runs in a worker process of its own, this interpreter's too, so that neither is favoured. The protocol is
one JSON object a line, question on standard input, answer on standard output:

    {"do": "begin", "scenario": {…}, "contender": …, "device": …, "plan": {…}} -> {"failed", "pictures"}
    {"do": "call", "round": n, "keep": true} -> {"wall_s", "device_s"}
    {"do": "end", "floor": x, "stable": true} -> {"record": {…}}

A worker that cannot answer says {"error": sentence, "kind": class}. An environment without a Clearway of its
own is given this one.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from clearway.device import Device, pick
from clearway.errors import ClearwayError, RequestError, UnavailableError, one_line
from clearway.measure.clock import Failed, HostTimer, Samples, Timer, compare, interleave, noise_floor
from clearway.measure.record import Record, to_line
from clearway.measure.scenario import Scenario, from_dict

PROTOCOL = 1
SIDES = ("this environment", "the other environment")
Ask = Callable[[Mapping[str, Any]], dict[str, Any]]


class Worker:
    """A worker process of another interpreter; a context manager that ends it."""

    def __init__(self, python: str) -> None:
        self._python = python
        own = subprocess.run(
            [python, "-P", "-c", "import clearway.measure.against"], capture_output=True, check=False
        )
        environment = dict(os.environ)
        if own.returncode:  # no Clearway there, or one too old to speak with: it gets this one
            environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [python, "-P", "-m", "clearway.measure.against"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer; UnavailableError where it is gone, its own error where it says one."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"protocol": PROTOCOL, **question}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            answer = json.loads(line)
        except (OSError, ValueError) as error:
            raise UnavailableError(
                f"--against {self._python}: its worker ended without an answer; torch, diffusers and "
                "transformers must be installed there"
            ) from error
        if "error" in answer:
            kind = RequestError if answer.get("kind") == "RequestError" else UnavailableError
            raise kind(f"{self._python}: {answer['error']}")
        return dict(answer)


def check_python(python: str) -> None:
    """RequestError where `python` is no interpreter that starts."""
    try:
        done = subprocess.run([python, "-c", "print('ready')"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RequestError(f"--against {python}: {error.strerror or one_line(error)}") from error
    if done.stdout.strip() != "ready":
        raise RequestError(f"--against {python} is no Python interpreter that starts")


class Told:
    """A Timer that adds up what workers report: their own clocks, without the way to them."""

    def __init__(self) -> None:
        self._wall_s = self._device_s = 0.0
        self._device = True

    def add(self, answer: Mapping[str, Any]) -> None:
        """Counts one call's answer."""
        self._wall_s += answer["wall_s"]
        self._device = self._device and answer["device_s"] is not None
        self._device_s += answer["device_s"] or 0.0

    def now(self) -> float:
        return self._wall_s

    def synchronize(self) -> None:
        pass

    def event(self) -> Any:
        return self._device_s

    def between(self, begun: Any, ended: Any) -> float | None:
        return ended - begun if self._device else None


def alternate(
    scenario: Scenario,
    contender: str,
    device: Device,
    plan: Any,
    asks: Sequence[Ask],
    tell: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """The records of both environments, this one's first, each compared with the other.

    `plan` is the harness's. Both begin before anything is timed; then the noise floor of this one against
    itself, then rounds in turns.
    """
    begin = {
        "do": "begin",
        "scenario": scenario.as_dict(),
        "contender": contender,
        "device": str(device),
        "plan": asdict(plan),
    }
    begun = []
    for side, ask in zip(SIDES, asks, strict=True):
        tell(f"{scenario.name}: {contender}, getting ready in {side}")
        begun.append(ask(begin))
    told, floor = Told(), math.inf

    def arm(ask: Ask, keep: bool) -> Callable[[int], None]:
        return lambda round: told.add(
            ask({"do": "call", "round": round, "keep": keep and round < plan.rounds})
        )

    found: dict[str, Samples | Failed] = {}
    if not any(one.get("failed") for one in begun):
        limit = plan.limit_s
        if plan.rounds >= 6:
            tell(f"{scenario.name}: noise floor, this environment against itself")
            share = None if limit is None else limit / 4
            floor = noise_floor(arm(asks[0], False), told, plan.rounds, limit_s=share, seed=plan.seed)
        tell(f"{scenario.name}: {plan.rounds} rounds in turns")
        arms = {side: arm(ask, True) for side, ask in zip(SIDES, asks, strict=True)}
        found = interleave(arms, told, rounds=plan.rounds, limit_s=limit, seed=plan.seed)
    records = []
    for side, ask in zip(SIDES, asks, strict=True):
        settled = isinstance(one := found.get(side), Samples) and one.stable
        end = {"do": "end", "floor": None if math.isinf(floor) else floor, "stable": settled}
        records.append(Record(**ask(end)["record"]))
    records = [
        replace(one, provenance=_marked(one.provenance, side))
        for side, one in zip(SIDES, records, strict=True)
    ]
    return _compared(records, found, floor, begun)


def _marked(made: dict[str, Any], side: str) -> dict[str, Any]:
    return {**made, "settings": {**made.get("settings", {}), "side": side}}


def _compared(
    records: list[Record],
    found: Mapping[str, Samples | Failed],
    floor: float,
    begun: Sequence[Mapping[str, Any]],
) -> list[Record]:
    """The records with the comparison of times and of pictures."""
    a, b = (found.get(side) for side in SIDES)
    if isinstance(a, Samples) and isinstance(b, Samples):
        pairs = ((b, a), (a, b))
        records = [
            replace(
                one,
                comparisons=[{"against": _called(other), **asdict(compare(theirs, mine, floor))}],
            )
            for one, other, (theirs, mine) in zip(records, reversed(records), pairs, strict=True)
        ]
    first, second = (_pictures(one) for one in begun)
    if first is not None and second is not None and first.shape == second.shape:
        from clearway.measure.quality import compare_pictures

        versus = {"reference": _called(records[0]), **compare_pictures(second, first)}
        mine = {**(records[1].correctness or {}), "other_environment": versus}
        records = [records[0], replace(records[1], correctness=mine)]
    return records


def _called(record: Record) -> str:
    made = record.provenance
    return f"{record.contender} with torch {made.get('torch')} ({made.get('torch_channel')})"


def _pictures(answer: Mapping[str, Any]) -> Any:
    """The pictures of an answer as uint8 (B, H, W, 3); None where it has none."""
    if not answer.get("pictures"):
        return None
    import numpy as np
    from PIL import Image

    return np.stack([np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))) for one in answer["pictures"]])


class _Side:
    """What a worker keeps between questions: one contender in one scenario."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float | None]] = []
        self._warm_ups = 0

    def begin(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Gets the contender ready."""
        from clearway.measure import contenders, harness, loading, verify

        device = pick(str(question["device"]))
        plan = harness.Plan(**question["plan"])
        scenario = from_dict(question["scenario"], "the question")
        self._timer: Timer = HostTimer(device)
        self._run = run = harness.Run(scenario, device, plan, self._timer, lambda text: None)
        run.model = loading.load_model(scenario, device)
        if plan.check:
            run.reference = verify.reference(scenario, run.model)
        run.measure_roofs()
        run.start = run.resting()
        self._entry = run.prepared(contenders.find(str(question["contender"])))
        probe = self._entry.probe
        pictures = [] if probe is None or probe.images is None else [_png(one) for one in probe.images]
        return {"failed": self._entry.failed, "pictures": pictures}

    def call(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Times one round."""
        arm = self._entry.arm
        assert arm is not None
        self._timer.synchronize()
        begun, first = self._timer.now(), self._timer.event()
        arm.call(int(question["round"]))
        last = self._timer.event()
        self._timer.synchronize()
        wall_s, device_s = self._timer.now() - begun, self._timer.between(first, last)
        if question["keep"]:
            self._samples.append((wall_s, device_s))
        else:
            self._warm_ups += 1
        return {"wall_s": wall_s, "device_s": device_s}

    def end(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The record of everything."""
        entry, run = self._entry, self._run
        if self._samples and entry.first_s is not None:
            device_s = [value for _, value in self._samples if value is not None]
            entry.samples = Samples(
                wall_s=tuple(wall for wall, _ in self._samples),
                device_s=tuple(device_s) if len(device_s) == len(self._samples) else None,
                first_s=entry.first_s,
                warm_ups=self._warm_ups,
                stable=bool(question.get("stable")),
            )
            run.checked_again(entry)
            if run.plan.new_size:
                run.resized(entry)
        if question["floor"] is not None:
            run.floor, run.floor_of = float(question["floor"]), SIDES[0]
        (record,) = run.records([entry])
        return {"record": json.loads(to_line(record))}


def _png(image: Any) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Answers questions until there are no more; an error is an answer too."""
    side = _Side()
    for line in questions:
        try:
            question = json.loads(line)
            if question.get("protocol") != PROTOCOL:
                raise UnavailableError(f"its Clearway does not speak protocol {question.get('protocol')}")
            answer = {"begin": side.begin, "call": side.call, "end": side.end}[question["do"]](question)
        except ClearwayError as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {one_line(error)}", "kind": type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """The worker: what libraries print goes to standard error, so that it spoils no answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; who asked ends its workers
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
