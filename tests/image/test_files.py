"""Names and folders; nothing overwritten, half-written or left behind, and every error one sentence."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import clearway
from clearway.errors import ClearwayError, RequestError, UnavailableError
from clearway.image import check_target, files, read_metadata, save
from clearway.request import Request
from clearway.result import Result


def result(count: int = 1, *, side: tuple[int, int] = (8, 16), text: str = "a") -> Result:
    images = np.arange(count, dtype=np.uint8)[:, None, None, None] * np.ones((1, *side, 3), np.uint8)
    infotexts = tuple(f"{text}\nSteps: 1, Sampler: Euler, Seed: {7 + index}" for index in range(count))
    return Result(images, tuple(range(7, 7 + count)), infotexts, Request(prompt=text))


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".jpeg", ".webp", ".PNG"])
def test_a_file_holds_its_picture_and_texts(tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"apple{suffix}"
    check_target(target)
    assert save(result(), target, evidence='{"routes": 1}') == [target]
    found = read_metadata(target)
    assert found.infotext == result().infotexts[0]
    assert found.evidence == {"routes": 1}
    assert names(tmp_path) == [target.name]


def test_a_folder_counts_on_after_the_highest_number(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert [path.name for path in save(result(2), folder)] == ["00001-7.png", "00002-8.png"]
    (folder / "00041-99.webp").touch()
    (folder / "20240101-holiday.png").touch()
    (folder / "100-x.png").touch()
    assert [path.name for path in save(result(), folder, format="jpg")] == ["00042-7.jpg"]
    (folder / "99999-1.png").touch()
    assert save(result(), folder)[0].name == "100000-7.png"
    assert save(result(), folder)[0].name == "100001-7.png"


def test_a_folder_may_have_a_dot_when_it_says_so(tmp_path: Path) -> None:
    assert save(result(), f"{tmp_path}/v1.5/")[0] == tmp_path / "v1.5" / "00001-7.png"
    assert save(result(), tmp_path / "v1.5")[0].name == "00002-7.png"


def test_several_pictures_into_a_file(tmp_path: Path) -> None:
    assert [path.name for path in save(result(3), tmp_path / "x.png")] == ["x.png", "x-2.png", "x-3.png"]


def test_a_taken_name_is_passed_over_and_told_before(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"mine")
    (tmp_path / "x-3.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RequestError, match=r"x\.png exists already"):
        check_target(tmp_path / "x.png")
    assert [path.name for path in save(result(2), tmp_path / "x.png")] == ["x-2.png", "x-4.png"]
    assert (tmp_path / "x.png").read_bytes() == b"mine"
    check_target(tmp_path / "y.png", 3)
    (tmp_path / "y-2.png").touch()
    check_target(tmp_path / "y.png", 1)
    with pytest.raises(RequestError, match=r"y-2\.png exists already"):
        check_target(tmp_path / "y.png", 3)


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save(result(), "~/pictures/x.png") == [tmp_path / "pictures" / "x.png"]


def test_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_target("new/x.png")
    assert names(tmp_path) == []
    assert save(result(), "x.png") == [Path("x.png")]
    assert save(result(), ".") == [Path("00001-7.png")]


def test_the_files_mode_is_the_users_own(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        assert save(result(), tmp_path)[0].stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_what_a_format_cannot_hold_becomes_png(tmp_path: Path) -> None:
    assert save(result(text="x" * 40000), tmp_path / "a.jpg") == [tmp_path / "a.png"]
    assert save(result(side=(8, 16384)), tmp_path, format="webp")[0].name == "00001-7.png"
    assert names(tmp_path) == ["00001-7.png", "a.png"]


def test_two_processes_never_meet(tmp_path: Path) -> None:
    code = (
        "import sys; import numpy as np; from clearway.image import save; "
        "from clearway.request import Request; from clearway.result import Result; "
        "images = np.full((25, 8, 8, 3), int(sys.argv[2]), 'uint8'); "
        "save(Result(images, (5,) * 25, ('a',) * 25, Request()), sys.argv[1])"
    )
    source = str(Path(clearway.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(value)], env=environment)
        for value in (10, 200)
    ]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(names(tmp_path)) == 50
    values = [int(np.asarray(Image.open(tmp_path / name))[0, 0, 0]) for name in names(tmp_path)]
    assert sorted(values) == [10] * 25 + [200] * 25


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "link", link)
    (tmp_path / "x.png").touch()
    assert [path.name for path in save(result(2), tmp_path / "x.png")] == ["x-2.png", "x-3.png"]
    assert names(tmp_path) == ["x-2.png", "x-3.png", "x.png"]
    assert read_metadata(tmp_path / "x-3.png").infotext == result(2).infotexts[1]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), OSError(errno.EIO, "io")]
)
@pytest.mark.parametrize("call", ["fsync", "link", "open", "fdopen"])
def test_no_failure_leaves_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, call: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises((ClearwayError, KeyboardInterrupt)):
        patch.setattr(files.os, call, fail)
        save(result(), tmp_path / "x.png")
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "io"), KeyboardInterrupt()])
def test_no_failure_of_the_move_leaves_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    def move(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises((ClearwayError, KeyboardInterrupt)):
        patch.setattr(files.os, "link", link)
        patch.setattr(files.os, "replace", move)
        save(result(), tmp_path / "x.png")
    assert names(tmp_path) == []


def test_an_interrupt_after_the_move_keeps_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    def move(*paths: str) -> None:
        replace(*paths)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files.os, "link", link)
        patch.setattr(files.os, "replace", move)
        save(result(), tmp_path / "x.png")
    assert names(tmp_path) == ["x.png"]


def test_a_full_disk_names_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, calls = os.fsync, []

    def second_fails(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", second_fails)
    with pytest.raises(UnavailableError, match=r"no space is left.*saved before: .*00001-7\.png"):
        save(result(2), tmp_path)
    assert names(tmp_path) == ["00001-7.png"]


def test_a_full_disk_is_told_before_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UnavailableError, match="no space is left"):
        check_target(tmp_path / "deep" / "x.png")
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def denied(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "open", denied)
    for attempt in (check_target, lambda target: save(result(), target)):
        with pytest.raises(RequestError, match="may not be written"):
            attempt(tmp_path / "x.png")


@pytest.mark.parametrize(
    "target, message",
    [
        ("file/x.png", "file is not a folder"),
        ("file/deeper/x.png", "file is not a folder"),
        ("file/", "file is not a folder"),
        ("broken/x.png", "broken is not a folder"),
        ("x.gif", r"file type '\.gif' is not known"),
        ("new.folder", "a new folder's name ends in '/'"),
        ("n" * 300 + ".png", "300 bytes|304 bytes"),
        ("ö" * 200, "400 bytes"),
        ("a\0b.png", "no path"),
        ("", "no path"),
        ("~nobody-of-this-name/x.png", "no usable path"),
        ("\ud800.png", "no usable path"),
        ("/".join(["deep" * 60] * 40) + "/x.png", "no usable path|too long"),
    ],
)
def test_targets_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("broken").symlink_to("nowhere")
    for attempt in (check_target, lambda target: save(result(), target)):
        with pytest.raises(RequestError, match=message) as caught:
            attempt(target)
        assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["broken", "file"]


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="'bmp' is not known"):
        save(result(), tmp_path, format="bmp")
    assert save(result(), tmp_path, format=".JPG")[0].name == "00001-7.jpg"


def test_a_result_of_unequal_parts_is_a_bug(tmp_path: Path) -> None:
    broken = Result(np.zeros((2, 8, 8, 3), np.uint8), (1,), ("a",), Request())
    with pytest.raises(ValueError):
        save(broken, tmp_path)


@pytest.mark.parametrize(
    ("given", "target", "message"),
    [(np.zeros((1, 2, 2, 3), np.uint8), "x.png", "ndarray was given"), (None, "x.png", "NoneType was given")],
)
def test_what_is_no_result(given: Any, target: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        save(given, target)


@pytest.mark.parametrize("target", [None, 3])
def test_what_is_no_path(target: Any) -> None:
    with pytest.raises(RequestError, match="is no path"):
        save(result(), target)
