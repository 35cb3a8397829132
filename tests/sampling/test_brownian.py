"""Brownian trees against torchsde's, bit for bit, and what they draw and keep."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torchsde
from hypothesis import given, settings
from hypothesis import strategies as st
from torchsde._brownian import brownian_interval

from clearway.sampling import brownian_noise, philox, sample, schedule
from clearway.sampling.brownian import POOL_WORDS, RESOLUTION_DIGITS, BrownianTree, _node_seed

STEP = 10.0**-RESOLUTION_DIGITS
SEEDS = st.integers(0, 2**63 - 1)
RANGES = ((0.0291675, 14.6146412), (0.5, 12.0), (0.0, 1.0), (1.0, 1.000003), (0.1, 0.100017), (0.03, 4518.25))


class Theirs:
    """One torchsde tree a path, asked within its range and on its grid, as `BrownianTree` sees to itself."""

    def __init__(
        self, low: float, high: float, seeds: list[int], shape: tuple[int, ...], device="cpu"
    ) -> None:
        start = torch.zeros(shape, device=device)
        self.trees = [torchsde.BrownianTree(low, start, high, entropy=seed) for seed in seeds]
        self.ends = round(low, RESOLUTION_DIGITS), round(high, RESOLUTION_DIGITS)

    def increment(self, first: float, last: float) -> torch.Tensor:
        low, high = self.ends
        first, last = (min(max(round(t, RESOLUTION_DIGITS), low), high) for t in (first, last))
        return torch.stack([tree(first, max(first, last)) for tree in self.trees])


@given(seed=SEEDS, depth=st.integers(0, 40), place=st.floats(0, 1, exclude_max=True))
def test_seeds_are_those_of_numpy_s_seed_sequence(seed: int, depth: int, place: float) -> None:
    index = int(place * 2**depth)
    whole = np.random.SeedSequence(seed, spawn_key=(index, depth), pool_size=POOL_WORDS).generate_state(1)
    pool = int(np.random.SeedSequence(seed, pool_size=POOL_WORDS).pool[0])
    assert _node_seed(pool, 2**depth + index) == whole[0]


@st.composite
def queries(draw: st.DrawFn) -> tuple[tuple[float, float], list[tuple[float, float]]]:
    """A range, and pairs of times that repeat, overlap, meet, lie close together, on the ends and outside."""
    low, high = draw(st.sampled_from(RANGES))
    ends = [low, high, low + STEP, high - 2 * STEP, low - 1, high + 1]
    points = draw(st.lists(st.floats(low, high), min_size=1, max_size=4)) + ends
    near = [0.0, STEP, -STEP, 3 * STEP, STEP / 10]
    time = st.tuples(st.sampled_from(points), st.sampled_from(near)).map(sum)
    return (low, high), draw(st.lists(st.tuples(time, time), min_size=1, max_size=12))


@settings(max_examples=60, deadline=None)
@given(
    asked=queries(),
    seeds=st.lists(SEEDS, min_size=1, max_size=3),
    shape=st.sampled_from([(4, 8, 8), (3, 5, 7), (1,), (16, 3, 2)]),
)
def test_every_query_has_torchsde_s_bits(asked, seeds: list[int], shape: tuple[int, ...]) -> None:
    (low, high), pairs = asked
    ours, theirs = BrownianTree(low, high, seeds, shape), Theirs(low, high, seeds, shape)
    for first, last in (tuple(sorted(pair)) for pair in pairs):
        found = ours.increment(first, last)
        assert torch.equal(found, theirs.increment(first, last))
        fresh = BrownianTree(low, high, seeds, shape)  # the queries before it do not matter
        assert torch.equal(found, fresh.increment(first, last))


def sampler_s_queries(steps: int, table: torch.Tensor) -> tuple[torch.Tensor, list[tuple[float, float]]]:
    """Sigmas, and what DPM++ SDE asks its noise for."""
    sigmas, asked = schedule("Karras", steps, table), []

    def noise(sigma: float, sigma_next: float) -> torch.Tensor:
        asked.append((sigma, sigma_next))
        return torch.zeros(1, 1, 1, 1)

    sample("DPM++ SDE", lambda x, sigma: x, torch.zeros(1, 1, 1, 1), sigmas, noise=noise)
    return sigmas, asked


@pytest.mark.parametrize(("shape", "steps"), [((4, 64, 64), 5), ((4, 128, 128), 3), ((16, 32, 48), 20)])
def test_a_sampler_s_queries_have_torchsde_s_bits(shape, steps: int, table: torch.Tensor) -> None:
    sigmas, asked = sampler_s_queries(steps, table)
    seeds = [1234567890, 1234567891]
    noise = brownian_noise(torch.zeros(2, *shape), sigmas, seeds)
    theirs = Theirs(float(sigmas[-2]), float(sigmas[0]), seeds, shape)
    assert len(asked) == 2 * (steps - 1)
    for sigma, after in asked:
        expected = theirs.increment(after, sigma) / -math.sqrt(sigma - after)
        assert torch.equal(noise(sigma, after), expected)


def test_philox_s_rows_have_the_bits_of_torchsde_drawing_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sigmas = torch.tensor([10.0, 3.0, 1.0, 0.0])
    noise = brownian_noise(torch.zeros(2, 4, 3, 5), sigmas, [1, 2], device="philox")
    monkeypatch.setattr(
        brownian_interval,
        "_randn",
        lambda size, dtype, device, seed: philox.Generator(int(seed)).normal(size),
    )
    theirs = Theirs(1.0, 10.0, [1, 2], (4, 3, 5))
    for first, last in ((3.0, 10.0), (1.0, 3.0), (2.5, 7.125)):
        assert torch.equal(noise(last, first), theirs.increment(first, last) / -math.sqrt(last - first))


def counted(seeds: list[int], low: float, high: float) -> tuple[BrownianTree, list[int]]:
    """A tree and the seeds of what it draws."""
    drawn: list[int] = []

    def fill(seed: int, row: torch.Tensor, scale: float) -> None:
        drawn.append(seed)
        row.normal_(0, scale, generator=torch.Generator().manual_seed(seed))

    return BrownianTree(low, high, seeds, (2, 2), fill=fill), drawn


def test_a_query_draws_what_the_one_before_did_not_and_no_more_is_kept(table: torch.Tensor) -> None:
    sigmas, asked = sampler_s_queries(20, table)
    tree, drawn = counted([5], float(sigmas[-2]), float(sigmas[0]))
    assert len(drawn) == 1
    levels = math.ceil(math.log2((float(sigmas[0]) - float(sigmas[-2])) / STEP))
    for sigma, after in asked:
        before = len(drawn)
        tree.increment(after, sigma)
        assert len(drawn) - before <= levels  # one new time, since sigma was asked for before or is the end
        held = {one.data_ptr() for one in (*tree._kept.values(), *tree._spare)}
        assert len(held) == len(tree._kept) + len(tree._spare) <= 4 * levels
        again = len(drawn)
        tree.increment(after, sigma)
        assert len(drawn) == again
    assert len(drawn) < 1.2 * len(set(drawn))  # little that was given up is needed again


@given(asked=queries())
def test_any_queries_hold_no_more_than_said(asked) -> None:
    (low, high), pairs = asked
    tree, _ = counted([1, 2], low, high)
    most = 4 * math.ceil(math.log2((high - low) / STEP)) + 2
    for first, last in pairs:
        tree.increment(min(first, last), max(first, last))
        assert len(tree._kept) + len(tree._spare) <= most


def test_paths_side_by_side_are_each_its_own() -> None:
    together = BrownianTree(0.5, 12.0, [3, 4, 3], (4, 3, 2))
    alone = BrownianTree(0.5, 12.0, [4], (4, 3, 2))
    for first, last in pairwise((0.5, 1.25, 7.0, 12.0)):
        found = together.increment(first, last)
        assert torch.equal(found[1:2], alone.increment(first, last)) and torch.equal(found[0], found[2])


def test_what_was_given_out_does_not_change() -> None:
    tree = BrownianTree(0.0, 1.0, [1], (4, 4))
    pairs = [(0.0, 1.0), (0.0, 0.5), (0.25, 0.75), (0.25, 1.0), (0.0, 0.75)]
    given_out = [tree.increment(*pair) for pair in pairs]
    copies = [one.clone() for one in given_out]
    for pair in reversed(pairs):
        tree.increment(*pair)
    assert all(torch.equal(one, copy) for one, copy in zip(given_out, copies, strict=True))


def test_within_inference_mode_and_after_it() -> None:
    tree, plain = BrownianTree(0.0, 1.0, [1], (4, 4)), BrownianTree(0.0, 1.0, [1], (4, 4))
    with torch.inference_mode():
        tree.increment(0.25, 0.7)
    assert torch.equal(tree.increment(0.3, 0.7), plain.increment(0.3, 0.7))


def test_times_without_an_order_have_no_increment() -> None:
    tree = BrownianTree(0.0, 1.0, [1, 2], (4, 4))
    for first, last in ((0.5, 0.5), (0.6, 0.5), (2.0, 3.0), (math.nan, 0.5), (0.5, math.nan)):
        assert torch.equal(tree.increment(first, last), torch.zeros(2, 4, 4))
    assert torch.equal(tree.increment(-math.inf, math.inf), tree.increment(0.0, 1.0))


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(4, 64, 64), (4, 128, 128), (4, 9, 7)])
def test_has_torchsde_s_bits_on_a_gpu(shape: tuple[int, ...], table: torch.Tensor) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    sigmas, asked = sampler_s_queries(5, table)
    low, high = float(sigmas[-2]), float(sigmas[0])
    ours = BrownianTree(low, high, [7, 2**62], shape, device="cuda")
    theirs = Theirs(low, high, [7, 2**62], shape, "cuda")
    for sigma, after in [*asked, (5.0, 2.5), (high, low)]:
        found = ours.increment(after, sigma)
        assert found.device.type == "cuda" and torch.equal(found, theirs.increment(after, sigma))
