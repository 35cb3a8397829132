"""The ops on real shapes: each implementation that this machine can run, its times and its error.

One record an implementation, for all ops that have it, with the operations ledger filled. What is faster here
need not make a picture faster: whole generations decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from clearway.device import Device, dtype
from clearway.measure.clock import Failed, Timer, interleave
from clearway.measure.harness import Plan, Tell, failure, roofs
from clearway.measure.ledgers import operation
from clearway.measure.provenance import provenance
from clearway.measure.quality import compare_tensors
from clearway.measure.record import Record
from clearway.ops import discover, selftest
from clearway.ops._implementation import Case, Implementation, changed, refused, tensors

if TYPE_CHECKING:
    from clearway.measure.scenario import Scenario
    from clearway.ops.contract import Op

CPU_FLOPS, CPU_ELEMENTS = 2e10, 2**25  # a case of more takes a CPU seconds a call
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}  # of |out - reference| / |reference|


@dataclass(slots=True)
class _Found:
    """What is known of one implementation's name over all ops."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    worst: dict[str, Any] | None = None
    failures: list[str] = field(default_factory=list)


def bench_ops(scenario: Scenario, device: Device, plan: Plan, *, timer: Timer, tell: Tell) -> list[Record]:
    """Records of every implementation, the reference's last."""
    named = scenario.precision_on(device).unet
    begun, found = timer.now(), dict[str, _Found]()
    left_out: list[str] = []
    for op, case, args in _cases(device, named, left_out):
        left = math.inf if plan.limit_s is None else plan.limit_s - (timer.now() - begun)
        if left <= 0:
            left_out.append(f"{op.name}, {case}: the time limit had passed")
            continue
        tell(f"{scenario.name}: {op.name}, {case}")
        _time(op, case, args, device, plan, timer, None if math.isinf(left) else left, found)
    made = provenance(
        device,
        scenario=scenario.as_dict(),
        dtype=named,
        rounds=plan.rounds,
        left_out=left_out,
        **roofs(device, named, timer),
    )
    limit = TOLERANCES[named]
    return [
        Record(
            scenario=scenario.name,
            contender=name,
            provenance=made,
            intended={"implementation": name, "dtype": named},
            refused=_refusal(one, limit),
            failed="; ".join(one.failures) or None if not one.rows else None,
            operations=one.rows or None,
            correctness=one.worst and {**one.worst, "verified": one.worst["latents"]["rel_l2"] <= limit},
            routes={name: sum(row["n"] for row in one.rows)},
        )
        for name, one in sorted(found.items(), key=lambda pair: pair[0] == "reference")
    ]


def _refusal(found: _Found, limit: float) -> str | None:
    if found.worst is None or found.worst["latents"]["rel_l2"] <= limit:
        return None
    return f"it is {found.worst['latents']['rel_l2']:.2g} from the reference, and {limit:.2g} was allowed"


def _cases(device: Device, named: str, left_out: list[str]) -> Iterator[tuple[Op, str, Case]]:
    """(op, the case's name, its arguments on the device) of every real shape that is not too much for it."""
    for op in discover().values():
        for name, given in op.cases():
            if not callable(given):
                continue  # a small case, for checking
            with torch.device("meta"):
                shapes = selftest._on(selftest.made(op, given), "meta", dtype(named))
            flops = op.flops(*shapes) if op.flops else 0
            elements = max((one.numel() for one in tensors(shapes)), default=0)
            if device.kind == "cpu" and (flops > CPU_FLOPS or elements > CPU_ELEMENTS):
                left_out.append(f"{op.name}, {name}: too much for a CPU")
                continue
            yield op, name, selftest._on(selftest.made(op, given), str(device), dtype(named))


def _time(
    op: Op,
    case: str,
    args: Case,
    device: Device,
    plan: Plan,
    timer: Timer,
    limit_s: float | None,
    found: dict[str, _Found],
) -> None:
    """Times one case's implementations in turns and adds what was found."""
    able = {one.name: one for one in _able(op, device, args)}
    with torch.inference_mode():
        exact = _first(op.exact(*(changed(arg, _as_float) for arg in args)))
        arms = {name: (lambda round, one=one: one.run(*args)) for name, one in able.items()}
        errors: dict[str, dict[str, Any]] = {}
        for name, one in able.items():
            try:
                errors[name] = compare_tensors(_first(one.run(*args)).float(), exact.float())
            except Exception as error:
                found.setdefault(name, _Found()).failures.append(f"{op.name}, {case}: {failure(error)}")
                arms.pop(name)
        samples = interleave(arms, timer, rounds=plan.rounds, limit_s=limit_s, seed=plan.seed)
    cost = {
        "flops": int(op.flops(*args)) if op.flops else None,
        "bytes_moved": int(op.bytes_moved(*args)) if op.bytes_moved else None,
    }
    for name, times in samples.items():
        entry = found.setdefault(name, _Found())
        if isinstance(times, Failed):
            entry.failures.append(f"{op.name}, {case}: {failure(times.error)}")
            continue
        seconds = times.device_s or times.wall_s
        entry.rows.append({**operation(f"{op.name}, {case}", seconds, **cost), "op": op.name, "case": case})
        off = errors[name]
        if entry.worst is None or off["rel_l2"] > entry.worst["latents"]["rel_l2"]:
            entry.worst = {
                "reference": f"{op.name}'s formula in float32, {case}",
                "max_error": off["max_abs"],
                "psnr_db": off["psnr_db"],
                "latents": off,
            }


def _able(op: Op, device: Device, args: Case) -> list[Implementation]:
    """The implementations that this machine has and that take these arguments, the reference last."""
    return [
        one
        for one in (*op.implementations, op.reference)
        if one.device in (device.kind, "any") and one.absent() is None and refused(one, args) is None
    ]


def _as_float(one: torch.Tensor) -> torch.Tensor:
    return one.float() if one.is_floating_point() else one


def _first(out: Any) -> torch.Tensor:
    tensor: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return tensor
