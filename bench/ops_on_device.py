"""Every implementation of every op on this machine's GPU: is it sound, and how long does it take?

    python bench/ops_on_device.py --output bench/results/<machine>/ops.jsonl

Sound: selftest.problem, on small cases in three dtypes and on each timed case. Time: each case of a real
shape in one dtype, on random data, against the reference and torch.compile's code for the reference. On CUDA
each contender is captured in a graph and replayed between two events, its inputs swept from the cache before,
contenders taking turns; so launching from Python does not count. Figures are milliseconds (p20, p50, p80) and
GB/s of the op's own bytes_moved. One JSON line a measurement, written at once, so that a fault of the device
leaves what came before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from clearway import device
from clearway.measure.provenance import provenance as measured
from clearway.ops import discover, selftest
from clearway.ops._implementation import Case, Implementation, refused, tensors
from clearway.ops.contract import OPS, Op

SWEEP_BYTES = 2**28  # more than any cache holds
CHECKED_ELEMENTS, CHECKED_FLOPS = 2**26, 2**36  # a float64 reference of more takes the CPU too long

Call = Callable[[], Any]


class Run:
    """What was asked for, the time that is left, and the file the lines go to."""

    def __init__(self, given: argparse.Namespace, file: TextIO | None) -> None:
        self.kind: str = given.device
        self.dtype: torch.dtype = getattr(torch, given.dtype)
        self.small: bool = given.small
        self.rounds: int = given.rounds
        self.compiles: bool = given.compile
        self.limit_s: float = given.limit_s
        self.started = time.monotonic()
        self.file = file

    def late(self) -> bool:
        """Whether the time is gone."""
        return time.monotonic() > self.started + self.limit_s

    def write(self, **line: Any) -> None:
        """One line, at once."""
        text = json.dumps(line, ensure_ascii=False)
        print(text, flush=True)
        if self.file is not None:
            self.file.write(text + "\n")
            self.file.flush()


def contenders(op: Op, kind: str) -> list[Implementation]:
    """The implementations this machine can have, the reference last."""
    found = [i for i in op.implementations if i.device in (kind, "any") and i.absent() is None]
    return [*found, op.reference]


def check_small(run: Run, op: Op) -> dict[str, str]:
    """The first problem of each implementation on the small cases in all dtypes; "" where it is sound."""
    problems: dict[str, str] = {}
    for implementation in contenders(op, run.kind)[:-1]:
        checked, problem = 0, ""
        for case, given in op.cases():
            if callable(given):
                continue
            for dtype in selftest.DTYPES:
                args = selftest._on(selftest.made(op, given), run.kind, dtype)
                if problem or refused(implementation, args) is not None:
                    continue
                checked += 1
                found = selftest.problem(op, implementation, args)
                problem = f"{case} {dtype}: {found}" if found else ""
        problems[implementation.name] = problem
        run.write(op=op.name, implementation=implementation.name, checked=checked, problem=problem)
    return problems


def time_cases(run: Run, op: Op, problems: dict[str, str], against_compiled: bool) -> None:
    """Times every case of a real shape (with --small: the others); in a second turn beside torch.compile."""
    for case, given in op.cases():
        if callable(given) == run.small:
            continue
        if run.late():
            run.write(op=op.name, case=case, skipped="the time was up")
            continue
        args = selftest._on(selftest.made(op, given), run.kind, run.dtype)
        able = [i for i in contenders(op, run.kind) if refused(i, args) is None and not problems.get(i.name)]
        calls: dict[str, Call] = {i.name: bind(i, args) for i in able}
        if against_compiled:
            verdicts: dict[str, bool | str] = {}
            calls["compiled reference"] = compiled(op, args)
        else:
            verdicts = {i.name: verdict(op, i, args) for i in able}
        with torch.no_grad():
            times = measure(run, calls)
        moved = op.bytes_moved(*args) if op.bytes_moved else 0
        base = times.get("reference") or [float("nan")]
        for name, taken in times.items():
            middle = statistics.median(taken)
            cut = statistics.quantiles(taken, n=5, method="inclusive") if len(taken) > 1 else [middle] * 4
            run.write(
                op=op.name,
                case=case,
                dtype=str(run.dtype).removeprefix("torch."),
                implementation=name,
                beside_compiled=against_compiled,
                verified=verdicts.get(name, "not checked"),
                n=len(taken),
                p20_ms=round(cut[0], 5),
                p50_ms=round(middle, 5),
                p80_ms=round(cut[3], 5),
                gb_per_s=round(moved / middle / 1e6, 1),
                bytes_moved=moved,
                times_reference=round(statistics.median(base) / middle, 3),
            )
        del args, calls


def verdict(op: Op, implementation: Implementation, args: Case) -> bool | str:
    """True, what is wrong, or that the case is too large to check."""
    elements = sum(one.numel() for one in tensors(args))
    large = elements > CHECKED_ELEMENTS or (op.flops is not None and op.flops(*args) > CHECKED_FLOPS)
    if implementation is op.reference or large:
        return "not checked"
    return selftest.problem(op, implementation, args) or True


def bind(implementation: Implementation, args: Case) -> Call:
    """A call without arguments."""
    return lambda: implementation.run(*args)


def compiled(op: Op, args: Case) -> Call:
    """The reference through torch.compile, for just these shapes."""
    torch._dynamo.reset()
    made = torch.compile(op.reference.run, dynamic=False, fullgraph=True)
    return lambda: made(*args)


def measure(run: Run, calls: dict[str, Call]) -> dict[str, list[float]]:
    """Milliseconds of each contender, in turns; one that cannot run is left out with a line that says so."""
    ready: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            ready[name] = captured(call) if run.kind == "cuda" else warmed(call)
        except (RuntimeError, NotImplementedError, torch._dynamo.exc.TorchDynamoException) as error:
            run.write(contender=name, failed=f"{type(error).__name__}: {error}"[:300])
    sweep = torch.empty(SWEEP_BYTES if run.kind == "cuda" else 1, dtype=torch.int8, device=run.kind)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(run.rounds):
        for name, call in ready.items():
            sweep.zero_()
            times[name].append(timed(run.kind, call))
    return times


def warmed(call: Call) -> Call:
    """The call itself, once made."""
    call()
    return call


def captured(call: Call) -> Call:
    """The call as a CUDA graph, warmed up on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def timed(kind: str, call: Call) -> float:
    """Milliseconds of one call."""
    if kind != "cuda":
        began = time.perf_counter()
        call()
        device.synchronize(device.Device(kind))
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def provenance(kind: str) -> Iterator[tuple[str, Any]]:
    """Machine, versions, date and commit."""
    about = measured(device.pick(kind))
    yield "identity", device.identity(kind)
    yield "device", about["device"]
    yield "machine", device.machine()["versions"]
    yield "date", about["date"].partition("T")[0]
    yield "commit", about["commit"]
    yield "dirty", about["dirty"]


def main() -> None:
    """Checks and times, op by op."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the lines to this file")
    parser.add_argument("--device", default="cuda", choices=device.KINDS)
    parser.add_argument("--dtype", default="float16", choices=device.DTYPES)
    parser.add_argument("--ops", nargs="*", help="only these; all if not given")
    parser.add_argument(
        "--small", action="store_true", help="time the small cases instead of the real shapes"
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--limit-s", type=float, default=230.0, help="start no further case after this")
    given = parser.parse_args()
    discover()
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
    file = given.output.open("w", encoding="utf-8") if given.output is not None else None
    run = Run(given, file)
    run.write(**dict(provenance(given.device)))
    names = given.ops or sorted(OPS)
    problems = {name: check_small(run, OPS[name]) for name in names}
    for against_compiled in (False, True) if run.compiles else (False,):
        for name in names:
            time_cases(run, OPS[name], problems[name], against_compiled)
    run.write(seconds=round(time.monotonic() - run.started, 1))
    if file is not None:
        file.close()


if __name__ == "__main__":
    main()
