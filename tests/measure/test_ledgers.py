"""Ledgers of a record: what a round's times say of one call."""

from __future__ import annotations

import pytest

from clearway.measure.clock import Samples
from clearway.measure.harness import Entry
from clearway.measure.ledgers import a_call, comparisons, operation, operations, throughput
from clearway.measure.scenario import Scenario

TINY = Scenario(name="tiny", count=2, batch_size=2)
SAMPLES = Samples((2.0, 4.0, 6.0), (1.0, 2.0, 3.0), 9.0, 3, True)


def test_an_operation_without_counts_has_no_rates() -> None:
    row = operation("x", [0.001, 0.002, 0.003])
    assert row["p50_ms"] == 2.0 and row["flops"] is None and row["gb_per_s"] is None
    assert throughput(TINY, Entry("x"), None) is None and operations(TINY, Entry("x"), {}) is None


def test_a_rounds_times_are_divided_by_its_calls() -> None:
    found = a_call(SAMPLES, 2)
    assert found.wall_s == (1.0, 2.0, 3.0) and found.device_s == (0.5, 1.0, 1.5)
    assert a_call(SAMPLES, 1) is SAMPLES


def test_what_png_files_took_stands_beside_the_whole() -> None:
    entry = Entry("x", samples=SAMPLES, png_s=(0.1, 0.3, 0.2))
    found = throughput(TINY, entry, 1.0)
    assert found is not None and found["png_p50_s"] == 0.2 and found["images"] == 2
    assert found["images_per_hour"] == pytest.approx(1800) and found["ready_s"] is found["first_s"] is None
    assert operations(TINY, entry, {}) is None


def test_what_was_not_timed_in_the_same_rounds_is_not_compared() -> None:
    entry = Entry("x", samples=SAMPLES)
    assert comparisons(entry, [entry, Entry("y")], 0.0) == []
