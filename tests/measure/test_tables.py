import random
import statistics

import pytest

from clearway.measure.groups import Group, arrange
from clearway.measure.record import Record
from clearway.measure.tables import LEDGERS, WORK_WORDS, Table, tables
from record_builders import H200, made, pair, samples, throughput


def group(records: list[Record]) -> Group:
    (found,) = arrange(("file", record) for record in records).groups
    return found


def column(table: Table, heading: str) -> list[str]:
    index = [each.heading for each in table.columns].index(heading)
    return [row[index] for row in table.cells()]


def test_medians_rates_and_cost_are_what_the_raw_samples_say() -> None:
    times = [random.Random(seed).uniform(1, 2) for seed in range(11)]
    lies = throughput(times, images=4, price=3.0) | {"p50_s": 0.5, "images_per_hour": 1e6}
    (table,) = (
        one
        for one in tables(group([made("s", "c", None, throughput=lies)]), "throughput")
        if one.name == "time"
    )
    middle = statistics.median(times)
    implied = 3.0 * 1000 / (4 * 3600 / middle) * 1e6 / 1000  # the price that this record's own figures imply
    (row,) = table.rows
    assert row["p50_s"] == pytest.approx(middle) and row["n"] == 11
    assert row["images_per_hour"] == pytest.approx(4 * 3600 / middle)
    assert row["cost_per_1000"] == pytest.approx(implied * 1000 / (4 * 3600 / middle))
    assert column(table, "median, s") == [f"{middle:.3f}"]
    assert column(table, "images an hour") == [f"{4 * 3600 / middle:,.0f}"]
    named = made("s", "c", None, throughput=lies | {"price_per_hour": 3.0})
    assert tables(group([named]), "throughput")[0].rows[0]["cost_per_1000"] == pytest.approx(
        3 * middle / 14.4
    )


def test_ledgers_share_no_figure() -> None:
    full = made(
        "s",
        "c",
        samples(1.0),
        operations=[{"name": "softmax", "n": 5, "p50_ms": 1.0, "bytes_moved": 2e9}],
        correctness={"reference": "r", "verified": True, "psnr_db": 50.0},
        memory={"driver_peak_bytes": 2**31},
    )
    names = {ledger: {table.name for table in tables(group([full]), ledger)} for ledger in LEDGERS}
    assert names == {
        "throughput": {"time", "once"},
        "operations": {"operations"},
        "correctness": {"correctness"},
        "memory": {"memory"},
    }
    figures_of = [
        {each.key for table in tables(group([full]), ledger) for each in table.columns if each.right}
        for ledger in LEDGERS
    ]
    shared = {"n"}
    assert all(a & b <= shared for i, a in enumerate(figures_of) for b in figures_of[i + 1 :])


def test_kinds_of_work_and_scenarios_never_share_a_table() -> None:
    records = [
        made(scenario, f"{scenario} {work}", samples(1.0), work=work)
        for work in ("less work", "same", "changed precision")
        for scenario in ("a", "b")
    ]
    found = [one for one in tables(group(records), "throughput") if one.name == "time"]
    assert [(one.scenario, one.work) for one in found] == [
        (scenario, work) for scenario in "ab" for work in ("same", "changed precision", "less work")
    ]
    assert all([row["contender"] for row in one.rows] == [f"{one.scenario} {one.work}"] for one in found)
    assert found[2].work_words == WORK_WORDS["less work"]


def test_what_is_refused_or_failed_has_no_figure() -> None:
    records = [
        *pair(),
        made("sdxl-30", "x", samples(0.001), refused="graph missed"),
        made("sdxl-30", "y", None, failed="oom"),
    ]
    words = str([one.as_json() for ledger in LEDGERS for one in tables(group(records), ledger)])
    assert "'x'" not in words and "'y'" not in words and "'clearway'" in words


def test_losses_stand_with_wins() -> None:
    records = [*pair(), *pair("other", factor=1.3)]
    rows = [row for one in tables(group(records), "throughput") if one.name == "compared" for row in one.rows]
    assert [row["verdict"] for row in rows] == ["faster", "slower"]


def test_rows_have_a_run_only_where_there_are_several() -> None:
    one = tables(group(pair()), "throughput")[0]
    assert "run" not in [each.heading for each in one.columns]
    two = tables(group([*pair(), *pair()]), "throughput")[0]
    assert column(two, "run") == ["A", "A", "B", "B"]


@pytest.mark.parametrize(
    "given",
    [{"gb_per_s": 4000, "tflop_per_s": 800}, {"bytes_per_s": 4e12, "flops_per_s": 8e14, "dtype": "float16"}],
)
def test_operations_against_the_ceilings(given: dict) -> None:
    roofs = {**H200, "settings": {"ceilings": given}}
    work = {
        "name": "geglu",
        "n": 7,
        "p20_ms": 1.0,
        "p50_ms": 2.0,
        "p80_ms": 3.0,
        "bytes_moved": 4e9,
        "flops": 8e11,
    }
    (table,) = tables(group([made("ops", "c", None, roofs, operations=[work, work])]), "operations")
    assert [row["place"] for row in table.rows] == [1, 2]
    assert column(table, "GB/s")[0] == "2,000" and column(table, "TFLOP/s")[0] == "400"
    assert (table.rows[0]["gb_share"], table.rows[0]["tflop_share"]) == pytest.approx((0.5, 0.5))


def test_correctness_says_identical_wrong_and_unchecked() -> None:
    records = [
        made(
            "s",
            "a",
            samples(1.0),
            correctness={"reference": "a", "verified": True, "psnr_db": None, "identical": True},
        ),
        made(
            "s",
            "b",
            samples(1.0),
            correctness={"reference": "a", "verified": False, "psnr_db": 12.34, "max_error": 255},
        ),
        made("s", "c", samples(1.0), correctness={"reference": "a", "verified": "not checked"}),
    ]
    (table,) = tables(group(records), "correctness")
    assert column(table, "verified") == ["yes", "NO", "not checked"]
    assert column(table, "PSNR") == ["identical", "12.3 dB", ""]
    time = tables(group(records), "throughput")[0]
    assert time.notes == ["b gave wrong pictures: see Correctness."]


def test_the_stock_path_is_a_reference_of_its_own() -> None:
    stock = {"reference": "eager, float16", "psnr_db": 55.0, "max_error": 2}
    likeness = {"reference": "eager, float32", "verified": True, "psnr_db": 44.0, "stock": stock}
    likeness["other_environment"] = {"reference": "c with torch 3", "identical": True}
    likeness |= {"latents": {"rel_l2": 0.004, "psnr_db": 50.0}, "tolerance_rel_l2": 0.005}
    (table,) = tables(group([made("s", "c", None, correctness=likeness)]), "correctness")
    assert column(table, "reference") == ["eager, float32", "eager, float16", "c with torch 3"]
    assert column(table, "PSNR") == ["44.0 dB", "55.0 dB", "identical"] and column(table, "verified") == [
        "yes",
        "",
        "",
    ]
    assert column(table, "allowed") == ["0.005", "", ""]


def test_memory_has_three_meters_and_says_how_they_were_read() -> None:
    meters = {
        "baseline_bytes": 2**30,
        "driver_peak_bytes": 270.135 * 2**30,
        "allocator_peak_bytes": 8.07 * 2**30,
        "live_peak_bytes": None,
        "sources": {"driver": "a counter"},
    }
    (table,) = tables(group([made("s", "c", None, memory=meters)]), "memory")
    assert column(table, "driver, peak") == ["270.1 GiB"] and column(table, "allocator, peak") == [
        "8.070 GiB"
    ]
    assert "live tensors, peak" not in [each.heading for each in table.columns]
    assert table.notes == ["How it was read: driver: a counter."]


def test_records_of_odd_types_give_no_tables_and_no_error() -> None:
    odd = made(
        "s",
        "c",
        None,
        throughput={"samples_s": "x"},
        operations=[{}],
        correctness={"latents": 3},
        memory={"x_bytes": "y"},
    )
    for ledger in LEDGERS:
        for table in tables(group([odd]), ledger):
            table.cells()
