"""Tables and JSON."""

import json
import sys

import pytest

from clearway.cli.output import plain, prepare_streams, print_json, print_table, say, write


def test_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([("A", "B"), ("long", ""), ("x", "y")])
    assert capsys.readouterr().out == "A     B\nlong\nx     y\n"
    print_table([])
    assert capsys.readouterr().out == ""


def test_json_round_trips(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": ["ä", 1.5, None]})
    assert json.loads(capsys.readouterr().out) == {"a": ["ä", 1.5, None]}


def test_notes_go_beside_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    say("note")
    assert capsys.readouterr() == ("", "clearway: note\n")


def test_what_a_terminal_cannot_show_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    prepare_streams()
    write("a\ud800b")
    assert capsys.readouterr().out == "a\\ud800b\n"
    assert plain("\x1b]0;title\x07 text\n\x9b2J") == "\\x1b]0;title\\x07 text\n\\x9b2J"


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), float("inf"), 1.0], "b": ({"c": float("-inf")},)})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.0], "b": [{"c": None}]}


def test_a_note_is_one_line_of_bounded_length(capsys: pytest.CaptureFixture[str]) -> None:
    say("x\ny" + "z" * 10_000)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) < 1100


def test_a_closed_stream_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    prepare_streams()
    write("x")
    sys.stdout.close()
