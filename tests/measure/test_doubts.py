import dataclasses
from typing import Any

import pytest

from clearway.measure.doubts import conditions, doubts, withheld
from clearway.measure.groups import Group, arrange
from clearway.measure.record import Record
from record_builders import H200, made, pair, samples, throughput


def _group(records: list[Record]) -> Group:
    (group,) = arrange(("file.jsonl", record) for record in records).groups
    return group


def test_consistent_records_are_not_doubted() -> None:
    assert doubts(_group([*pair(), *pair("other", factor=1.0)])) == []


@pytest.mark.parametrize("key", ["n", "p20_s", "p50_s", "p80_s", "outliers", "images_per_hour"])
def test_a_summary_that_its_samples_contradict_is_named(key: str) -> None:
    ledger: dict[str, Any] = throughput(samples(2.0), price=None)
    ledger[key] = (ledger[key] or 10) * 1.02
    (words,) = doubts(_group([made("s", "c", None, throughput=ledger)]))
    assert words.startswith(f"s, c (file.jsonl): says {key} ") and "its samples give" in words


def test_cost_is_checked_against_the_named_price() -> None:
    ledger = throughput(samples(2.0), price=3.0, price_per_hour=3.0)
    assert doubts(_group([made("s", "c", None, throughput=ledger)])) == []
    ledger["cost_per_1000"] *= 0.9
    (words,) = doubts(_group([made("s", "c", None, throughput=ledger)]))
    assert "says cost_per_1000" in words


def test_rounding_to_four_digits_is_no_contradiction() -> None:
    ledger = throughput(samples(2.0))
    rounded = {
        key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in ledger.items()
    }
    assert doubts(_group([made("s", "c", None, throughput=rounded)])) == []


def test_a_claimed_verdict_is_named() -> None:
    base, same = pair(factor=1.0)
    lie = dataclasses.replace(same, comparisons=[same.comparisons[0] | {"verdict": "faster", "ratio": 0.9}])
    first, second = doubts(_group([base, lie]))
    assert "says “faster” against diffusers, its data allow “no difference”" in first
    assert "says ratio 0.9000 against diffusers, the rounds give" in second


def test_missing_samples_and_wrong_rates_are_named() -> None:
    bare = made("s", "c", None, throughput={"p50_s": 2.0})
    assert "no raw samples" in doubts(_group([bare]))[0]
    work = {"name": "softmax", "p50_ms": 1.0, "bytes_moved": 1e9, "gb_per_s": 2000.0}
    (words,) = doubts(_group([made("s", "c", None, operations=[work])]))
    assert "softmax: says gb_per_s 2,000, its raw data give 1,000" in words


def test_what_is_withheld_has_its_reason() -> None:
    records = [
        made("s", "x", samples(1.0), refused="graph missed"),
        made("s", "y", None, failed="out of memory"),
    ]
    rows = withheld(_group([*pair(), *records]))
    assert [(row["contender"], row["what"], row["reason"]) for row in rows] == [
        ("x", "refused", "graph missed"),
        ("y", "failed", "out of memory"),
    ]
    assert doubts(_group(records)) == []


def test_what_ran_is_listed() -> None:
    row = conditions(
        _group([made("s", "c", [1.0], intended={"executor": "graph"}, routes={"attention/sdpa": 30})])
    )[0]
    assert row["intended"] == "executor graph" and row["routes"] == "attention/sdpa × 30"
    assert row["settings"] == "dtype float16, environment.OMP_NUM_THREADS 1"


def test_the_workload_is_named_and_long_settings_are_not() -> None:
    settings = {"scenario": {"name": "s", "steps": 30, "notes": "x"}, "order": ["a", "b"], "rounds": 10}
    group = _group([made("s", "c", [1.0], {**H200, "settings": settings})])
    assert (conditions(group)[0]["workload"], conditions(group)[0]["settings"]) == ("30 steps", "rounds 10")
