"""`clearway ops`: list, check and explain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from clearway import ops
from clearway.cli.main import main
from clearway.ops import _cpp, state, verdicts


@pytest.fixture(autouse=True)
def fresh(elsewhere: None) -> Iterator[None]:
    state.forget()
    yield
    state.forget()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "isolated", None)


def test_the_list_has_every_implementation_and_runs_nothing(run, no_process: None) -> None:
    code, out, _ = run("ops", "--json")
    rows = json.loads(out)
    assert code == 0
    assert {row["op"] for row in rows} == set(ops.discover())
    by_name = {(row["op"], row["implementation"], row["device"]): row for row in rows}
    assert by_name["attention", "sdpa", "cpu"]["verdict"] == "stock"
    assert by_name["attention", "streaming", "any"]["verdict"] == "untested"
    assert by_name["attention", "reference", "any"]["verdict"] == "stock"
    assert all(row["verdict"] != "absent" or row["detail"] for row in rows)
    assert run("ops")[1].startswith("OP") and run("ops", "list", "attention", "--json")[0] == 0


def test_the_list_knows_earlier_verdicts(run, no_process: None) -> None:
    streaming = next(i for i in ops.discover()["attention"].implementations if i.name == "streaming")
    state.store_verdict(streaming, "cpu", False, "tiny float32: it is 3 from float64", ())
    out = run("ops", "list", "attention")[1]
    assert "failed: tiny float32: it is 3 from float64" in out


def test_what_takes_no_case_is_refused_and_has_not_failed(
    run, no_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming = next(i for i in ops.discover()["attention"].implementations if i.name == "streaming")
    state.store_verdict(streaming, "cpu", False, "it takes no case", ("float64",), taken=False)
    assert "it takes no case" not in run("ops", "list", "attention")[1]  # of another dtype nothing is known
    none = state.store_verdict(streaming, "cpu", False, "it takes no case", (), taken=False)
    assert "refused: it takes no case" in run("ops", "list", "attention")[1]
    monkeypatch.setattr(verdicts, "isolated", lambda *_, **__: none)
    code, out, _ = run("ops", "check", "attention", "--device", "cpu", "--json")
    assert code == 0 and {row["verdict"] for row in json.loads(out)["results"]} == {"refused"}


def test_what_could_not_be_tested_is_not_called_wrong_and_not_sound(
    run, no_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming = next(i for i in ops.discover()["attention"].implementations if i.name == "streaming")
    untested = state.Verdict(False, "its process had too little memory", tested=False)
    state.remember(streaming, "cpu", untested)
    code, out, _ = run("ops", "list", "attention")
    assert code == 0 and "untested: its process had too little memory\n" in out
    monkeypatch.setattr(verdicts, "isolated", lambda *_, **__: untested)
    code, out, _ = run("ops", "check", "attention", "--device", "cpu", "--json")
    assert code == 3 and {row["verdict"] for row in json.loads(out)["results"]} == {"untested"}


def test_check_runs_isolated_processes_and_writes_one_file(run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def isolated(one, kind, *, every_case, on_line):
        asked.append((one.name, kind, every_case))
        on_line("tiny float32", "")
        wrong = one.name == "streaming"
        return state.Verdict(not wrong, "tiny float32: wrong" if wrong else "", ("float32",))

    monkeypatch.setattr(verdicts, "isolated", isolated)
    code, out, err = run("ops", "check", "attention", "--device", "cpu", "--output", "one.json")
    native = () if _cpp.absent() else ("native",)
    assert code == 3 and asked == [(name, "cpu", True) for name in ("sdpa", *native, "streaming", "math")]
    assert "attention/streaming: 1 cases, failed: tiny float32: wrong" in err and "ON CPU" in out
    written = json.loads(Path("one.json").read_text())
    assert written["results"][0] == {
        "op": "attention",
        "implementation": "sdpa",
        "device": "cpu",
        "verdict": "sound",
        "reason": "",
        "cases": [{"case": "tiny float32", "problem": ""}],
    }
    assert str(Path.home()) not in Path("one.json").read_text()
    code, out, err = run("ops", "check", "--json", "--device", "cpu")
    assert code == 3 and err == "" and json.loads(out)["results"]
    assert run("ops", "check", "attention", "--device", "cpu", "--output", "no/such/folder.json")[0] == 3


def test_nothing_to_check_is_a_sentence_and_no_empty_table(run, no_process: None) -> None:
    code, out, err = run("ops", "check", "geglu", "--device", "cpu")
    assert code == 0 and out == "" and "nothing to check on cpu" in err


def test_check_of_what_is_there_for_real(run, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = ops.discover()["attention"]
    (math,) = (i for i in attention.implementations if (i.name, i.device) == ("math", "cpu"))
    monkeypatch.setattr(attention, "implementations", [math])
    code, out, _ = run("ops", "check", "attention", "--device", "cpu", "--json")
    (result,) = json.loads(out)["results"]
    assert code == 0 and result["verdict"] == "sound" and len(result["cases"]) > 40


def test_explain_gives_every_case_and_every_reason(
    run, no_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ops.discover()["attention"].defaults, "cpu")  # native, where this CPU prefers it
    code, out, _ = run("ops", "explain", "attention", "--json", "--device", "cpu")
    found = json.loads(out)
    cases = {entry["case"]: entry for entry in found["cases"]}
    assert code == 0 and found["device"] == "cpu"
    assert cases["SD1.5 64x64"]["taken"] == "sdpa"
    assert cases["SD1.5 64x64"]["refused"]["metal"] == "it is for mps, these are on cpu"
    assert all(reason for entry in found["cases"] for reason in entry["refused"].values())
    shown = run("ops", "explain", "attention", "--device", "cpu")[1]
    assert "SD1.5 64x64: sdpa" in shown
    assert shown.count("it is for mps, these are on cpu") == 1  # a reason that holds for all is said once


@pytest.mark.parametrize("name", sorted(ops.discover()))
@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_explain_speaks_of_devices_that_are_not_here(run, no_process: None, name: str, kind: str) -> None:
    code, out, _ = run("ops", "explain", name, "--json", "--device", kind, "--dtype", "fp16")
    assert code == 0 and all(entry["taken"] for entry in json.loads(out)["cases"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ops", "explain"], "explain needs an op"),
        (["ops", "check", "atention"], "nearest: 'attention'"),
        (["ops", "explain", "attention", "--device", "tpu"], "device 'tpu' is not known"),
        (["ops", "explain", "attention", "--dtype", "int3"], "int3"),
        (["ops", "improve"], "invalid choice"),
    ],
)
def test_a_wrong_request_is_one_sentence(run, arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
