"""The Wilcoxon signed-rank test with the Hodges-Lehmann estimate and its interval, on paired differences.

Assumed: the pairs are independent of each other and their differences are distributed symmetrically about one
centre. Nothing is assumed of their shape: heavy tails and outliers cost little. Source: F. Wilcoxon (1945);
J. L. Hodges and E. L. Lehmann (1963); zeros as J. W. Pratt (1959): ranked with the others, then left out of
the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

EXACT_UP_TO = 25
ALPHA = 0.05


@dataclass(frozen=True)
class Location:
    """Where differences lie: `estimate` within `low`..`high`, and the two-sided `p_value` of "at 0".

    The interval has at least the asked confidence; below 6 pairs no 95 % interval exists and it is -inf..inf.
    """

    estimate: float
    low: float
    high: float
    p_value: float
    test: str


def locate(differences: Sequence[float], alpha: float = ALPHA) -> Location:
    """The centre of `differences` (finite numbers, at least one), tested against 0 at level `alpha`.

    Exact up to 25 differences, above them the normal approximation with tie and continuity corrections. The
    interval's ends are Walsh averages, the means of all pairs: n(n + 1)/2 numbers, so n should stay in the
    thousands. It is the set of centres that the test (of untied differences) does not reject.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError("a signed-rank test needs at least one difference and only finite ones")
    first, second = np.triu_indices(values.size)
    walsh = np.sort((values[first] + values[second]) / 2)
    cut = critical_value(values.size, alpha)
    exact = values.size <= EXACT_UP_TO
    return Location(
        estimate=float(np.median(walsh)),
        low=-math.inf if cut < 0 else float(walsh[cut]),
        high=math.inf if cut < 0 else float(walsh[-1 - cut]),
        p_value=p_value(values),
        test=f"Wilcoxon signed-rank, paired by round, {'exact' if exact else 'normal approximation'}",
    )


def p_value(values: np.ndarray) -> float:
    """The two-sided probability, were the centre 0, of a rank sum at least as far from its mean as this."""
    ranks = mid_ranks(np.abs(values))[values != 0]
    above = float(mid_ranks(np.abs(values))[values > 0].sum())
    smaller = min(above, float(ranks.sum()) - above)
    if ranks.size == 0:
        return 1.0
    if values.size <= EXACT_UP_TO:
        return min(1.0, 2 * float(distribution(ranks)[: round(2 * smaller) + 1].sum()))
    deviation = math.sqrt(float((ranks**2).sum())) / 2
    z = (smaller + 0.5 - float(ranks.sum()) / 2) / deviation
    return min(1.0, 2 * NormalDist().cdf(z))


def distribution(ranks: np.ndarray) -> np.ndarray:
    """P(W+ = k/2) for k = 0, 1, …: W+ sums the ranks (halves or whole) whose fair coin shows heads.

    By dynamic programming over the ranks: each either adds itself or does not.
    """
    doubled = np.rint(2 * np.asarray(ranks)).astype(int)
    chances = np.zeros(int(doubled.sum()) + 1)
    chances[0] = 1.0
    for rank in doubled:
        shifted = np.zeros_like(chances)
        shifted[rank:] = chances[: chances.size - rank]
        chances = (chances + shifted) / 2
    return chances


def critical_value(n: int, alpha: float = ALPHA) -> int:
    """The largest c with P(W+ <= c) <= alpha/2 for n untied differences; -1 where there is none."""
    ranks = np.arange(1, n + 1)
    if n <= EXACT_UP_TO:
        below = np.cumsum(distribution(ranks)[::2])  # whole ranks: only every second half is possible
        return int(np.searchsorted(below, alpha / 2, side="right")) - 1
    deviation = math.sqrt(float((ranks.astype(float) ** 2).sum())) / 2
    return math.floor(n * (n + 1) / 4 - 0.5 + NormalDist().inv_cdf(alpha / 2) * deviation)


def mid_ranks(sizes: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of the ranks they occupy."""
    _, place, count = np.unique(sizes, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    shared: np.ndarray = (last - (count - 1) / 2)[place]
    return shared
