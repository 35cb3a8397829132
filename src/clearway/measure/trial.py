"""One trial: two ways to run the same generations, taking turns, and what becomes of the second.

A trial's figures are plain JSON, and the verdict is read from them alone: so it can be read again from a
journal, or from the evidence of a selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from clearway.errors import Cancelled, ClearwayError, one_line
from clearway.measure.candidates import SAME, Change
from clearway.measure.clock import Failed, Samples, Timer, compare, interleave
from clearway.measure.quality import compare_pictures

if TYPE_CHECKING:
    import numpy as np

LEAST_ROUNDS = 6  # below, the signed-rank test cannot find anything at 5 %
Pictures = dict[int, "np.ndarray"]


class TimeUp(BaseException):
    """What was begun did not end in its time. No Exception: what runs in between must not take it for one."""


class Prepared(Protocol):
    """A change made ready to run; `ready_s` is what that took."""

    ready_s: float

    def __call__(self, number: int) -> np.ndarray:
        """Generation `number` of the scenario: images uint8 (B, H, W, 3)."""
        ...

    def proof(self) -> str | None:
        """Why the last generation did not take the path that was meant; None where it did."""
        ...

    def peak_bytes(self) -> int:
        """The driver's peak during one more generation."""
        ...

    def close(self) -> None:
        """Gives back what was made."""
        ...


class Evaluator(Protocol):
    """What runs generations: the real one, or a fake in tests."""

    @property
    def timer(self) -> Timer:
        """What times its generations."""
        ...

    def arm(self, change: Change) -> Prepared:
        """The change, ready to run; a ClearwayError where it cannot be had."""
        ...

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Raises TimeUp in what runs within it, once `seconds` have passed, where that can be done."""
        ...

    def micro(self, limit_s: float) -> list[dict[str, Any]]:
        """Implementations of each op timed at the shapes that one generation runs: see `shapes.py`."""
        ...

    def label(self, number: int) -> str:
        """Prompt and seed of generation `number`."""
        ...


@dataclass(frozen=True)
class Terms:
    """What counts as better.

    `generations` is how many share the cost of starting; `max_memory_bytes` the most that the driver may
    show; `min_psnr_db` what the worst picture of a same-arithmetic change must keep.
    """

    rounds: int = 12
    limit_s: float = 300.0
    generations: int = 50
    max_memory_bytes: int | None = None
    min_psnr_db: float = 40.0
    seed: int = 0


def trial(
    evaluator: Evaluator,
    base: Change,
    change: Change,
    terms: Terms,
    *,
    floor: float,
    limit_s: float,
    seed: int,
    show: Callable[[Pictures, Pictures], str | None] | None = None,
) -> dict[str, Any] | None:
    """The figures of `change` against `base`; None where the time did not suffice for 6 rounds.

    {"failed": why} or {"refused": why} where there are none. `show` is given the pictures of both, by
    generation, and gives the name of the file it made of them.
    """
    arms: dict[str, Prepared] = {}
    pictures: dict[str, Pictures] = {"base": {}, "arm": {}}
    try:
        arms["base"] = evaluator.arm(base)
        try:
            arms["arm"] = evaluator.arm(change)
        except Exception as error:
            return {"failed": _sentence(error)}
        found = interleave(
            {name: _kept(arms[name], pictures[name]) for name in arms},
            evaluator.timer,
            rounds=terms.rounds,
            limit_s=limit_s,
            seed=seed,
        )
        first, second = found["base"], found["arm"]
        if isinstance(first, Failed):
            raise first.error
        if isinstance(second, Failed):
            return {"failed": f"{_sentence(second.error)} ({second.when})"}
        for name, arm in arms.items():
            reason = arm.proof()
            if reason:
                return {"refused": reason if name == "arm" else f"the other arm: {reason}"}
        if len(first.wall_s) < LEAST_ROUNDS:
            return None
        shown = show(pictures["base"], pictures["arm"]) if show else None
        return {
            "base": _figures(first, arms["base"]),
            "arm": _figures(second, arms["arm"]),
            "comparison": asdict(compare(first, second, floor)),
            "charged": charged(first, arms["base"].ready_s, second, arms["arm"].ready_s, floor, terms),
            "quality": quality(pictures["base"], pictures["arm"]),
            "sheet": shown,
        }
    finally:
        for arm in arms.values():
            arm.close()


def charged(
    base: Samples, base_ready_s: float, arm: Samples, arm_ready_s: float, floor: float, terms: Terms
) -> dict[str, float]:
    """Time per generation relative to the base's with the extra cost of starting shared out, and that cost.

    Starting is making ready plus what the cold call took longer than the median one.
    """
    begin = arm_ready_s + max(0.0, arm.first_s - arm.p50)
    before = base_ready_s + max(0.0, base.first_s - base.p50)
    extra = max(0.0, begin - before)
    ratio = compare(base, arm, floor).ratio + extra / (terms.generations * base.p50)
    return {"ratio": ratio, "extra_ready_s": extra, "generations": terms.generations}


def quality(base: Pictures, arm: Pictures) -> dict[str, Any]:
    """The worst of all pictures that both made; "same_shape" False where they cannot be compared."""
    numbers = sorted(base.keys() & arm.keys())
    if any(base[number].shape != arm[number].shape for number in numbers):
        return {"n": len(numbers), "same_shape": False, "psnr_db": -math.inf, "identical": False}
    each = [compare_pictures(arm[number], base[number]) for number in numbers]
    ratios = [one["psnr_db"] for one in each if one["psnr_db"] is not None]
    likeness = [one["ssim"] for one in each if one["ssim"] is not None]
    return {
        "n": len(each),
        "same_shape": True,
        "psnr_db": min(ratios) if ratios else None,
        "ssim": min(likeness) if likeness else None,
        "max_error": max(one["max_error"] for one in each),
        "identical": not ratios,
    }


def verdict(result: Mapping[str, Any], section: str, terms: Terms, floor: float) -> tuple[bool, str]:
    """Whether what was measured is better by these terms, and the sentence that says why or why not."""
    if "failed" in result:
        return False, f"failed: {result['failed']}"
    if "refused" in result:
        return False, f"refused: {result['refused']}"
    speed, cold, likeness = result["comparison"], result["charged"], result["quality"]
    figure = f"{percent(speed['ratio'])} ({percent(speed['low'])} to {percent(speed['high'])})"
    peak, limit = result["arm"]["peak_bytes"], terms.max_memory_bytes
    if limit is not None and peak > limit:
        return False, f"needs {peak / 2**30:.2f} GiB of {limit / 2**30:.2f} GiB allowed; time {figure}"
    worst = likeness["psnr_db"]
    if section == SAME and worst is not None and worst < terms.min_psnr_db:
        return False, f"pictures differ, {worst:.1f} dB of {terms.min_psnr_db:g} dB; time {figure}"
    if speed["verdict"] != "faster":
        return False, f"{speed['verdict']}: {figure}, noise floor {percent(math.exp(floor), sign=False)}"
    if math.log(cold["ratio"]) > -floor:
        return False, (
            f"faster, {figure}, but starting takes {cold['extra_ready_s']:.1f} s longer, which "
            f"{cold['generations']} generations do not pay back"
        )
    return True, f"faster: {figure}, {percent(cold['ratio'])} with starting charged"


def percent(ratio: float, sign: bool = True) -> str:
    """A ratio of times as a percentage of change: 0.93 is -7.0 %."""
    if not math.isfinite(ratio):
        return "unbounded"
    return f"{(ratio - 1) * 100:{'+' if sign else ''}.1f} %"


def _kept(arm: Prepared, pictures: Pictures) -> Callable[[int], None]:
    def call(number: int) -> None:
        pictures[number] = arm(number)

    return call


def _figures(samples: Samples, arm: Prepared) -> dict[str, Any]:
    return {
        **asdict(samples),
        "p20_s": samples.p20,
        "p50_s": samples.p50,
        "p80_s": samples.p80,
        "outliers": samples.outliers(),
        "ready_s": arm.ready_s,
        "peak_bytes": arm.peak_bytes(),
    }


def _sentence(error: Exception) -> str:
    """The error in one line; a stop by the user is passed on."""
    if isinstance(error, Cancelled):
        raise error
    text = one_line(error)
    return text if isinstance(error, ClearwayError) else f"{type(error).__name__}: {text}"
