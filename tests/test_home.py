"""The state folder."""

import os
import sys
from pathlib import Path

import pytest

from clearway import home


def test_clearway_home_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    assert home.root() == tmp_path
    assert home.path("a", "b.json") == tmp_path / home.LAYOUT / "a" / "b.json"


@pytest.mark.parametrize(
    ("platform", "part"),
    [("linux", ".local/state/clearway"), ("darwin", "Library/Application Support/Clearway")],
)
def test_the_platforms_place_otherwise(monkeypatch: pytest.MonkeyPatch, platform: str, part: str) -> None:
    monkeypatch.delenv("CLEARWAY_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    assert home.root().as_posix().endswith(part)


def test_what_is_written_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    assert home.read_json("x.json") == {}
    assert home.write_json({"a": [1]}, "folder", "x.json")
    assert home.read_json("folder", "x.json") == {"a": [1]}
    assert [path.name for path in (tmp_path / home.LAYOUT / "folder").iterdir()] == ["x.json"]


def test_a_damaged_file_is_an_empty_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    home.write_json({}, "x.json")
    for text in ("{", "[1]", "\x00"):
        home.path("x.json").write_text(text)
        assert home.read_json("x.json") == {}


def test_a_place_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "file"))
    assert not home.write_json({}, "x.json")


def test_a_failed_move_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    monkeypatch.setattr(os, "replace", full)
    assert not home.write_json({}, "x.json")
    assert list((tmp_path / home.LAYOUT).iterdir()) == []
