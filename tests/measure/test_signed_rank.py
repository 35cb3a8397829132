"""The signed-rank test against published tables, enumeration by hand, and the properties it must have."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearway.measure.signed_rank import critical_value, distribution, locate, mid_ranks, p_value

# two-sided 5 %, n = 6 … 25: e.g. R. L. McCornack, "Extended tables of the Wilcoxon matched pair signed rank
# statistic", Journal of the American Statistical Association 60 (1965)
TABLE = (0, 2, 3, 5, 8, 10, 13, 17, 21, 25, 29, 34, 40, 46, 52, 58, 65, 73, 81, 89)


def by_enumeration(values: list[float]) -> float:
    """The two-sided p value by trying every assignment of signs: an independent formula, for few values."""
    sizes = [abs(value) for value in values]
    ranks = [
        sum(other < size for other in sizes) + (sum(other == size for other in sizes) + 1) / 2
        for size in sizes
    ]
    moving = [rank for rank, value in zip(ranks, values, strict=True) if value]
    seen = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    middle = sum(moving) / 2
    far = [
        abs(sum(rank for rank, up in zip(moving, signs, strict=True) if up) - middle) >= abs(seen - middle)
        for signs in itertools.product((False, True), repeat=len(moving))
    ]
    return sum(far) / len(far)


def test_critical_values_are_those_of_the_tables() -> None:
    assert tuple(critical_value(n) for n in range(6, 26)) == TABLE
    assert [critical_value(n) for n in range(1, 6)] == [-1] * 5


def test_the_exact_distribution_of_three_ranks() -> None:
    # sums of subsets of {1, 2, 3}: 0 1 2 3 3 4 5 6
    assert (distribution(np.array([1, 2, 3]))[::2] * 8).tolist() == [1, 1, 1, 2, 1, 1, 1]
    assert distribution(np.array([1.5, 1.5]))[[0, 3, 6]].tolist() == [0.25, 0.5, 0.25]


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_p_with_ties_and_zeros_is_the_enumerated_one(values: list[int]) -> None:
    expected = by_enumeration([float(value) for value in values])
    assert p_value(np.array(values, dtype=float)) == pytest.approx(expected, abs=1e-12)


def test_ties_share_their_mean_rank() -> None:
    assert mid_ranks(np.array([3.0, 1.0, 3.0, 0.0, 3.0])).tolist() == [4, 2, 4, 1, 4]


@pytest.mark.parametrize("n", range(6, 26))
def test_the_exact_test_never_exceeds_its_level(n: int) -> None:
    below = np.cumsum(distribution(np.arange(1, n + 1))[::2])
    cut = critical_value(n)
    assert 2 * below[cut] <= 0.05 < 2 * below[cut + 1]


@pytest.mark.parametrize("n", [26, 30, 40, 60, 100])
def test_above_25_the_normal_approximation_is_close_to_the_exact_test(n: int) -> None:
    exact = np.cumsum(distribution(np.arange(1, n + 1))[::2])
    assert 2 * exact[critical_value(n)] == pytest.approx(0.05, abs=0.004)
    values = np.random.default_rng(n).normal(0.1, 1.0, n)
    ranks = mid_ranks(np.abs(values))
    above = int(min(ranks[values > 0].sum(), ranks[values < 0].sum()))
    assert p_value(values) == pytest.approx(2 * exact[above], abs=0.01)


@pytest.mark.parametrize("seed", range(200))
def test_interval_and_p_value_are_one_test(seed: int) -> None:
    """Without ties the interval excludes 0 exactly where p is at most 5 %; the centres inside are kept."""
    rng = random.Random(seed)
    values = np.array([rng.gauss(rng.choice((0, 0.5)), 1) for _ in range(rng.randint(6, 40))])
    found = locate(values)
    assert (found.low > 0 or found.high < 0) == (found.p_value <= 0.05)
    assert found.low <= found.estimate <= found.high
    step = 1e-9
    assert p_value(values - (found.low + step)) > 0.05 >= p_value(values - (found.low - step))
    assert p_value(values - (found.high - step)) > 0.05 >= p_value(values - (found.high + step))


def test_the_estimate_is_the_median_of_all_pairs_means() -> None:
    assert locate([1.0, 2.0, 9.0]).estimate == 3.5  # 1 1.5 2 | 5 5.5 9: the middle of 2 and 5


@given(st.lists(st.integers(-1000, 1000).map(float), min_size=6, max_size=30))
def test_mirror_shift_and_scale(values: list[float]) -> None:
    found, mirrored = locate(values), locate([-value for value in values])
    assert (mirrored.estimate, mirrored.low, mirrored.high) == (-found.estimate, -found.high, -found.low)
    assert mirrored.p_value == found.p_value
    moved = locate([4 * value + 64 for value in values])
    assert (moved.low, moved.high) == (4 * found.low + 64, 4 * found.high + 64)
    assert locate([4 * value for value in values]).p_value == found.p_value


def test_one_wild_value_moves_little() -> None:
    calm = [0.01 * i for i in range(-10, 11)]
    wild = [*calm[:-1], 1e6]
    assert abs(locate(wild).estimate - locate(calm).estimate) < 0.02
    assert locate(wild).high < 0.2


def test_too_few_pairs_have_no_interval() -> None:
    found = locate([1.0, 1.1, 1.2, 1.3, 1.4])
    assert (found.low, found.high, found.p_value) == (-math.inf, math.inf, 0.0625)


def test_all_zero_is_no_evidence() -> None:
    found = locate([0.0] * 12)
    assert (found.estimate, found.low, found.high, found.p_value) == (0, 0, 0, 1)


def test_the_kind_of_test_is_named() -> None:
    assert locate([1.0] * 25).test.endswith("exact")
    assert locate([1.0] * 26).test.endswith("normal approximation")


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf]])
def test_what_is_no_difference_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        locate(values)


@pytest.mark.parametrize("n", [8, 20, 30])
def test_the_interval_covers_the_centre_as_often_as_it_says(n: int) -> None:
    """Heavy-tailed differences about 1: at least 95 % of 1000 intervals, less three deviations of chance."""
    rng = np.random.default_rng(n)
    draws = 1 + rng.standard_t(2, (1000, n))
    covered = sum(found.low <= 1 <= found.high for found in map(locate, draws.tolist()))
    assert covered >= 950 - 3 * math.sqrt(1000 * 0.95 * 0.05)
