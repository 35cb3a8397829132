"""`clearway bench`: lists, runs a tiny scenario, writes, shares, and says what cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from clearway.cli import bench as command
from clearway.cli.main import main
from clearway.errors import UnavailableError
from clearway.measure import against, harness
from clearway.measure.record import Record, read

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TINY = ("--set", "model=tiny-sd15-random", "--set", "width=64", "--set", "height=64", "--set", "steps=1")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["bench", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the harness by one that notes what it was asked for."""
    found: list[Any] = []

    def fake(scenario: Any, names: Any, device: Any, plan: Any, **more: Any) -> list[Record]:
        found.append((scenario.name, names, str(device), plan))
        return [
            Record(
                scenario=scenario.name,
                contender=name,
                provenance={},
                failed="it broke" if name == "diffusers" else None,
            )
            for name in names
        ]

    monkeypatch.setattr(harness, "bench", fake)
    return found


def test_lists_run_nothing(run: Any) -> None:
    code, out, _ = run("--list")
    assert code == 0 and "sd15-tuned-512-ngms" in out and "diffusers-compile-max-autotune" in out
    found = json.loads(run("--list", "--json")[1])
    assert "embedded" in found["scenarios"] and "clearway" in found["contenders"]


def test_a_scenario_is_run_written_shared_and_shown(run: Any, tmp_path: Path) -> None:
    paths = {name: str(tmp_path / name) for name in ("out.jsonl", "share.jsonl", "pictures")}
    more = ("--output", paths["out.jsonl"], "--share", paths["share.jsonl"], "--pictures", paths["pictures"])
    code, out, err = run(
        "embedded",
        *TINY,
        "--rounds",
        "1",
        "--contenders",
        "clearway-eager,diffusers",
        *more,
        "--device",
        "cpu",
    )
    assert code == 0 and "too few to call any difference" in err and "noise floor" not in err
    assert "## " in out and "| clearway-eager |" in out and "Memory" in out
    written, shared = read(paths["out.jsonl"]), read(paths["share.jsonl"])
    assert [one.contender for one in written] == [one.contender for one in shared]
    assert all(one.correctness and one.correctness["verified"] is True for one in written)
    assert written[0].throughput == shared[0].throughput
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 3
    code, out, _ = run("embedded", *TINY, "--rounds", "1", "--contenders", "clearway", "--json", "--no-check")
    (one,) = json.loads(out)
    assert code == 0 and one["correctness"] == {"verified": "not checked"}


def test_what_is_asked_for(run: Any, asked: list[Any]) -> None:
    names = "clearway:executor=eager,layout=channels_last,clearway-eager"
    code, _, _ = run("ops", "embedded", "--contenders", names, "--limit-s", "60", "--price-per-hour", "2")
    assert code == 0 and [name for name, *_ in asked] == ["ops", "embedded"]
    assert asked[0][1] == ["clearway:executor=eager,layout=channels_last", "clearway-eager"]
    plan = asked[0][3]
    assert (plan.rounds, plan.limit_s, plan.price_per_hour, plan.check) == (10, 60.0, 2.0, True)


def test_records_so_far_lie_beside_the_output_until_the_end(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    one = Record(scenario="embedded", contender="clearway", provenance={}, refused="cut off")

    def fake(*given: Any, on_records: Any, **more: Any) -> list[Record]:
        on_records([one])
        assert read(partial) == [one] and output.exists() == bool(more["kept"])
        on_records([one, one])
        assert len(read(partial)) == 2
        if more["kept"]:
            raise UnavailableError("cut off")
        more["kept"]["model"] = 1
        return [one]

    monkeypatch.setattr(harness, "bench", fake)
    assert run("embedded", "embedded", "--output", str(output), "--floor-rounds", "8")[0] == 3
    assert len(read(output)) == 1 and len(read(partial)) == 2


def test_the_usual_contenders_and_a_failure_is_exit_code_3(run: Any, asked: list[Any]) -> None:
    code, out, _ = run("--device", "cpu")
    assert code == 0 and run("--contenders", "clearway,diffusers")[0] == 3
    assert asked[0][1][:3] == ["clearway", "clearway-eager", "diffusers"]
    assert "it broke" in out


def test_another_environment(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class FakeWorker:
        def __init__(self, python: str) -> None:
            asked.append(python)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        ask = None

    def alternate(scenario: Any, name: str, *_: Any) -> list[Record]:
        return [
            Record(scenario=scenario.name, contender=name, provenance={"torch_channel": channel})
            for channel in ("release", "nightly")
        ]

    monkeypatch.setattr(against, "Worker", FakeWorker)
    monkeypatch.setattr(against, "alternate", alternate)
    code, out, _ = run("--against", sys.executable)
    assert code == 0 and asked == [sys.executable] * 2
    assert "PyTorch release" in out and "PyTorch nightly" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("embeded",), 2, "nearest: 'embedded'"),
        (("--contenders", "difusers"), 2, "nearest: 'diffusers'"),
        (("--contenders", "clearway:speed=high"), 2, "choice 'speed=high'"),
        (("--contenders", "clearway:executor=graph"), 2, "nearest: 'cuda_graph'"),
        (("--set", "steps"), 2, "not KEY=VALUE"),
        (("--set", "stebs=3"), 2, "nearest: 'steps'"),
        (("--rounds", "0"), 2, "--rounds 0 is out of range"),
        (("--limit-s", "-1"), 2, "--limit-s -1 is out of range"),
        (("--price-per-hour", "nan"), 2, "--price-per-hour nan is out of range"),
        (("--against", "/no/such/python"), 2, "--against"),
        (("ops", "--against", sys.executable), 2, "--against alternates contenders"),
        (("--device", "tpu"), 2, "device 'tpu'"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    run: Any, asked: list[Any], arguments: tuple[str, ...], code: int, words: str
) -> None:
    found, out, err = run(*arguments)
    assert found == code and words in err and out == "" and asked == []


def test_a_limit_that_leaves_no_time_is_said(run: Any, tmp_path: Path) -> None:
    code, out, err = run("ops", "--device", "cpu", "--limit-s", "0", "--share", str(tmp_path / "x"))
    assert code == 3 and "nothing was measured" in err and out == "" and not (tmp_path / "x").exists()


def test_what_was_measured_is_shown_where_the_next_fails(
    run: Any, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = harness.bench

    def fails(scenario: Any, *more: Any, **also: Any) -> list[Record]:
        if scenario.name == "ops":
            raise UnavailableError("no memory is left")
        return measure(scenario, *more, **also)

    monkeypatch.setattr(harness, "bench", fails)
    code, out, err = run("embedded", "ops", "--contenders", "clearway", "--json")
    assert code == 3 and "no memory is left" in err
    assert [one["scenario"] for one in json.loads(out)] == ["embedded"]


def test_files_that_cannot_be_written(run: Any, asked: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run("--contenders", "clearway", "--output", str(tmp_path / "file" / "x.jsonl"))
    assert code == 3 and "could not be written" in err
    for option in ("--output", "--share", "--pictures"):
        for name in (str(tmp_path / "file" / "x"), "x" * 300 if option != "--pictures" else "file/y"):
            code, out, err = run("--contenders", "clearway", option, name)
            assert code == 3 and option in err and "could not be written" in err and out == ""
    assert run("--contenders", "clearway", "--share", str(tmp_path))[0] == 3
    same = ("--output", "x.jsonl", "--share", "./x.jsonl")
    assert run("--contenders", "clearway", *same)[0] == 2
    assert asked == []  # all of it is said before anything is measured
    with pytest.raises(command.UnavailableError, match="could not be written"):
        command._save(str(tmp_path / "file"), "s", "c", __import__("numpy").zeros((1, 4, 4, 3), "uint8"))
