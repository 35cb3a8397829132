"""Clocks and comparisons with a clock that moves only when told: nothing here depends on speed or luck."""

import math
import random
import weakref
from collections import Counter

import pytest
import torch

from clearway.device import Device
from clearway.errors import Cancelled, UnavailableError
from clearway.measure.clock import (
    Comparison,
    Failed,
    HostTimer,
    Samples,
    compare,
    interleave,
    noise_floor,
    quantile,
)
from fake_timer import FakeTimer, noisy

ROUNDS = 40


def at_least(share: float, tries: int) -> float:
    """How many of `tries` a true rate of `share` leaves at least, but for chance beyond three deviations."""
    return share * tries - 3 * math.sqrt(tries * share * (1 - share))


def samples(*wall_s: float) -> Samples:
    return Samples(tuple(wall_s), None, first_s=1.0, warm_ups=3, stable=True)


def measured(seed: int, change: float, floor: float | None = None, rounds: int = ROUNDS) -> Comparison:
    """Arm b takes 1 + `change` times arm a's second, on a noisy machine that is getting warm."""
    timer, rng = FakeTimer(), random.Random(seed)
    a, b = (noisy(timer, seconds, rng, drift_per_s=0.001) for seconds in (1.0, 1.0 + change))
    if floor is None:
        floor = noise_floor(a, timer, rounds, seed=seed + 1)
    found = interleave({"a": a, "b": b}, timer, rounds=rounds, seed=seed)
    first, second = found["a"], found["b"]
    assert isinstance(first, Samples) and isinstance(second, Samples)
    return compare(first, second, floor)


def test_a_planted_regression_of_2_percent_is_found() -> None:
    verdicts = Counter(measured(seed, 0.02).verdict for seed in range(100))
    assert verdicts["slower"] >= 95 and verdicts["faster"] == 0


def test_a_planted_gain_of_2_percent_is_found() -> None:
    verdicts = Counter(measured(seed, -0.02).verdict for seed in range(100))
    assert verdicts["faster"] >= 95 and verdicts["slower"] == 0


def test_its_size_is_told_within_its_interval() -> None:
    results = [measured(seed, 0.02, floor=0.0) for seed in range(200)]
    assert sum(found.low <= 1.02 <= found.high for found in results) >= at_least(0.95, 200)
    assert sum(found.ratio for found in results) / 200 == pytest.approx(1.02, abs=0.001)


def test_a_planted_nothing_is_not_found() -> None:
    """400 machines with nothing planted: at the 5 % level alone, and behind the measured floor."""
    alone = [measured(seed, 0.0, floor=0.0).verdict for seed in range(400)]
    assert alone.count("no difference") >= at_least(0.95, 400)
    floored = [measured(seed, 0.0).verdict for seed in range(400)]
    assert floored.count("no difference") >= 0.95 * 400


@pytest.mark.parametrize("rounds", [6, 12, 25])
def test_a_planted_nothing_is_not_found_in_few_rounds(rounds: int) -> None:
    found = [measured(seed, 0.0, floor=0.0, rounds=rounds).verdict for seed in range(400)]
    assert found.count("no difference") >= at_least(0.95, 400)


def test_nothing_below_the_floor_is_called_a_difference() -> None:
    a, b = samples(*[1.0] * 20), samples(*[1.009] * 20)
    assert compare(a, b, floor=0.01).verdict == "no difference"
    assert compare(a, b, floor=0.008).verdict == "slower"
    assert compare(b, a, floor=0.008).verdict == "faster"
    for seed in range(100):
        found = measured(seed, 0.02, floor=0.03)
        assert found.verdict == "no difference" or abs(math.log(found.ratio)) > 0.03


def test_an_interval_that_touches_1_calls_nothing() -> None:
    """Three rounds without any difference and six with one: p is 3 %, yet 1 is an end of the interval."""
    found = compare(samples(*[1.0] * 9), samples(*[1.0] * 3, *[1.1] * 6), floor=0.0)
    assert (found.verdict, found.low, found.p_value) == ("no difference", 1.0, 2 / 2**6)


def test_drift_cancels_where_arms_take_turns_and_not_where_they_follow_each_other() -> None:
    """The machine slows by 0.2 % a second: 40 rounds later it is 16 % slower, whoever runs then."""
    turns, followed = Counter[str](), Counter[str]()
    for seed in range(100):
        for count, in_turn in ((turns, True), (followed, False)):
            timer, rng = FakeTimer(), random.Random(seed)
            a, b = (noisy(timer, 1.0, rng, drift_per_s=0.002) for _ in range(2))
            if in_turn:
                found = interleave({"a": a, "b": b}, timer, rounds=ROUNDS, seed=seed)
            else:
                found = {
                    **interleave({"a": a}, timer, rounds=ROUNDS),
                    **interleave({"b": b}, timer, rounds=ROUNDS),
                }
            count[compare(found["a"], found["b"], floor=0.01).verdict] += 1  # type: ignore[arg-type]
    assert turns["no difference"] >= 98
    assert followed["slower"] >= 98


def test_noise_with_two_modes_is_no_difference() -> None:
    verdicts = Counter[str]()
    for seed in range(200):
        timer, rng = FakeTimer(), random.Random(seed)
        a, b = (noisy(timer, 1.0, rng, outliers=0.5) for _ in range(2))
        found = interleave({"a": a, "b": b}, timer, rounds=ROUNDS, seed=seed)
        verdicts[compare(found["a"], found["b"], floor=0.0).verdict] += 1  # type: ignore[arg-type]
    assert verdicts["no difference"] >= at_least(0.95, 200)


def test_the_noise_floor_grows_with_the_noise() -> None:
    def floor(jitter: float, rounds: int = ROUNDS) -> float:
        timer = FakeTimer()
        return noise_floor(noisy(timer, 1.0, random.Random(1), jitter=jitter, outliers=0), timer, rounds)

    assert 0.001 < floor(0.01) < 0.02
    assert 5 < floor(0.1) / floor(0.01) < 20
    assert floor(0.01, rounds=5) == math.inf


def test_the_noise_floor_of_an_arm_that_fails_is_its_error() -> None:
    def broken(number: int) -> None:
        raise UnavailableError("no such kernel")

    with pytest.raises(UnavailableError, match="no such kernel"):
        noise_floor(broken, FakeTimer(), 6)


def test_every_arm_runs_once_a_round_and_each_place_equally_often() -> None:
    timer, heard, done, warmed, taken = FakeTimer(), [], [], [], []

    def arm(name: str):
        def call(number: int) -> None:
            heard.append((name, number))
            timer.spend(1)

        return call

    found = interleave(
        {name: arm(name) for name in "abc"},
        timer,
        rounds=8,
        seed=3,
        on_round=lambda *told: done.append(told),
        on_warm=lambda name, calls: warmed.append((name, list(calls))),
        on_samples=taken.append,
    )
    assert warmed == [(name, [1.0] * 3) for name in "abc"]
    assert [len(one["b"].wall_s) for one in taken] == list(range(1, 9)) and taken[-1] == found
    warm, rounds = heard[:9], heard[9:]
    assert warm == [(name, number) for name in "abc" for number in (8, 9, 10)]
    for number in range(8):
        turn = rounds[3 * number : 3 * number + 3]
        assert sorted(turn) == [(name, number) for name in "abc"]
        if number % 2:
            assert [name for name, _ in turn] == [name for name, _ in rounds[3 * number - 3 : 3 * number]][
                ::-1
            ]
    assert len({tuple(name for name, _ in rounds[at : at + 3]) for at in range(0, 24, 3)}) > 2
    assert done == [(number, 8) for number in range(1, 9)]
    assert list(found) == ["a", "b", "c"]


def test_long_calls_are_warmed_up_three_times() -> None:
    timer, times = FakeTimer(), iter([60.0, 7.0, 5.0, *[6.0] * 6])
    found = interleave({"a": lambda number: timer.spend(next(times))}, timer, rounds=6)["a"]
    assert isinstance(found, Samples)
    assert (found.first_s, found.warm_ups, found.stable, found.wall_s) == (60.0, 3, False, (6.0,) * 6)


def test_warming_up_goes_on_until_the_times_settle() -> None:
    timer, times = FakeTimer(), iter([9.0, 3.0, 2.0, 1.5, 1.0, 1.02, 0.99, *[1.0] * 6])
    found = interleave({"a": lambda number: timer.spend(next(times))}, timer, rounds=6)["a"]
    assert isinstance(found, Samples)
    assert (found.first_s, found.warm_ups, found.stable, found.wall_s) == (9.0, 7, True, (1.0,) * 6)


def test_what_never_settles_is_said_so() -> None:
    timer, rng = FakeTimer(), random.Random(0)
    found = interleave({"a": lambda number: timer.spend(rng.uniform(0.1, 0.9))}, timer, rounds=6)["a"]
    assert isinstance(found, Samples)
    assert (found.warm_ups, found.stable) == (12, False)


def test_the_limit_ends_whole_rounds_only() -> None:
    timer = FakeTimer()
    arms = {name: lambda number: timer.spend(1) for name in "ab"}
    found = interleave(arms, timer, rounds=100, limit_s=20)
    assert {len(each.wall_s) for each in found.values() if isinstance(each, Samples)} == {8}
    rng = random.Random(0)
    found = interleave({name: noisy(timer, 1, rng, jitter=1) for name in "ab"}, timer, rounds=1, limit_s=12)
    assert all(isinstance(each, Samples) and 1 < each.warm_ups < 8 for each in found.values())
    timer.seconds = 0
    found = interleave(arms, timer, rounds=100, limit_s=0)
    assert {(each.warm_ups, each.stable, len(each.wall_s)) for each in found.values()} == {(1, False, 1)}  # type: ignore[union-attr]


def test_an_arm_that_raises_is_reported_and_the_others_go_on() -> None:
    timer, heard = FakeTimer(), []

    def breaks(at: int):
        def call(number: int) -> None:
            heard.append((at, number))
            if number == at:
                raise RuntimeError(f"no at {number}")
            timer.spend(1)

        return call

    found = interleave({"a": breaks(-1), "b": breaks(2), "c": breaks(7)}, timer, rounds=7)
    assert isinstance(found["a"], Samples) and len(found["a"].wall_s) == 7
    b, c = found["b"], found["c"]
    assert isinstance(b, Failed) and isinstance(c, Failed)
    assert (b.arm, b.when, str(b.error)) == ("b", "round 3", "no at 2")
    assert (c.arm, c.when, str(c.error)) == ("c", "warm-up 1", "no at 7")
    assert max(number for at, number in heard[7:] if at == 2) == 2  # it took no further turns
    assert [number for at, number in heard if at == 7] == [7]


def test_an_arm_out_of_memory_keeps_nothing() -> None:
    class Big:
        pass

    held = []

    def call(number: int) -> None:
        big = Big()
        held.append(weakref.ref(big))
        raise MemoryError

    found = interleave({"a": call}, FakeTimer(), rounds=6)["a"]
    assert isinstance(found, Failed) and held[0]() is None


@pytest.mark.parametrize(
    "error", [Cancelled("stopped"), torch.AcceleratorError("an illegal access"), KeyboardInterrupt()]
)
def test_a_stop_and_a_fault_of_the_device_are_passed_on(error: BaseException) -> None:
    def call(number: int) -> None:
        raise error

    with pytest.raises(type(error)):
        interleave({"a": call}, FakeTimer(), rounds=6)


def test_device_time_comes_from_events_and_the_device_is_idle_at_both_ends() -> None:
    timer = FakeTimer(events=True)
    found = interleave({"a": lambda number: timer.spend(1.0, 0.25)}, timer, rounds=4)["a"]
    assert isinstance(found, Samples)
    assert (found.wall_s, found.device_s, found.device_p50) == ((1.0,) * 4, (0.25,) * 4, 0.25)
    assert timer.waits == 2 * (3 + 4)


def test_quantiles_and_outliers() -> None:
    found = samples(*[1.0, 1.01, 0.99, 1.02, 0.98] * 4, 1.5, 0.5)
    assert found.outliers() == 2
    # median 3, MAD 1: the limit lies 4.4478 away, not 3
    assert samples(1, 2, 2, 3, 3, 4, 4, 3 + 4.4).outliers() == 0
    assert samples(1, 2, 2, 3, 3, 4, 4, 3 + 4.5).outliers() == 1
    assert samples(1, 2, 3, 4, 5, 6).p50 == 3.5 and samples(1, 2, 3, 4, 5, 6).p20 == 2
    assert samples(1, 2, 3, 4, 5, 6).p80 == 5 and samples(1, 2).p(100) == 2
    assert samples(7).p20 == quantile([7], 99) == 7
    assert samples(1.0, 1.0, 1.0).outliers() == 0
    assert samples(1).device_p50 is None


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="paired"):
        compare(samples(1, 2), samples(1), 0)
    with pytest.raises(ValueError, match="too coarse"):
        compare(samples(0.0, 1), samples(1, 1), 0)
    with pytest.raises(ValueError, match="at least one"):
        interleave({}, FakeTimer(), rounds=0)


def test_the_host_timer_on_the_cpu_has_no_events() -> None:
    timer = HostTimer(Device("cpu"))
    begun = timer.now()
    assert timer.event() is None and timer.between(None, None) is None
    timer.synchronize()
    assert timer.now() >= begun


@pytest.mark.cuda
def test_device_time_on_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    timer = HostTimer(Device("cuda", 0))
    x = torch.randn(4096, 4096, device="cuda:0")
    found = interleave({"a": lambda number: x @ x}, timer, rounds=6)["a"]
    assert isinstance(found, Samples) and found.device_s is not None
    assert all(0 < device <= wall for device, wall in zip(found.device_s, found.wall_s, strict=True))
