import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearway.measure import figures
from clearway.measure.figures import number, plain, size, span

times = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=40)


@given(times, st.integers(1, 8), st.floats(0.01, 100))
def test_figures_come_from_samples_alone(samples: list[float], images: int, price: float) -> None:
    lies = {"n": 99, "p20_s": 1.0, "p50_s": 1.0, "p80_s": 1.0, "images_per_hour": 1.0, "outliers": 40}
    found = figures.throughput(lies | {"samples_s": samples, "images": images, "price_per_hour": price})
    middle = statistics.median(samples)
    assert found["n"] == len(samples)
    assert found["p50_s"] == pytest.approx(middle)
    assert (found["p20_s"], found["p80_s"]) == pytest.approx(tuple(np.percentile(samples, (20, 80))))
    assert found["images_per_hour"] == pytest.approx(images * 3600 / middle)
    assert found["cost_per_1000"] == pytest.approx(1000 * price * middle / 3600 / images)


def test_the_price_is_implied_where_it_is_not_named() -> None:
    given = {"images": 2, "samples_s": [4.0], "images_per_hour": 1800.0, "cost_per_1000": 1.5}
    assert figures.price_per_hour(given) == pytest.approx(2.7)
    assert figures.throughput(given)["cost_per_1000"] == pytest.approx(1.5)
    assert figures.throughput({"samples_s": [4.0]})["images_per_hour"] is None


def test_without_samples_the_summary_stands() -> None:
    found = figures.throughput({"p50_s": 2.0, "n": 5, "p20_s": "1", "samples_s": [1, None]})
    assert (found["p50_s"], found["n"], found["p20_s"]) == (2.0, 5.0, None)


def test_rates_of_an_operation() -> None:
    rates = figures.operation({"p50_ms": 2.0, "bytes_moved": 4e9, "flops": 6e12})
    assert (rates["gb_per_s"], rates["tflop_per_s"]) == pytest.approx((2000.0, 3000.0))
    nothing = figures.operation({"p50_ms": 0, "flops": 1})
    assert nothing["gb_per_s"] is nothing["tflop_per_s"] is None
    anew = figures.operation({"p50_ms": 9.0, "n": 9, "samples_ms": [1.0, 2.0, 6.0], "bytes_moved": 4e9})
    assert (anew["n"], anew["p50_ms"], anew["gb_per_s"]) == pytest.approx((3, 2.0, 2000.0))
    assert (anew["p20_ms"], anew["p80_ms"]) == pytest.approx(tuple(np.percentile([1.0, 2.0, 6.0], (20, 80))))


@pytest.mark.parametrize("value", [True, "1", None, [], {}, math.nan, math.inf, 10**400])
def test_what_is_no_finite_number_is_none(value: object) -> None:
    assert number(value) is None


def test_difference_means_more_than_rounding() -> None:
    assert not figures.differs(1.234, 1.2343) and figures.differs(1.234, 1.26)
    assert not figures.differs(None, 1.0) and not figures.differs("x", 1.0)


def test_words_of_figures() -> None:
    shown = [plain(value) for value in (None, 0.0, 0.0123456, 1.23456, 123.456, 12345.6, -2.5, 1e300)]
    assert shown == ["", "0", "0.01235", "1.235", "123.5", "12,346", "-2.500", "1.000e+300"]
    assert [size(value) for value in (None, 512.0, 2.0**21, 270.135 * 2**30)] == [
        "",
        "512 B",
        "2.000 MiB",
        "270.1 GiB",
    ]
    assert span(1.0, 2.0) == "1.000–2.000" and span(None, 2.0) == ""


def test_nested_settings_are_one_line() -> None:
    given = {"dtype": "float16", "environment": {"A": "1"}, "none": None, "list": [1, 2], "empty": {}}
    assert dict(figures.flat(given)) == {"dtype": "float16", "environment.A": "1", "list": "1 2"}
