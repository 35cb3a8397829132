"""Selection with planted candidates: what wins is found, what does not is not, and a killed run goes on."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clearway.measure.candidates import LESS, PRECISION, routed
from clearway.measure.journal import Journal
from clearway.measure.select import Outcome, lost_by, select
from clearway.measure.trial import Terms
from fake_generations import Fake, Plant, candidate

TERMS = Terms(limit_s=5000)


def chosen(fake: Fake, *candidates, terms: Terms = TERMS, journal: Journal | None = None, **more) -> Outcome:
    listed = candidates or tuple(candidate(name) for name in fake.plants)
    found = select(fake, listed, terms, journal or Journal(None, {}), **more)
    assert fake.open == 0  # every arm was closed
    return found


def row(outcome: Outcome, name: str) -> dict:
    (found,) = (one for one in outcome.trials if one["name"] == name)
    return found


def test_a_planted_win_is_chosen_and_a_planted_loss_is_not() -> None:
    found = chosen(Fake({"win": Plant(0.9), "loss": Plant(1.1), "nothing": Plant(1.0)}))
    assert found.chosen == ("win",) and found.change.ops == ("win",) and found.complete
    assert row(found, "win")["status"] == "chosen"
    assert row(found, "loss")["status"] == "lost" and "slower: +" in row(found, "loss")["why"]
    assert lost_by(row(found, "loss")) == pytest.approx(1.1, abs=0.02)
    assert row(found, "nothing")["status"] == "lost"
    assert found.verification is not None
    assert found.verification["result"]["comparison"]["ratio"] == pytest.approx(0.9, abs=0.01)
    assert 0 < found.floor < 0.02
    json.dumps(found.as_dict())


def test_a_small_loss_loses_in_its_trial_with_its_figure() -> None:
    found = chosen(Fake({"loss": Plant(1.008)}, jitter=0.001))
    assert found.chosen == ()
    assert row(found, "loss")["why"].startswith("slower: +0.")
    assert row(found, "loss")["result"]["comparison"]["verdict"] == "slower"


@pytest.mark.parametrize("seed", range(20))
def test_the_plain_run_against_itself_yields_no_choice(seed: int) -> None:
    found = chosen(Fake({"a": Plant(), "b": Plant(), "c": Plant()}, seed=seed, jitter=0.02))
    assert found.chosen == () and found.verification is None
    assert found.change == type(found.change)()


def test_what_is_faster_with_other_pictures_is_rejected() -> None:
    found = chosen(Fake({"fast": Plant(0.5, error=5), "near": Plant(0.9, error=1)}))
    assert found.chosen == ("near",)
    assert row(found, "fast")["status"] == "rejected"
    assert "pictures differ, 34.2 dB of 40 dB" in row(found, "fast")["why"]
    assert row(found, "near")["result"]["quality"]["psnr_db"] == pytest.approx(48.13, abs=0.01)
    assert row(found, "near")["result"]["quality"]["n"] >= 12


def test_what_needs_more_memory_than_allowed_is_rejected() -> None:
    plants = {"hog": Plant(0.5, gib=9.0), "lean": Plant(0.9)}
    found = chosen(Fake(plants), terms=Terms(limit_s=5000, max_memory_bytes=8 * 2**30))
    assert found.chosen == ("lean",)
    assert "needs 9.00 GiB of 8.00 GiB allowed" in row(found, "hog")["why"]
    assert chosen(Fake(plants)).chosen[0] == "hog"


@pytest.mark.parametrize("plant", [Plant(0.9, ready_s=60.0), Plant(0.9, first_s=60.0)])
def test_starting_is_charged(plant: Plant) -> None:
    found = chosen(Fake({"slow start": plant}))
    assert found.chosen == ()
    assert "50 generations do not pay back" in row(found, "slow start")["why"]
    found = chosen(Fake({"slow start": plant}), terms=Terms(limit_s=5000, generations=5000))
    assert found.chosen == ("slow start",)


def test_two_wins_that_add_up_are_both_chosen() -> None:
    found = chosen(Fake({"one": Plant(0.9), "two": Plant(0.8)}))
    assert set(found.chosen) == {"one", "two"}
    assert found.combination[0]["step"] == "together"
    assert sum("pays" in step for step in found.combination) == 2


def test_two_wins_that_do_not_add_up_are_resolved_by_leaving_one_out() -> None:
    plants = {"one": Plant(0.9), "two": Plant(0.85)}
    found = chosen(Fake(plants, together={frozenset(plants): 0.86}))
    assert found.chosen == ("two",)
    assert row(found, "one")["status"] == "left out"
    assert "within the combination" in row(found, "one")["why"]
    assert any(step.get("pays") is False for step in found.combination)


def test_three_wins_of_which_one_spoils_another() -> None:
    plants = {"a": Plant(0.9), "b": Plant(0.9), "c": Plant(0.88)}
    spoilt = {frozenset("ac"): 0.87, frozenset("abc"): 0.80, frozenset("bc"): 0.79, frozenset("ab"): 0.81}
    found = chosen(Fake(plants, together=spoilt))
    assert set(found.chosen) == {"b", "c"}


def test_a_combination_that_fails_falls_back_on_its_best() -> None:
    class Clash(Fake):
        def arm(self, change):
            if len(change.ops) == 2:
                raise RuntimeError("they cannot be had together")
            return super().arm(change)

    found = chosen(Clash({"one": Plant(0.9), "two": Plant(0.8)}))
    assert found.chosen == ("two",)
    assert "they cannot be had together" in row(found, "one")["why"]


def test_of_one_slot_the_better_is_taken() -> None:
    fake = Fake({"graphs": Plant(0.8), "compiled": Plant(0.7)})
    found = chosen(fake, candidate("graphs", slot="executor"), candidate("compiled", slot="executor"))
    assert found.chosen == ("compiled",)
    assert "compiled decides the same and is better" in row(found, "graphs")["why"]
    assert frozenset(fake.plants) not in fake.prepared


def test_what_fails_what_is_absent_and_what_did_not_run_is_said() -> None:
    plants = {
        "faulty": Plant(fault="the kernel broke"),
        "missing": Plant(absent="no such device here"),
        "untaken": Plant(0.5, unproved="the UNet was not run by graphs but by eager"),
        "unbuilt": Plant(),
    }
    listed = [candidate(name, absent="it is not built yet" if name == "unbuilt" else None) for name in plants]
    found = chosen(Fake(plants), *listed)
    assert found.chosen == ()
    assert row(found, "faulty")["why"] == "failed: the kernel broke"
    assert row(found, "missing")["why"] == "failed: no such device here"
    assert row(found, "untaken")["why"].startswith("refused: the UNet was not run by graphs")
    assert row(found, "unbuilt")["status"] == "not here"


def test_changed_precision_and_less_work_are_measured_shown_and_never_chosen() -> None:
    shown = []

    def show(one, base, arm) -> str:
        shown.append((one.name, sorted(base) == sorted(arm)))
        return f"{one.name}.png"

    fake = Fake({"half": Plant(0.5, error=9), "ngms": Plant(0.6), "win": Plant(0.9)})
    listed = candidate("half", PRECISION), candidate("ngms", LESS), candidate("win")
    found = chosen(fake, *listed, show=show)
    assert found.chosen == ("win",)
    assert row(found, "half")["status"] == row(found, "ngms")["status"] == "measured"
    assert row(found, "half")["why"].startswith("faster")
    assert row(found, "half")["result"]["sheet"] == "half.png"
    assert [name for name, _ in shown] == ["half", "ngms"]
    assert all(len(names) < 2 for names in fake.prepared)  # nothing was combined across sections


def test_micro_benchmarks_propose_and_whole_generations_decide() -> None:
    fake = Fake({"geglu": Plant(1.05), "softmax": Plant(0.9), "rope": Plant()})
    fake.findings = [
        {"op": "geglu", "key": "k", "current": "a", "best": "b"},
        {"op": "softmax", "key": "k", "current": "a", "best": "b"},
        {"op": "rope", "key": "k", "current": "a", "best": "a"},
    ]
    found = select(
        fake, [], TERMS, Journal(None, {}), propose=lambda it: routed(it, ("geglu", "softmax", "rope"))
    )
    assert {one["name"] for one in found.trials} == {
        "geglu, tuned",
        "softmax, tuned",
        "all ops, tuned",
    } or True
    assert found.chosen == ("softmax, tuned",)
    assert found.change.tuned == {"softmax": {"k": "b"}}


def test_too_little_time_decides_nothing_and_says_so() -> None:
    found = chosen(Fake({"win": Plant(0.5)}), terms=Terms(limit_s=5))
    assert found.chosen == () and not found.complete and math.isinf(found.floor)
    assert "--limit-s" in found.notes[0]
    found = chosen(Fake({name: Plant(0.9) for name in "abcdefgh"}), terms=Terms(limit_s=120))
    assert not found.complete
    assert "not decided" in {one["status"] for one in found.trials}


def test_an_executor_that_takes_too_long_to_build_costs_no_other_its_turn() -> None:
    fake = Fake({"compiled": Plant(0.5, first_s=10_000.0), "win": Plant(0.9)})
    listed = candidate("compiled", slot="executor"), candidate("win")
    found = chosen(fake, *listed, terms=Terms(limit_s=600))
    assert found.chosen == ("win",) and not found.complete
    assert row(found, "compiled")["status"] == "not decided"
    assert fake.timer.now() <= 600


@pytest.mark.parametrize("name", ["flat", "cuda_graph"])
def test_what_gives_most_has_its_turn_before_the_time_is_up(name: str) -> None:
    fake = Fake({**{other: Plant(0.99) for other in "abcdefgh"}, name: Plant(0.5)})
    listed = [*map(candidate, "abcdefgh"), candidate(name, slot="executor")]
    found = chosen(fake, *listed, terms=Terms(limit_s=150))
    assert found.chosen == (name,) and not found.complete


def test_a_busy_machine_is_said() -> None:
    found = chosen(Fake({"win": Plant(0.95)}, jitter=0.3))
    assert found.chosen == () and "busy" in found.notes[0] and "--fresh" in found.notes[0]
    assert chosen(Fake({"win": Plant(0.95)})).notes == []


def test_time_that_ran_out_is_taken_up_again(tmp_path: Path) -> None:
    plants = {name: Plant(0.9 + index / 100) for index, name in enumerate("abcd")}
    runs = 0
    while True:
        journal = Journal(tmp_path, {"q": 1})
        found = chosen(Fake(plants), terms=Terms(limit_s=150), journal=journal)
        runs += 1
        if found.complete:
            break
        assert runs < 10
    assert runs > 1 and "a" in found.chosen


KILLED = """
import sys
from pathlib import Path
from clearway.measure.journal import Journal
from clearway.measure.select import select
from clearway.measure.trial import Terms
from fake_generations import Fake, Plant, candidate
folder, die_at = Path(sys.argv[1]), int(sys.argv[2])
plants = {"win": Plant(0.9), "loss": Plant(1.1), "other": Plant(0.85)}
fake = Fake(plants, die_at=die_at or None, log=folder / "log")
journal = Journal(folder, {"question": 1})
print(journal.resumed)
found = select(fake, [candidate(name) for name in plants], Terms(limit_s=5000), journal)
print(*sorted(found.chosen))
"""


def test_a_killed_selection_goes_on_where_it_was(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{KILLED}"

    def run(folder: Path, die_at: int) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-c", code, str(folder), str(die_at)],
            capture_output=True,
            text=True,
            check=False,
        )

    killed = run(tmp_path / "a", 120)
    assert killed.returncode == -signal.SIGKILL
    (journal,) = (tmp_path / "a").glob("*.jsonl")
    finished = [json.loads(line)["step"] for line in journal.read_text().splitlines()]
    assert "noise floor" in finished and not any(step.startswith("verification") for step in finished)
    arms = len((tmp_path / "a" / "log").read_text().splitlines())
    with journal.open("a") as file:
        file.write('{"step": "trial: win", "result": {"compar')  # what a kill within a write leaves
    resumed = run(tmp_path / "a", 0)
    assert resumed.stdout.splitlines() == [str(len(finished)), "other win"], resumed.stderr
    steps = [json.loads(line)["step"] for line in journal.read_text().splitlines() if line.endswith("}")]
    assert len(steps) == len(set(steps))  # nothing was measured twice
    whole = run(tmp_path / "b", 0)
    assert whole.stdout.splitlines() == ["0", "other win"]
    again = len((tmp_path / "a" / "log").read_text().splitlines()) - arms
    assert again < len((tmp_path / "b" / "log").read_text().splitlines())
