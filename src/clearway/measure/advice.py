"""The bottleneck in words, and what to try: each suggestion with the most it could save.

A bound is Amdahl's: what a change cannot touch stays. It is no promise; what a change really saves is found
by whole generations (`clearway select`). Less arithmetic and other precision are kept apart from the same
arithmetic done faster, for they change the picture.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from clearway.measure.ceilings import Ceilings
from clearway.measure.inside import Inner
from clearway.measure.profiling import Profile
from clearway.measure.rows import Row
from clearway.models._mixed_choice import HALF
from clearway.types import MIXED, Precision

SAME, PRECISION, LESS = "same arithmetic", "changed precision", "less work"
KINDS = (SAME, PRECISION, LESS)
NETWORKS = ("text_encoder", "unet", "vae decode")
LOOP = ("unet", "guidance", "sampler arithmetic")
NEAR_CEILING = 0.6
BEYOND = 0.1  # above the matrix ceiling, from which on it is the ceiling that is wrong
LAUNCHES_DOMINATE = 0.4
HOST_BOUND = 0.9
WORTH = 0.01  # a bound below this part of the whole is not said
LARGE = 0.1


@dataclass(frozen=True, slots=True)
class Advice:
    """Something to try: at most `bound_ms` of the generation, a part `bound` of it, could be saved."""

    kind: str
    what: str
    why: str
    bound_ms: float
    bound: float

    @property
    def times(self) -> float:
        """How many times as fast the whole could become at most."""
        return 1 / max(1e-9, 1 - self.bound)


@dataclass(frozen=True, slots=True)
class Machine:
    """What advice must know: device kind, cores, torch's threads, ceilings by dtype, the model's executor."""

    kind: str
    cores: int
    threads: int
    ceilings: Callable[[str], Ceilings]
    executor: str = "eager"


def bottleneck(profile: Profile, machine: Machine) -> str:
    """What takes the time and why, in one or two sentences."""
    slow = worst(profile)
    found = f"{slow.path} {_slow_words(slow)}: {_excess(slow):.0%} of the generation" if slow else ""
    if slow and _excess(slow) >= LARGE:
        return f"{found} goes there."
    end = f" Beside it, {found}." if found else ""
    return _heaviest(profile, machine) + end


def _heaviest(profile: Profile, machine: Machine) -> str:
    """The row that takes most, and what bounds it."""
    row = max(profile.rows, key=lambda row: row.ms)
    calls = f"{row.calls} calls, {row.ms / row.calls:.3g} ms each" if row.calls > 1 else f"{row.ms:.3g} ms"
    begin = f"{row.name} takes {row.share:.0%} of the generation ({calls})"
    if row.of_matmul is None or row.of_copy is None:
        return f"{begin}."
    of = f"at {row.of_matmul:.0%} of this machine's matrix ceiling and {row.of_copy:.0%} of its copy ceiling"
    if row.of_matmul > 1 + BEYOND:  # copies may be faster than the ceiling, in caches; products may not
        end = (
            "the ceiling was measured too low to say what bounds it; profile again when no other program runs"
        )
    elif max(row.of_matmul, row.of_copy) >= NEAR_CEILING:
        which = "arithmetic" if row.of_matmul >= row.of_copy else "memory traffic"
        end = f"it is bound by {which}, so only less of it, or another precision, helps much"
    elif launching(row, machine):
        end = "launching its operations takes more of that than the operations do"
    else:
        end = "neither is near, so the operations themselves are slow: other code for them could help"
    return f"{begin}, {of}: {end}."


def advice(profile: Profile, machine: Machine, precision: Precision) -> list[Advice]:
    """What to try, by kind (same arithmetic first) and within it by what it could save at most."""
    whole = sum(row.ms for row in profile.rows) or 1.0
    made: list[Advice] = []

    def add(kind: str, what: str, why: str, bound_ms: float) -> None:
        if bound_ms / whole >= WORTH:
            made.append(Advice(kind, what, why, bound_ms, min(0.999, bound_ms / whole)))

    rows = {row.name: row for row in profile.rows}
    networks = [row for row in profile.rows if row.operations and row.name.startswith(NETWORKS)]
    for one in profile.inside:
        if one.slow:
            add(SAME, f"look at {one.path}", _slow_words(one), _excess(one) * whole)
    for row in networks:
        _same(row, machine, add)
        _other_precision(row, machine, precision, add)
    if machine.kind == "cpu" and machine.threads < machine.cores:
        busy = sum(row.ms for row in networks)
        what = f"let torch use {machine.cores} threads (OMP_NUM_THREADS={machine.cores})"
        why = f"it uses {machine.threads} of {machine.cores} cores"
        add(SAME, what, why, busy * (1 - machine.threads / machine.cores))
    if profile.compiler.get("recompilations"):
        times = [value for values in profile.calls_ms.values() for value in values]
        lost = sum(max(0.0, value - statistics.median(times)) for value in times)
        add(SAME, "keep shapes as they are", "graphs were compiled anew while drawing", lost)
    loop = [rows[name] for name in LOOP if name in rows]
    if machine.kind != "cpu" and (reads := sum(row.reads for row in loop)):
        why = f"{reads:.0f} times in the loop the host waits for the device"
        add(SAME, "leave tensors on the device", why, sum(row.ms - row.floor_ms for row in loop))
    if save := rows.get("encode and save"):
        add(
            SAME,
            "save while the next picture is drawn",
            "nothing else runs while a picture is saved",
            save.ms,
        )
    if idle := rows.get("idle gaps"):
        add(SAME, "look at what runs between the stages", "time that is in no stage", idle.ms)
    _less(profile, rows, add)
    return sorted(made, key=lambda one: (KINDS.index(one.kind), -one.bound_ms))


def launching(row: Row, machine: Machine) -> bool:
    """Whether launches take most of a row: an accelerator that the host cannot outrun, or by their number."""
    if row.device_ms is not None and row.host_ms >= HOST_BOUND * row.device_ms:
        return True
    return row.operations * machine.ceilings(row.dtype).launch_s * 1000 >= LAUNCHES_DOMINATE * row.ms


def worst(profile: Profile) -> Inner | None:
    """The module that is slow beyond its like and costs most by it."""
    return max((one for one in profile.inside if one.slow), key=_excess, default=None)


Add = Callable[[str, str, str, float], None]


def _same(row: Row, machine: Machine, add: Add) -> None:
    """The same arithmetic by other code: at most down to the machine's ceiling."""
    if launching(row, machine) and machine.executor == "eager":
        how = "compiled, or captured as a graph" if machine.kind == "cuda" else "compiled"
        why = f"{row.operations / max(1, row.calls):.0f} operations a call are launched one by one"
        add(SAME, f"run {row.name} {how}", why, row.ms - row.floor_ms)
    else:
        why = f"it takes {row.ms / max(row.floor_ms, 1e-9):.1f} times what the ceilings allow"
        add(
            SAME,
            f"other code for {row.name} (routes, layout, executor: clearway select)",
            why,
            row.ms - row.floor_ms,
        )


def _other_precision(row: Row, machine: Machine, precision: Precision, add: Add) -> None:
    half = "bfloat16" if machine.kind == "cpu" else "float16"
    option = {"unet": "--dtype", "vae decode": "--vae-dtype"}.get(row.name)
    named = MIXED if row.name == "vae decode" and machine.kind in HALF else half
    if row.dtype != "float32" or option is None:
        return
    full, limit = machine.ceilings("float32"), machine.ceilings(half)
    ratio = limit.flops_per_s / full.flops_per_s
    if ratio > 1.2:
        floor = 1000 * limit.floor_s(row.flops, row.bytes_moved / 2)
        why = f"matrix products reach {ratio:.1f} times the float32 ceiling here"
        add(PRECISION, f"{row.name} in {named} ({option} {named})", why, row.ms - floor)
    if machine.kind == "cuda" and not precision.tf32 and row.name == "unet":
        add(PRECISION, "TF32 for float32 work (--tf32)", "matrix units take it", row.ms - row.floor_ms)


def _less(profile: Profile, rows: dict[str, Row], add: Add) -> None:
    request, unet = profile.request, rows.get("unet")
    if unet is None:
        return
    if request.cfg_scale != 1.0 and not request.ngms:
        why = "low noise levels without negative guidance need half the rows"
        add(LESS, "skip negative guidance below a sigma (--ngms)", why, unet.ms / 2)
    steps = (request.steps or 1) * -(-request.count // (request.batch_size or 1))
    loop = sum(rows[name].ms for name in LOOP if name in rows)
    if unet.calls > steps:
        why = f"{request.sampler} calls the network {unet.calls / steps:.3g} times a step"
        add(LESS, "a sampler with one call a step (DPM++ 2M)", why, loop * (1 - steps / unet.calls))
    fewer = -(-4 * (request.steps or 1) // 5)
    if fewer < (request.steps or 1):
        why = f"a step takes {loop / steps:.3g} ms"
        add(LESS, f"{fewer} steps instead of {request.steps}", why, loop * (1 - fewer / (request.steps or 1)))


def _excess(one: Inner) -> float:
    """The part of the whole that a module takes beyond what is usual for it."""
    return one.own_share * (1 - (one.usual_ms or 0.0) / max(one.own_ms, 1e-9))


def _slow_words(one: Inner) -> str:
    return (
        f"({one.type}) takes {one.own_ms:.3g} ms a call, where work like its own usually takes "
        f"{one.usual_ms:.2g} ms"
    )
