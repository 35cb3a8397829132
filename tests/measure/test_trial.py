"""Figures of one trial, and the verdict that is read from them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from clearway.errors import Cancelled
from clearway.measure.candidates import LESS, SAME, Change
from clearway.measure.clock import Samples
from clearway.measure.trial import Terms, charged, percent, quality, trial, verdict
from fake_generations import Fake, Plant, candidate

TERMS = Terms()


def run(fake: Fake, name: str = "one", **more):
    given = {"floor": 0.01, "limit_s": 1000.0, "seed": 0}
    found = trial(fake, Change(), candidate(name).change, TERMS, **(given | more))
    assert fake.open == 0
    return found


def samples(seconds: float, first: float) -> Samples:
    return Samples((seconds,) * 8, None, first, 3, True)


def test_the_figures_are_json_and_say_everything() -> None:
    found = run(Fake({"one": Plant(0.8, ready_s=2.0, gib=3.0)}))
    assert set(json.loads(json.dumps(found))) == set(found)
    assert found["arm"]["p50_s"] == pytest.approx(0.8, abs=0.02)
    assert found["arm"]["peak_bytes"] == 3 * 2**30 and found["arm"]["ready_s"] == 2.0
    assert found["comparison"]["verdict"] == "faster" and found["comparison"]["n"] == 12
    assert found["charged"]["extra_ready_s"] == pytest.approx(2.0, abs=0.1)
    assert found["charged"]["ratio"] == pytest.approx(0.84, abs=0.01)
    assert found["quality"]["identical"] is True and found["sheet"] is None
    assert verdict(found, SAME, TERMS, 0.01)[0] is True


def test_a_floor_above_the_gain_hides_it() -> None:
    found = run(Fake({"one": Plant(0.97)}), floor=0.05)
    passed, why = verdict(found, SAME, TERMS, 0.05)
    assert not passed and why.startswith("no difference: -3.") and "noise floor 5.1 %" in why


def test_too_few_rounds_are_no_figures() -> None:
    assert run(Fake({"one": Plant(0.5)}), limit_s=6.0) is None


def test_a_fault_and_an_untaken_path_are_said_and_a_stop_is_passed_on() -> None:
    assert run(Fake({"one": Plant(fault="broken\nbadly")})) == {"failed": "RuntimeError: broken (warm-up 1)"}
    assert run(Fake({"one": Plant(absent="not here")})) == {"failed": "not here"}
    assert run(Fake({"one": Plant(unproved="it ran eagerly")})) == {"refused": "it ran eagerly"}

    class Stopped(Fake):
        def arm(self, change):
            if change.ops:
                raise Cancelled("stopped")
            return super().arm(change)

    with pytest.raises(Cancelled):
        run(Stopped({"one": Plant()}))


def test_pictures_are_shown_by_generation() -> None:
    seen = {}

    def show(base, arm) -> str:
        seen.update(base=base, arm=arm)
        return "sheet.png"

    found = run(Fake({"one": Plant(0.9, error=2)}), show=show)
    assert found["sheet"] == "sheet.png" and seen["base"].keys() >= set(range(12))
    assert np.array_equal(seen["base"][3].astype(int) + 2, seen["arm"][3].astype(int))


def test_starting_is_shared_by_the_generations() -> None:
    found = charged(samples(1.0, 1.0), 0.5, samples(0.5, 10.5), 3.5, 0.0, Terms(generations=10))
    assert found["extra_ready_s"] == pytest.approx(3.5 + 10.0 - 0.5)
    assert found["ratio"] == pytest.approx(0.5 + 13.0 / 10)
    quick = charged(samples(1.0, 9.0), 5.0, samples(0.5, 0.5), 0.0, 0.0, TERMS)
    assert quick["extra_ready_s"] == 0.0 and quick["ratio"] == pytest.approx(0.5)  # never a bonus


def test_quality_is_the_worst_pictures() -> None:
    grey = np.full((1, 16, 16, 3), 100, np.uint8)
    found = quality({0: grey, 1: grey, 2: grey}, {0: grey, 1: grey + 4, 2: grey + 2, 9: grey})
    assert found["n"] == 3 and found["max_error"] == 4 and not found["identical"]
    assert found["psnr_db"] == pytest.approx(20 * math.log10(255 / 4))
    assert quality({0: grey}, {0: grey})["psnr_db"] is None
    other = quality({0: grey}, {0: grey[:, :8]})
    assert other["same_shape"] is False and other["psnr_db"] == -math.inf


def test_only_the_same_arithmetic_is_held_to_the_pictures() -> None:
    found = run(Fake({"one": Plant(0.5, error=30)}))
    assert verdict(found, SAME, TERMS, 0.01)[0] is False
    assert verdict(found, LESS, TERMS, 0.01)[0] is True


def test_percentages() -> None:
    assert percent(0.93) == "-7.0 %" and percent(1.021) == "+2.1 %"
    assert percent(1.05, sign=False) == "5.0 %" and percent(math.inf) == "unbounded"
