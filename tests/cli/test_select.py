"""`clearway select` and what it prints (select_text): from planted candidates to what is used, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clearway import pipeline
from clearway.cli.main import main
from clearway.measure import candidates, generations
from clearway.measure.candidates import LESS, PRECISION
from clearway.models import chosen, load
from clearway.ops import state
from fake_generations import Fake, Plant, candidate

SIZE = ("--size", "64x64", "--device", "cpu")


@pytest.fixture(autouse=True)
def fresh(elsewhere: None) -> Iterator[None]:
    state.forget()
    yield
    state.forget()


@pytest.fixture
def run(model: Path, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str, size: tuple[str, ...] = SIZE) -> tuple[int, str, str]:
        code = main(["select", "--model", str(model), *size, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A win, a loss, one that changes dtypes and one that does less; nothing is drawn."""
    fake = Fake({"geglu": Plant(0.9), "layer_norm": Plant(1.1), "vae": Plant(0.8, 9), "ngms": Plant(0.7, 9)})
    fake.prompts = ("a cat",)
    listed = [
        candidate("geglu"),
        candidate("layer_norm"),
        candidate("ngms", LESS),
        candidate("vae", PRECISION),
    ]
    monkeypatch.setattr(candidates, "list_candidates", lambda model, request: listed)
    monkeypatch.setattr(generations, "Generations", lambda *given: fake)
    monkeypatch.setattr(pipeline, "generate", None)
    return fake


def test_the_winner_is_stored_explained_and_applied(run, planted: Fake, model: Path) -> None:
    code, out, err = run("--limit-s", "5000")
    assert code == 0 and "noise floor" in err
    assert "chosen for tiny, 64 x 64" in out and "geglu; faster: -" in out.splitlines()[-1]
    loaded = load(str(model), device="cpu")
    assert chosen.applied(loaded, 64, 64).choices.ops == ("geglu",)
    assert chosen.applied(loaded, 512, 512).choices.ops == ()
    calls = planted.calls
    code, out, _ = run("--explain")
    assert code == 0 and planted.calls == calls  # nothing was run
    (lost,) = (line for line in out.splitlines() if line.startswith("layer_norm"))
    assert "lost" in lost and "+1" in lost
    found = json.loads(run("--explain", "--json")[1])
    assert found["selection"]["outcome"]["chosen"] == ["geglu"]
    assert found["selection"]["provenance"]["torch"] and found["selection"]["terms"]["generations"] == 50
    assert {row["status"] for row in found["selection"]["outcome"]["trials"]} == {"chosen", "lost"}


def test_a_second_call_measures_nothing_again_unless_fresh(run, planted: Fake) -> None:
    run("--limit-s", "5000")
    calls = planted.calls
    code, out, err = run("--limit-s", "4000", "--json")
    assert code == 0 and planted.calls == calls and "measurements are there from before" in err
    assert json.loads(out)["outcome"]["chosen"] == ["geglu"]
    run("--limit-s", "5000", "--prompt", "a dog", "--fresh")
    assert planted.calls > calls


def test_what_changes_pictures_needs_asking_and_a_name(run, planted: Fake, model: Path) -> None:
    code, _, err = run("--adopt", "ngms")
    assert code == 2 and "was not measured" in err
    code, out, _ = run("--limit-s", "5000", "--less-work")
    assert code == 0 and "contact sheet: contact-sheets/ngms.png" in out
    assert Path("contact-sheets/ngms.png").is_file() and not Path("contact-sheets/vae.png").exists()
    assert out.splitlines()[-1].count("geglu") and "ngms" not in out.splitlines()[-1]
    loaded = load(str(model), device="cpu")
    assert chosen.adopted(loaded.path, "cpu").request == {}
    code, out, _ = run("--adopt", "ngms")
    assert code == 0 and out.startswith("adopted: ngms (faster: -")
    assert chosen.adopted(loaded.path, "cpu").request == {"ngms": 1}
    assert "adopted: ngms" in run("--explain")[1]
    assert run("--adopt", "geglu")[0] == 2  # it is chosen by itself, never adopted
    assert "abandoned: ngms" in run("--abandon")[1]
    assert chosen.adopted(loaded.path, "cpu").request == {}
    assert json.loads(run("--abandon", "--json")[1]) == {"forgotten": False, "abandoned": []}


def test_adopted_dtypes_have_a_selection_of_their_own(run, planted: Fake, model: Path) -> None:
    planted.plants["half"] = Plant(0.9, 9)
    listed = [
        candidate("geglu"),
        replace(candidate("half", PRECISION), change=candidates.Change(precision={"vae": "bfloat16"})),
        replace(candidate("ngms", LESS), change=candidates.Change(request={"ngms": 1.0})),
    ]
    planted.arm, arm = lambda change: arm(replace(change, request={}, precision={})), planted.arm
    candidates.list_candidates = lambda model, request: listed  # the fixture puts it back
    run("--limit-s", "5000", "--precision", "--less-work")
    assert run("--adopt", "half")[0] == 0
    assert "nothing was selected" in run("--explain")[1]
    calls = planted.calls
    assert run("--limit-s", "5000")[0] == 0 and planted.calls > calls
    found = json.loads(run("--explain", "--json")[1])["selection"]
    assert found["key"]["precision"]["vae"] == "bfloat16" and found["outcome"]["chosen"] == ["geglu"]
    assert chosen.applied(load(str(model), device="cpu"), 64, 64).choices.ops == ("geglu",)
    assert run("--adopt", "ngms")[0] == 0  # it was measured in the usual dtypes
    assert run("--abandon")[0] == 0 and "nothing was selected" not in run("--explain")[1]


def test_forgetting(run, planted: Fake) -> None:
    run("--limit-s", "5000")
    assert "forgotten" in run("--forget")[1]
    assert "nothing to forget" in run("--forget")[1]
    assert "nothing was selected" in run("--explain")[1]


def test_a_selection_that_does_not_hold_says_why(run, planted: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    run("--limit-s", "5000")
    monkeypatch.setattr(chosen, "sources", lambda: "a kernel was changed")
    out = run("--explain")[1]
    assert "nothing was selected" in out and "sources was" in out and "does not hold" in out


def test_an_unfinished_run_replaces_nothing(run, planted: Fake) -> None:
    run("--limit-s", "5000")
    code, out, err = run("--limit-s", "5", "--fresh", "--json")
    assert code == 0 and "what was chosen before stays" in err
    assert json.loads(out)["outcome"]["complete"] is False
    assert json.loads(run("--explain", "--json")[1])["selection"]["outcome"]["chosen"] == ["geglu"]


def test_what_was_measured_once_can_be_adopted_later(run, planted: Fake) -> None:
    """Also where a later run measured less, or did not get to its end."""
    run("--limit-s", "5000", "--less-work")
    run("--limit-s", "5000", "--prompt", "a dog")
    run("--limit-s", "90", "--fresh", "--precision")  # it chooses something and does not get to the end
    assert json.loads(run("--explain", "--json")[1])["selection"]["outcome"]["complete"] is True
    assert run("--adopt", "ngms")[0] == 0


def test_a_folder_for_sheets_that_cannot_be_is_said_before_anything_runs(run, planted: Fake) -> None:
    Path("file").write_text("")
    code, _, err = run("--less-work", "--sheets", "file/x")
    assert code == 3 and "--sheets file/x could not be made" in err and planted.calls == 0


def test_a_scenario_says_all_that_is_not_named(run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        candidates, "list_candidates", lambda model, request: seen.append((model, request)) or []
    )
    name = "sd15-tuned-512-ngms"
    given = ("--dry-run", "--scenario", name, "--device", "cpu")
    run(*given, size=())
    run(*given, "--ngms", "0", "--no-ngms-all-steps", size=SIZE[:2])
    (_, one), (_, other) = seen
    assert one.ngms > 0 and other.ngms == 0 and (other.width, other.steps) == (64, one.steps)
    Path("half.json").write_text(json.dumps({"name": "half", "precision": {"vae": "bfloat16"}}))
    run("--dry-run", "--scenario", "half.json", "--device", "cpu", size=())
    assert seen[-1][0].precision.vae == "bfloat16"
    assert "whole generations decide" in run("--dry-run", "--scenario", "vae-512")[2]


def test_tuned_routes_go_into_the_devices_table(run, planted: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "list_candidates", lambda model, request: [])
    state.store_tuned("cpu", {"geglu": {"old": "a"}, "softmax": {"k": "c"}})
    planted.findings = [{"op": "geglu", "key": "k", "current": "a", "best": "b"}]
    out = run("--limit-s", "5000")[1]
    assert "geglu, tuned" in out.splitlines()[-1]
    assert json.loads(run("--explain", "--json")[1])["selection"]["tuned"] == {"geglu": {"k": "b"}}
    state.forget()  # as another process would find it
    assert state.tuned_tables("cpu") == {"softmax": {"k": "c"}, "geglu": {"old": "a", "k": "b"}}


def test_the_list_runs_nothing(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "generate", None)
    code, out, _ = run("--dry-run")
    assert code == 0 and "not here          CUDA graphs" in out and "with --precision" in out
    assert max(map(len, out.splitlines())) <= 100
    rows = json.loads(run("--dry-run", "--json")[1])
    assert {row["section"] for row in rows} == {"same", "changed precision", "less work"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rounds", "3"), "at least 6"),
        (("--limit-s", "0"), "above 0"),
        (("--max-memory", "-1"), "above 0"),
        (("--max-memory", "inf"), "above 0"),
        (("--min-psnr", "nan"), "no number"),
        (("--dry-run", "--forget"), "--dry-run and --forget"),
        (("--explain", "--adopt", "x"), "--explain and --adopt"),
        (("--generations", "x"), "whole number"),
        (("--sampler", "Heum"), "Heun"),
    ],
)
def test_what_is_asked_wrongly(run, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2 and words in err


def test_a_real_selection_ends_in_its_time_and_tells_the_truth(run) -> None:
    """No outcome is expected: only that it ends, says what it did, and is explained afterwards."""
    code, out, _ = run("--steps", "1", "--limit-s", "8", "--rounds", "6", "--json")
    found = json.loads(out)
    assert code == 0
    assert {row["name"] for row in found["outcome"]["trials"]} >= {"geglu", "channels_last", "cuda_graph"}
    assert all(row["why"] or row["status"] == "not decided" for row in found["outcome"]["trials"])
    code, out, _ = run("--explain")
    assert code == 0 and "noise floor" in out
