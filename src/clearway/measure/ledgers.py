"""An arm's evidence as the ledgers of a record: computed from the rounds, in seconds a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from clearway.measure.clock import Samples, compare, quantile
from clearway.measure.scenario import Scenario

if TYPE_CHECKING:
    from clearway.measure.harness import Entry


def a_call(samples: Samples, calls: int) -> Samples:
    """The times of rounds of `calls` calls as times of one call."""
    if calls == 1:
        return samples
    device_s = samples.device_s and tuple(one / calls for one in samples.device_s)
    return replace(samples, wall_s=tuple(one / calls for one in samples.wall_s), device_s=device_s)


def throughput(scenario: Scenario, entry: Entry, price_per_hour: float | None) -> dict[str, Any] | None:
    """The throughput ledger, in seconds a call; a network's call makes no pictures, so it has none an hour.

    Of a first round of several calls the first one is told: the others are taken off at the median.
    """
    samples = entry.samples and a_call(entry.samples, scenario.calls)
    if samples is None:
        return None
    others = (scenario.calls - 1) * samples.p50
    first, *settling = (max(0.0, one - others) for one in (entry.first_s or 0.0, *entry.settling_s))
    new_size = entry.new_size_s and max(0.0, entry.new_size_s - others)
    images = scenario.count if scenario.what == "whole" else None
    hourly = images * 3600 / samples.p50 if images else None
    ready = None
    if entry.prepare_s is not None and entry.first_s is not None:
        ready = entry.prepare_s + sum(max(0.0, one - samples.p50) for one in (first, *settling))
    return {
        "images": images,
        "calls": scenario.calls,
        "n": len(samples.wall_s),
        "p20_s": samples.p20,
        "p50_s": samples.p50,
        "p80_s": samples.p80,
        "samples_s": list(samples.wall_s),
        "device_p50_s": samples.device_p50,
        "device_samples_s": None if samples.device_s is None else list(samples.device_s),
        "first_s": None if entry.first_s is None else first,
        "ready_s": ready,
        "new_size_s": new_size,
        "png_p50_s": quantile(entry.png_s, 50) if entry.png_s else None,
        "outliers": samples.outliers(),
        "stable": samples.stable,
        "warm_ups": samples.warm_ups,
        "images_per_hour": hourly,
        "price_per_hour": price_per_hour,
        "cost_per_1000": price_per_hour * 1000 / hourly if price_per_hour is not None and hourly else None,
    }


def operations(scenario: Scenario, entry: Entry, cost: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The operations ledger of a network's call; None for whole generations."""
    if entry.samples is None or scenario.what == "whole":
        return None
    from clearway.measure.networks import TITLES

    several = f", of {scenario.calls} in a row" if scenario.calls > 1 else ""
    wall_s = a_call(entry.samples, scenario.calls).wall_s
    return [operation(TITLES[scenario.what] + several, wall_s, **cost)]


def operation(
    name: str, seconds: Sequence[float], *, flops: int | None = None, bytes_moved: int | None = None
) -> dict[str, Any]:
    """One row of the operations ledger from its times in seconds."""
    middle = quantile(seconds, 50)
    return {
        "name": name,
        "n": len(seconds),
        "p20_ms": quantile(seconds, 20) * 1000,
        "p50_ms": middle * 1000,
        "p80_ms": quantile(seconds, 80) * 1000,
        "samples_ms": [one * 1000 for one in seconds],
        "flops": flops,
        "bytes_moved": bytes_moved,
        "gb_per_s": bytes_moved / middle / 1e9 if bytes_moved is not None else None,
        "tflop_per_s": flops / middle / 1e12 if flops is not None else None,
    }


def comparisons(entry: Entry, entries: Sequence[Entry], floor: float) -> list[dict[str, Any]]:
    """This arm against every other of the same work that was timed in the same rounds."""
    found = []
    for other in entries:
        if other is entry or entry.samples is None or other.samples is None:
            continue
        same = entry.arm is not None and other.arm is not None and entry.arm.work == other.arm.work
        if same and len(entry.samples.wall_s) == len(other.samples.wall_s):
            found.append({"against": other.name, **asdict(compare(other.samples, entry.samples, floor))})
    return found
