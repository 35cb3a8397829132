"""The state folder."""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
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
    for text in ("{", "[1]", "\x00", "[" * 100_000):
        home.path("x.json").write_text(text)
        assert home.read_json("x.json") == {}


def test_a_place_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "file"))
    assert not home.write_json({}, "x.json")


@pytest.mark.parametrize("links", [True, False])
def test_of_several_who_create_a_file_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, links: bool
) -> None:
    def none(*_: object) -> None:
        raise PermissionError("operation not permitted")

    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    if not links:  # as on FAT
        monkeypatch.setattr(os, "link", none)
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda number: home.create_json({"number": number}, "a", "x.json"), range(8)))
    assert done.count(True) == 1 and home.read_json("a", "x.json") == {"number": done.index(True)}
    assert [path.name for path in (tmp_path / home.LAYOUT / "a").iterdir()] == ["x.json"]
    home.path("a", "x.json").write_text("{")
    assert not home.create_json({}, "a", "x.json") and home.read_json("a", "x.json") == {}  # damaged or not
    home.path("file").write_text("")
    assert not home.create_json({}, "file", "x.json")


def test_a_failed_move_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    monkeypatch.setattr(os, "replace", full)
    assert not home.write_json({}, "x.json")
    assert list((tmp_path / home.LAYOUT).iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    home.path().mkdir()
    os.mkfifo(home.path("x.json"))
    assert home.read_json("x.json") == {}


def test_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert home.expanded("~/x") == tmp_path / "x"
    assert home.expanded("x/~") == Path("x/~")


def nobody(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_where_no_home_is_known_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "expanduser", nobody)
    monkeypatch.setattr(Path, "home", classmethod(nobody))
    assert home.expanded("~nouser/x") == Path("~nouser/x")
    for platform in ("linux", "darwin", "win32"):
        monkeypatch.setattr(sys, "platform", platform)
        for name in ("XDG_STATE_HOME", "LOCALAPPDATA", "CLEARWAY_HOME"):
            monkeypatch.delenv(name, raising=False)
        assert home.root().parent == Path(tempfile.gettempdir())
        monkeypatch.setenv("CLEARWAY_HOME", "~nouser/x")
        assert home.root().parent == Path(tempfile.gettempdir())


def test_nor_where_there_is_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(Path, "expanduser", nobody)
    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setenv("CLEARWAY_HOME", "~nouser/x")
    assert home.read_json("x.json") == {} and not home.write_json({}, "x.json")
