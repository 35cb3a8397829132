"""What is kept on disk and what is believed of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clearway import home
from clearway.ops import state
from clearway.ops.contract import Implementation


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    state.forget()
    yield
    state.forget()


@pytest.fixture
def made(tmp_path: Path) -> Implementation:
    source = tmp_path / "kernel.metal"
    source.write_text("kernel void one() {}")
    return Implementation("stated", "one", "cpu", lambda x: x, sources=(source,))


def file() -> Path:
    (found,) = home.path("verdicts").glob("*.json")
    return found


def test_a_verdict_comes_back(made: Implementation) -> None:
    state.store_verdict(made, "cpu", True, "", ("float32",))
    state.forget()
    found = state.known(made, "cpu", torch.float32)
    assert found is not None and found.sound and found.dtypes == ("float32",) and found.date
    assert state.known(made, "cpu", torch.float16) is None


def test_a_verdict_is_one_dtypes_and_without_a_dtype_it_is_all(made: Implementation) -> None:
    state.store_verdict(made, "cpu", True, "", ("float32",))
    state.store_verdict(made, "cpu", True, "", ("float16",))
    before = state.version()
    state.store_verdict(made, "cpu", False, "wide: wrong", ("bfloat16",))
    assert state.version() > before
    for _ in range(2):  # from memory, then from the disk
        assert state.known(made, "cpu", torch.float32).sound
        assert "wide: wrong" in state.ruled_out(made, "cpu", torch.bfloat16)
        assert state.ruled_out(made, "cpu") is None and state.ruled_out(made, "cpu", torch.float16) is None
        found = state.known(made, "cpu")
        assert found.sound and found.dtypes == ("float16", "float32")
        assert found.reason == "in bfloat16: wide: wrong"
        state.forget()
    state.store_verdict(made, "cpu", False, "it should have refused", ())
    for dtype in (None, torch.float32, torch.float64):
        assert "should have refused" in state.ruled_out(made, "cpu", dtype)
    assert state.losses() == (
        "stated/one is not used: its self-test on this machine failed: it should have refused",
    )


def test_what_cannot_be_built_in_one_dtype_is_used_in_the_others() -> None:
    state.disable("stated", "one", "too little shared memory", torch.float32)
    assert state.disabled("stated", "one", torch.float32) == "too little shared memory"
    assert state.disabled("stated", "one", torch.float16) is None and state.disabled("stated", "one") is None
    assert state.losses() == ("stated/one is not used in float32: too little shared memory",)


def test_a_refusal_is_no_loss(made: Implementation, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither said nor counted against other dtypes; known all the same, also by the next process."""
    before = state.version()
    state.store_verdict(made, "cpu", False, "it takes no case in float64", ("float64",), taken=False)
    for _ in range(2):
        assert state.ruled_out(made, "cpu", torch.float64) == "it takes no case in float64"
        assert state.known(made, "cpu") is None and state.ruled_out(made, "cpu") is None
        assert state.losses() == () and capsys.readouterr().err == ""
        assert state.version() == before
        state.forget()
        before = state.version()
    state.store_verdict(made, "cpu", True, "", ("float32",))
    found = state.known(made, "cpu")
    assert found.sound and found.reason == "" and found.dtypes == ("float32",)


def test_a_self_test_does_not_start_from_what_the_last_one_found(
    made: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was once unsound, for want of memory say, could not be named, so it stayed unsound."""
    state.store_verdict(made, "cpu", False, "wide: wrong", ("float32",))
    assert "wide: wrong" in state.ruled_out(made, "cpu", torch.float32)
    monkeypatch.setenv(state.INSIDE, "1")
    assert state.ruled_out(made, "cpu", torch.float32) is None
    assert state.verdict(made, "cpu", (torch.ones(1),)) is None


def test_losses_of_some_ops_in_some_dtypes(made: Implementation) -> None:
    for name, dtype in (("one", torch.float64), ("two", torch.float16), ("three", None)):
        state.disable("stated", name, "the compiler says no", dtype)
    state.disable("another", "one", "the compiler says no")

    def found(*given: Any) -> list[str]:
        return [sentence.partition(" ")[0] for sentence in state.losses(*given)]

    assert found() == ["stated/one", "stated/two", "stated/three", "another/one"]
    assert found({"stated"}) == ["stated/one", "stated/two", "stated/three"]
    assert found({"stated"}, ("float16", "float32")) == ["stated/two", "stated/three"]
    assert found({"third"}) == [] == found((), ("float64",))


def test_another_source_device_driver_or_torch_is_another_verdict(
    made: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.store_verdict(made, "cpu", True, "", ("float32",))
    state.forget()
    made.sources[0].write_text("kernel void one() { /* faster */ }")
    assert state.known(made, "cpu") is None
    made.sources[0].write_text("kernel void one() {}")
    state.forget()
    assert state.known(made, "cpu") is not None
    state.forget()
    monkeypatch.setattr("clearway.device.identity", lambda kind: f"{kind}, torch 9.9.9, another driver")
    assert state.known(made, "cpu") is None


@pytest.mark.parametrize(
    "forge",
    [
        lambda content: content | {"sound": True, "reason": ""},  # unsound made sound by hand
        lambda content: content | {"dtype": "float16"},
        lambda content: content | {"seal": "0" * 64},
        lambda content: content | {"sound": "true"},
        lambda content: content | {"dtype": None},
        lambda content: content | {"taken": False},  # a loss made a refusal
        lambda content: content | {"identity": "cpu, of a friend"},
        lambda content: {key: value for key, value in content.items() if key != "seal"},
        lambda content: [content],
        lambda content: None,
    ],
)
def test_what_was_edited_or_carried_over_is_not_believed(made: Implementation, forge) -> None:
    state.store_verdict(made, "cpu", False, "it is wrong", ())
    state.forget()
    place = file()
    place.write_text(json.dumps(forge(json.loads(place.read_text()))))
    assert state.known(made, "cpu") is None


@pytest.mark.parametrize("text", ["", "{", "\x00\xff", '{"a":' * 2000, "[]"])
def test_a_broken_file_is_no_verdict(made: Implementation, text: str) -> None:
    state.store_verdict(made, "cpu", True, "", ("float32",))
    state.forget()
    file().write_text(text, encoding="utf-8")
    assert state.known(made, "cpu") is None


def test_a_verdict_renamed_to_another_implementation_is_not_believed(
    made: Implementation, tmp_path: Path
) -> None:
    state.store_verdict(made, "cpu", True, "", ("float32",))
    other = Implementation("stated", "two", "cpu", lambda x: x, sources=made.sources)
    file().rename(home.path(*state._place(other, "cpu", "float32")))
    assert state.known(other, "cpu") is None


def test_a_disk_that_keeps_nothing_is_no_reason_to_stop(made: Implementation, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder would be")
    state.store_verdict(made, "cpu", True, "", ("float32",))
    found = state.known(made, "cpu")
    assert found is not None and found.sound  # for this process
    assert state.store_tuned("cpu", {"stated": {"torch.float32|3": "one"}}) is False


def test_switching_off_is_said_once_and_changes_routes(capsys: pytest.CaptureFixture[str]) -> None:
    before = state.version()
    state.disable("stated", "one", "the compiler says no")
    state.disable("stated", "one", "the compiler says no")
    assert capsys.readouterr().err.count("stated/one is not used: the compiler says no") == 1
    assert state.version() > before and state.disabled("stated", "one") == "the compiler says no"
    assert state.losses() == ("stated/one is not used: the compiler says no",)


def test_the_tuned_table_holds_for_the_machine_it_was_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state.tuned("stated", "cpu") is None
    state.store_tuned("cpu", {"stated": {"torch.float32|3": "one"}})
    state.forget()
    assert state.tuned("stated", "cpu") == {"torch.float32|3": "one"}
    state.forget()
    monkeypatch.setattr("clearway.device.identity", lambda kind: "another machine")
    assert state.tuned("stated", "cpu") is None


@pytest.mark.parametrize(
    "choices", [None, [], {"stated": []}, {"stated": {"torch.float32|3": 7}}, {"stated": {}}]
)
def test_a_tuned_table_that_is_none_is_ignored(choices: object) -> None:
    content = {"identity": state.identity("cpu"), "sources": state.sources(), "choices": choices}
    home.write_json(content, "tuned", "cpu.json")
    assert not state.tuned("stated", "cpu")


def test_a_tuned_table_holds_for_its_source_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    state.store_tuned("cpu", {"stated": {"torch.float32|3": "one"}})
    state.forget()
    assert state.tuned_tables("cpu") == {"stated": {"torch.float32|3": "one"}}
    state.forget()
    monkeypatch.setattr(state, "sources", lambda: "a kernel was changed")
    assert state.tuned("stated", "cpu") is None


def test_tables_on_trial_stand_in_and_are_gone_afterwards() -> None:
    state.store_tuned("cpu", {"stated": {"torch.float32|3": "one"}})
    before = state.version()
    with state.trying({"stated": {"torch.float32|3": "two"}}):
        assert state.tuned("stated", "cpu") == {"torch.float32|3": "two"}
        assert state.tuned("another", "cpu") is None
        first = state.version()
    with state.trying({}):
        assert state.tuned("stated", "cpu") is None
        assert state.version() not in (before, first)
    with state.trying({"stated": {"torch.float32|3": "two"}}):
        assert state.version() == first  # a graph captured in the first trial is good in this one
    assert state.version() == before
    assert state.tuned("stated", "cpu") == {"torch.float32|3": "one"}
    state.forget()
    assert state.tuned("stated", "cpu") == {"torch.float32|3": "one"}


def test_what_is_known_to_be_wrong_is_so_where_nobody_waits_for_a_verdict(
    made: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its dtype alone; the self-test's own process finds it anew."""
    state.store_verdict(made, "cpu", False, "wide: wrong", ("bfloat16",))
    args = {dtype: (torch.zeros(2, dtype=dtype),) for dtype in (torch.bfloat16, torch.float16)}
    for _ in range(2):  # from memory, then from the disk
        with state.trusting():
            assert "wide: wrong" in str(state.verdict(made, "cpu", args[torch.bfloat16]))
            assert state.verdict(made, "cpu", args[torch.float16]) is None
        state.forget()
    monkeypatch.setenv(state.INSIDE, "1")
    assert state.verdict(made, "cpu", args[torch.bfloat16]) is None


def test_what_could_not_be_tested_is_said_held_here_and_forgiven(made: Implementation) -> None:
    half, full = torch.float16, torch.float32
    untested = state.Verdict(False, "there was no memory", ("float16",), tested=False)
    state.remember(made, "cpu", untested)
    state.store_verdict(made, "cpu", False, "wide: wrong", ("float32",))
    assert state.ruled_out(made, "cpu", half) == "its self-test could not run: there was no memory"
    assert len(state.losses()) == 2
    before = state.version()
    for dtype in (half, full):
        state.forgive(made, "cpu", dtype)
    assert state.known(made, "cpu", half) is None and state.version() != before
    assert not state.known(made, "cpu", full).sound and "wide: wrong" in str(state.losses())
    state.remember(made, "cpu", state.Verdict(False, "no memory", tested=False))  # in any dtype
    state.forgive(made, "cpu", half)
    assert state.ruled_out(made, "cpu") is None and len(state.losses()) == 1
