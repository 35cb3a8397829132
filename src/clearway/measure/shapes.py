"""The ops' arguments as one generation really passes them, and each implementation timed at those shapes.

What is found here is a proposal: an op that is faster alone can make a generation slower, so whole
generations decide (`select`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearway.errors import UnavailableError, one_line
from clearway.measure.clock import Samples, Timer, compare, interleave
from clearway.ops import state
from clearway.ops._implementation import over_budget
from clearway.ops.contract import OPS, Op, use

ROUNDS = 9
LEAST_S = 0.002  # one sample repeats the op until it takes about this long: clocks are coarse
FLOOR = 0.03  # |log ratio| below which a micro-benchmark proposes nothing
Sign = tuple[Any, ...]


@dataclass
class Heard:
    """Calls by op and key of the tuned table ("dtype|size class"), each with its signatures and how often."""

    calls: dict[tuple[str, str], Counter[Sign]] = field(default_factory=dict)

    def __call__(self, op: Op, args: tuple[Any, ...]) -> None:
        key = f"{args[0].dtype}|{op.size_class(*args)}"
        self.calls.setdefault((op.name, key), Counter())[tuple(map(_sign, args))] += 1


@contextmanager
def listening() -> Iterator[Heard]:
    """Within it every call of an op is heard; ops run and route as always."""
    heard, run = Heard(), Op._run

    def listen(self: Op, args: tuple[Any, ...]) -> Any:
        heard(self, args)
        return run(self, args)

    Op._run = listen  # type: ignore[method-assign]
    try:
        yield heard
    finally:
        Op._run = run  # type: ignore[method-assign]


def timed(heard: Heard, timer: Timer, device: str, limit_s: float) -> list[dict[str, Any]]:
    """Each op at each key, its most frequent signature, random data: one finding each, most calls first.

    "current" is the route without a tuned table, "best" what is faster than it beyond 3 %, "times_ms" the
    medians, "refused" why others did not run, "saves_ms" the difference times the calls of a generation.
    """
    ends, found = timer.now() + limit_s, []
    each = sorted(heard.calls.items(), key=lambda item: -item[1].total())
    for number, ((name, key), signs) in enumerate(each):
        left = ends - timer.now()
        if left <= 0:
            break
        sign = signs.most_common(1)[0][0]
        share = left / (len(each) - number)
        found.append(_one(OPS[name], key, sign, signs.total(), timer, device, share))
    return sorted(found, key=lambda one: -one["saves_ms"])


@torch.inference_mode()
def _one(
    op: Op, key: str, sign: Sign, calls: int, timer: Timer, device: str, limit_s: float
) -> dict[str, Any]:
    generator = torch.Generator(device=device).manual_seed(0)
    args = tuple(_made(one, device, generator) for one in sign)
    kind, refused, names = args[0].device.type, {}, []
    with state.trying({}):
        current = op.route(*args).name
        for one in (*op.implementations, op.reference):
            if one.device in (kind, "any"):
                try:
                    with use(**{op.name: one.name}):
                        op.route(*args)
                    reason = over_budget(one, args, args[0].device)
                except UnavailableError as error:
                    reason = one_line(error)
                if reason:
                    refused[one.name] = reason
                else:
                    names.append(one.name)
        repeats = _repeats(op, current, args, timer)
        arms = {name: _arm(op, name, args, repeats) for name in names}
        times = interleave(arms, timer, rounds=ROUNDS, limit_s=limit_s)
    samples = {name: taken for name, taken in times.items() if isinstance(taken, Samples)}
    refused |= {
        name: one_line(taken.error) for name, taken in times.items() if not isinstance(taken, Samples)
    }
    best = current
    if current in samples:
        for name, rival in samples.items():
            won = name != current and compare(samples[current], rival, FLOOR).verdict == "faster"
            if won and rival.p50 < samples[best].p50:
                best = name
    times_ms = {name: rival.p50 / repeats * 1000 for name, rival in samples.items()}
    saves = (times_ms[current] - times_ms[best]) * calls if current in samples else 0.0
    return {
        "op": op.name,
        "key": key,
        "calls": calls,
        "current": current,
        "best": best,
        "saves_ms": saves,
        "times_ms": times_ms,
        "refused": refused,
    }


def _arm(op: Op, name: str, args: tuple[Any, ...], repeats: int) -> Any:
    def call(number: int) -> None:
        with use(**{op.name: name}):
            for _ in range(repeats):
                op(*args)

    return call


def _repeats(op: Op, name: str, args: tuple[Any, ...], timer: Timer) -> int:
    """How many calls take about 2 ms."""
    once = _arm(op, name, args, 1)
    once(0)
    timer.synchronize()
    begun = timer.now()
    once(0)
    timer.synchronize()
    return max(1, min(200, round(LEAST_S / max(timer.now() - begun, 1e-6))))


def _sign(arg: Any) -> Any:
    if isinstance(arg, list):
        return ("list", tuple(map(_sign, arg)))
    if not isinstance(arg, Tensor):
        return arg
    return ("tensor", tuple(arg.shape), arg.stride(), arg.dtype)


def _made(sign: Any, device: str, generator: torch.Generator) -> Any:
    """A tensor of the signature with normal data; other arguments as they were."""
    if isinstance(sign, tuple) and sign[:1] == ("list",):
        return [_made(one, device, generator) for one in sign[1]]
    if not (isinstance(sign, tuple) and sign[:1] == ("tensor",)):
        return sign
    _, shape, stride, dtype = sign
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return made.zero_() if dtype != torch.bool else made.fill_(True)
    return made.copy_(torch.randn(shape, generator=generator, device=device))
