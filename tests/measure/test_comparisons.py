import dataclasses
import math

import pytest

from clearway.measure.comparisons import comparisons
from clearway.measure.groups import Group, arrange
from clearway.measure.record import Record
from record_builders import FLOOR, comparison, made, pair, samples


def _group(records: list[Record]) -> Group:
    (group,) = arrange(("file", record) for record in records).groups
    return group


def _only(records: list[Record]) -> dict:
    group = _group(records)
    (row,) = comparisons(group, group.entries[-1])
    return row


@pytest.mark.parametrize(("factor", "verdict"), [(0.8, "faster"), (1.0, "no difference"), (1.2, "slower")])
def test_it_is_tested_anew_from_both_records(factor: float, verdict: str) -> None:
    records = pair(factor=factor)
    said = records[1].comparisons[0]
    lie = dataclasses.replace(
        records[1], comparisons=[said | {"ratio": 0.5, "low": 0.4, "high": 0.6, "verdict": "faster"}]
    )
    row = _only([records[0], lie])
    assert row["anew"] and row["verdict"] == verdict == said["verdict"]
    assert (row["ratio"], *row["interval"]) == (said["ratio"], said["low"], said["high"])


def _told(**words: object) -> Record:
    said = {
        "against": "elsewhere",
        "ratio": 0.9,
        "low": 0.88,
        "high": 0.92,
        "floor": 0.01,
        "p_value": 0.01,
        "n": 9,
    }
    return made("s", "c", [1.0] * 9, comparisons=[said | {"verdict": "faster"} | words])


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ({}, "faster"),
        ({"ratio": 1.1, "low": 1.05, "high": 1.2}, "slower"),
        ({"high": 1.01}, "no difference"),
        ({"floor": 0.2}, "no difference"),
        ({"floor": None}, "no difference"),
        ({"p_value": 0.2}, "no difference"),
        ({"low": 0, "high": None}, "no difference"),
        ({"ratio": -1}, "no difference"),
    ],
)
def test_without_the_other_record_the_verdict_is_what_its_figures_allow(words: dict, verdict: str) -> None:
    row = _only([_told(**words)])
    assert not row["anew"] and row["verdict"] == verdict


def test_what_has_no_ratio_is_no_comparison() -> None:
    group = _group([_told(ratio="0.5")])
    assert comparisons(group, group.entries[0]) == []


def test_only_rounds_of_the_same_run_and_number_are_paired() -> None:
    short, other = made("s", "base", samples(1.0, n=5)), made("other", "base", samples(1.0, n=9))
    assert not _only([short, _told(against="base")])["anew"]
    assert not _only([other, _told(against="base")])["anew"]
    impossible = made("s", "base", None, throughput={"samples_s": [0.0] * 9})
    assert not _only([impossible, _told(against="base")])["anew"]


def test_too_few_rounds_have_no_bound() -> None:
    times = samples(1.0, n=4)
    said = comparison([one / 2 for one in times], times, "base", FLOOR)
    row = _only([made("s", "base", times), made("s", "c", [one / 2 for one in times], comparisons=[said])])
    assert row["interval"] == (0.0, None) and row["verdict"] == "too few rounds" and math.isinf(said["high"])


def _mutual(names: list[str]) -> Group:
    times = {name: samples(1.0 + index / 10, seed=index) for index, name in enumerate(names)}
    return _group(
        [
            made(
                "s",
                name,
                times[name],
                comparisons=[
                    comparison(times[name], times[other], other) for other in names if other != name
                ],
            )
            for name in names
        ]
    )


def test_a_pair_that_tells_of_each_other_stands_once() -> None:
    group = _mutual(["clearway", "clearway-eager", "diffusers", "diffusers-compile"])
    pairs = [
        (entry.record.contender, row["against"])
        for entry in group.entries
        for row in comparisons(group, entry)
    ]
    assert pairs == [
        ("clearway", "clearway-eager"),
        ("clearway", "diffusers"),
        ("clearway", "diffusers-compile"),
        ("clearway-eager", "diffusers"),
        ("clearway-eager", "diffusers-compile"),
        ("diffusers-compile", "diffusers"),
    ]
    assert sum(len(comparisons(group, entry, every=True)) for entry in group.entries) == 12


def test_what_was_refused_is_compared_with_nothing() -> None:
    base, mine = pair()
    assert comparisons(_group([base, mine]), _group([base, mine]).entries[1])
    refused = _group([dataclasses.replace(base, refused="wrong pictures"), mine])
    assert comparisons(refused, refused.entries[1]) == []


def test_records_of_another_moment_are_not_paired() -> None:
    base, mine = pair()
    later = dataclasses.replace(base, provenance={**base.provenance, "date": "2026-11-29T18:00:00Z"})
    assert not _only([later, mine])["anew"] and _only([base, mine])["anew"]


def test_a_contender_of_the_same_name_elsewhere_is_not_itself() -> None:
    times = samples(1.0, n=9)
    row = _only([made("s", "c", times, comparisons=_told(against="c").comparisons)])
    assert not row["anew"] and row["ratio"] == 0.9


def test_a_floor_below_zero_is_none_and_lengths_beyond_reason_are_not_tested() -> None:
    records = pair(factor=0.8)
    lie = dataclasses.replace(records[1], comparisons=[records[1].comparisons[0] | {"floor": -1000.0}])
    row = _only([records[0], lie])
    assert row["floor"] is None and row["verdict"] == "no difference"
    for at, seconds in ((0, 1e-8), (1, 1e308)):
        given = {**(records[at].throughput or {}), "samples_s": [seconds] * 12}
        records[at] = dataclasses.replace(records[at], throughput=given)
    assert _only(records)["anew"] is False
