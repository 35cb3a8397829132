from typing import Any

import pytest

from clearway.measure.groups import arrange
from clearway.measure.panels import STAGES, panels, strips
from clearway.measure.record import Record
from clearway.measure.tables import tables
from record_builders import H200, made, pair, samples, throughput

ROOFS = {**H200, "settings": {"ceilings": {"gb_per_s": 4000, "tflop_per_s": 700}}}


def _titles(ledger: str, *records: Record) -> list[str]:
    (group,) = arrange(("f", record) for record in records).groups
    return [title for title, _ in panels(group, ledger, group.entries, tables(group, ledger))]


def test_throughput_has_times_ratios_and_stages() -> None:
    assert _titles("throughput", *pair()) == [
        "Seconds a call",
        "Ratio of times to diffusers, 95 % interval, noise floor shaded",
    ]
    staged = made("s", "c", None, throughput=throughput(samples(1.0), stages_ms={"UNet": 1.0, "VAE": "x"}))
    assert _titles("throughput", staged) == ["Seconds a call", STAGES]


def test_operations_need_both_ceilings_and_both_amounts() -> None:
    work: dict[str, Any] = {"name": "x", "p50_ms": 1.0, "flops": 1e12, "bytes_moved": 1e9}
    assert len(_titles("operations", made("s", "c", None, ROOFS, operations=[work]))) == 1
    assert _titles("operations", made("s", "c", None, H200, operations=[work])) == []
    assert _titles("operations", made("s", "c", None, ROOFS, operations=[work | {"flops": None}])) == []
    assert _titles("operations", made("s", "c", None, ROOFS, operations=[work | {"flops": 1e300}])) == []


@pytest.mark.parametrize("line", [None, 3, [], [[0, 1]], ["ab", "cd"], [[0, -1], [1, -2]], [[0], [1]]])
def test_a_memory_line_that_is_none_is_not_drawn(line: object) -> None:
    assert _titles("memory", made("s", "c", None, memory={"driver_peak_bytes": 1, "timeline": line})) == []


def test_a_memory_line_is_drawn() -> None:
    assert (
        len(
            _titles(
                "memory", made("s", "c", None, memory={"timeline": [[0, 1], [1, 2]], "driver_peak_bytes": 2})
            )
        )
        == 1
    )


def test_strips_carry_the_run_where_there_are_several() -> None:
    (group,) = arrange(("f", record) for record in [*pair(), *pair()]).groups
    assert [label for label, *_ in strips(group, group.entries)] == [
        "diffusers · run A",
        "clearway · run A",
        "diffusers · run B",
        "clearway · run B",
    ]
    (odd,) = arrange([("f", made("s", "c", None, throughput={"samples_s": [-1.0]}))]).groups
    assert strips(odd, odd.entries) == []
