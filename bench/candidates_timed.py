"""Candidates beside each other on one device: what candidates_on_device.py measures with.

On CUDA a candidate's calls, over several sets of inputs, are captured in one graph and its replays timed
between two events, candidates taking turns; elsewhere the same calls are timed as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ops_on_device import Call, Run, captured, timed
from torch import Tensor

from clearway import device
from clearway.measure.provenance import provenance
from clearway.ops import _triton

SETS = 6  # of inputs, and of weights, in turns: one set alone would lie in the cache
Calls = Sequence[Call]


def options(about: str, small: str, rounds: int) -> argparse.ArgumentParser:
    """What these benchmarks are all asked; `small`: what --small measures instead."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--output", type=Path, help="write the lines to this file")
    parser.add_argument("--device", default="cuda", choices=device.KINDS)
    parser.add_argument("--small", action="store_true", help=small)
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


@contextlib.contextmanager
def opened(given: argparse.Namespace, bench: str, source: str, **more: str) -> Iterator[Run]:
    """A run in float16 that says first what it is and where, and last how long it took."""
    given.dtype, given.compile = "float16", False
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        file = None
        if given.output is not None:
            given.output.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(given.output.open("w", encoding="utf-8"))
        run = Run(given, file)
        about = provenance(device.pick(given.device), dtype="float16", data="random")
        run.write(bench=bench, source=source, **more, provenance=about)
        yield run
        run.write(seconds=round(time.monotonic() - run.started, 1))


def compare(run: Run, part: str, case: str, contenders: dict[str, Calls], want: Tensor | None = None) -> None:
    """Times the contenders in turns, a line each; errors are against `want`, where it has their shape and
    they are no mere part of the work ("... alone")."""
    ready: dict[str, Call] = {}
    errors: dict[str, float | None] = {}
    for name, calls in contenders.items():
        try:
            got = calls[0]()
            errors[name] = None if name.endswith("alone") else apart(got, want)
            ready[name] = captured(chained(calls)) if run.kind == "cuda" else chained(calls)
        except (RuntimeError, NotImplementedError) as error:
            failed = f"{type(error).__name__}: {error}"[:200]
            run.write(part=part, case=case, candidate=name, failed=failed)
    for name, taken in in_turns(run, ready).items():
        report(run, part, case, name, [one / len(contenders[name]) for one in taken], error=errors[name])


def apart(got: Any, want: Tensor | None) -> float | None:
    """‖got − want‖ / ‖want‖; None where there is nothing to compare."""
    got = got[0] if isinstance(got, tuple) else got
    if want is None or not isinstance(got, Tensor) or got.shape != want.shape:
        return None
    return float(f"{float((got.float() - want.float()).norm() / want.float().norm()):.2e}")


def chained(calls: Calls) -> Call:
    """All of them, one after the other."""

    def run() -> None:
        for call in calls:
            call()

    return run


def in_turns(run: Run, calls: dict[str, Call]) -> dict[str, list[float]]:
    """Milliseconds of each, round after round, every second one backwards."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(run.rounds):
        for name in list(calls)[:: 1 - 2 * (number % 2)]:
            times[name].append(timed(run.kind, calls[name]))
    return times


def report(run: Run, part: str, case: str, candidate: str, taken: list[float], **more: Any) -> None:
    """One measurement; what is None is left out."""
    cut = statistics.quantiles(taken, n=5, method="inclusive")
    values = {"p20_ms": cut[0], "p50_ms": statistics.median(taken), "p80_ms": cut[3]}
    rounded = {name: round(value, 6) for name, value in values.items()}
    told = {name: value for name, value in more.items() if value is not None}
    run.write(part=part, case=case, candidate=candidate, n=len(taken), **rounded, **told)


def triton(run: Run, part: str) -> bool:
    """Whether Triton's candidates can run; a line says why not."""
    why = _triton.absent()
    if why is not None:
        run.write(part=part, skipped=why)
    return why is None


def drawn(run: Run, *shape: int, fan: int = 1, images: bool = True) -> Tensor:
    """Normal values of spread fan^-1/2 in fp16; four axes are channels-last images unless told otherwise."""
    value = (torch.randn(shape, device=run.kind) * fan**-0.5).half()
    return value.contiguous(memory_format=torch.channels_last) if images and len(shape) == 4 else value


def over(call: Callable[..., Any], *sets: Sequence[Any]) -> Calls:
    """The call for each set of inputs."""
    return [lambda args=args: call(*args) for args in zip(*sets, strict=True)]


def held(module: Any, call: Callable[..., Any], **values: Any) -> Callable[..., Any]:
    """The call while names of a module mean other values."""

    def run(*args: Any) -> Any:
        with patch.multiple(module, **values):
            return call(*args)

    return run
