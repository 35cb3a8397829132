"""A record's figures computed anew from its raw samples, and the words for figures.

Record files come from anywhere: nothing here trusts a type, and what is not a finite number is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from clearway.measure.clock import Samples

TOLERANCE = 1e-3
"""Relative: a summary further than this from its own samples is reported; rounding to four digits is not."""

SUMMARY = ("n", "p20_s", "p50_s", "p80_s", "outliers", "images_per_hour", "cost_per_1000")


def number(value: Any) -> float | None:
    """The value as a finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def numbers(value: Any) -> tuple[float, ...]:
    """A list of finite numbers; empty where the value is anything else, or any of it is not one."""
    if not isinstance(value, list | tuple):
        return ()
    found = [number(item) for item in value]
    return tuple(item for item in found if item is not None) if None not in found else ()


def mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def flat(value: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """The named values of nested objects, names joined by dots; what is empty or null is left out."""
    for key, item in mapping(value).items():
        if isinstance(item, Mapping):
            yield from flat(item, f"{before}{key}.")
        elif item not in (None, "", [], ()):
            items = item if isinstance(item, list | tuple) else [item]
            yield (
                f"{before}{key}",
                " ".join(f"{one:.6g}" if isinstance(one, float) else str(one) for one in items),
            )


def rows(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; empty where the value is no list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def throughput(given: Mapping[str, Any]) -> dict[str, float | None]:
    """SUMMARY's figures from `samples_s`, seconds a call; where there are no samples, as they were given.

    Images an hour is images a call · 3600 / median. The cost of 1,000 is the price of an hour over that.
    """
    samples = numbers(given.get("samples_s"))
    if not samples:
        return {key: number(given.get(key)) for key in SUMMARY}
    taken = Samples(samples, None, samples[0], 0, True)
    middle = taken.p50
    images = number(given.get("images"))
    hourly = images * 3600 / middle if images and middle > 0 else None
    price = price_per_hour(given)
    found = {
        "n": float(len(samples)),
        "p20_s": taken.p20,
        "p50_s": middle,
        "p80_s": taken.p80,
        "outliers": float(taken.outliers()),
        "images_per_hour": hourly,
        "cost_per_1000": price * 1000 / hourly if price is not None and hourly else None,
    }
    return {key: number(value) for key, value in found.items()}


def price_per_hour(given: Mapping[str, Any]) -> float | None:
    """The price that the record was made with: named, else what its own cost and rate imply."""
    named = number(given.get("price_per_hour"))
    cost, hourly = number(given.get("cost_per_1000")), number(given.get("images_per_hour"))
    if named is not None or cost is None or hourly is None:
        return named
    return cost * hourly / 1000


def operation(given: Mapping[str, Any]) -> dict[str, float | None]:
    """One operation's times from `samples_ms` where there are any, its GB/s and TFLOP/s from the median."""
    samples = numbers(given.get("samples_ms"))
    found = {key: number(given.get(key)) for key in ("n", "p20_ms", "p50_ms", "p80_ms")}
    if samples:
        taken = Samples(samples, None, samples[0], 0, True)
        found = {"n": float(len(samples)), "p20_ms": taken.p20, "p50_ms": taken.p50, "p80_ms": taken.p80}
    middle = found["p50_ms"]
    for key, amount, scale in (("gb_per_s", "bytes_moved", 1e6), ("tflop_per_s", "flops", 1e9)):
        done = number(given.get(amount))
        found[key] = number(done / middle / scale) if done and middle and middle > 0 else None
    return found


def differs(said: Any, found: float | None) -> bool:
    """Whether a recorded figure and the one computed anew are apart by more than TOLERANCE."""
    given = number(said)
    return given is not None and found is not None and not math.isclose(given, found, rel_tol=TOLERANCE)


def plain(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, without exponent, thousands apart; "" for None."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    if not 1e-9 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def count(value: float | None) -> str:
    """A whole number, thousands apart; "" for None."""
    return "" if value is None else f"{value:,.0f}"


def span(low: float | None, high: float | None, digits: int = 4) -> str:
    """Two figures with a dash between them; "" where either is missing."""
    return "" if low is None or high is None else f"{plain(low, digits)}–{plain(high, digits)}"


def size(value: float | None) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    if value is None:
        return ""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(value) >= 2**power:
            return f"{plain(value / 2**power, 4)} {unit}"
    return f"{value:.0f} B"


def ratio(value: float | None) -> str:
    """A ratio of times with three decimals, as the noise floor is of that order."""
    return "" if value is None else f"{value:.3f}" if value < 100 else plain(value, 4)
