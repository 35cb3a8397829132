"""Tables and JSON."""

import json

import pytest

from clearway.cli.output import print_json, print_table, say


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
