"""What is finished is kept, what is not is run again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from clearway.measure.journal import KEPT_DAYS, Journal


def never() -> dict:
    raise AssertionError("this step was finished before")


def test_a_step_is_run_once_even_by_another_process(tmp_path: Path) -> None:
    first = Journal(tmp_path, {"model": "m"})
    assert first.step("one", lambda: {"times": (1.0, 2.0)}) == {"times": [1.0, 2.0]}
    assert first.step("one", never) == {"times": [1.0, 2.0]}
    second = Journal(tmp_path, {"model": "m"})
    assert second.resumed == 1 and "one" in second and "two" not in second
    assert second.step("one", never) == {"times": [1.0, 2.0]}


def test_another_question_is_another_journal(tmp_path: Path) -> None:
    Journal(tmp_path, {"model": "m"}).step("one", dict)
    assert Journal(tmp_path, {"model": "n"}).resumed == 0
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_what_is_not_finished_is_not_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    assert journal.step("one", lambda: None) is None
    assert "one" not in journal and journal.path is not None and not journal.path.exists()


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    journal.step("one", lambda: {"x": 1})
    assert journal.path is not None
    with journal.path.open("a") as file:
        file.write('{"step": "two", "resu')
    again = Journal(tmp_path, {})
    assert again.resumed == 1
    again.step("two", lambda: {"x": 2})
    again.step("three", lambda: {"x": float("inf")})
    last = Journal(tmp_path, {})
    assert last.resumed == 3 and last.step("two", never) == {"x": 2}


def test_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    assert journal.path is not None
    lines = ["", "[]", "3", '{"step": 1, "result": {}}', '{"step": "a", "result": []}', "\xff"]
    journal.path.write_text("\n".join([*lines, json.dumps({"step": "b", "result": {}})]))
    assert Journal(tmp_path, {}).resumed == 1


def test_dropping_and_a_disk_that_cannot_write(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    journal.step("one", dict)
    journal.drop()
    assert Journal(tmp_path, {}).resumed == 0
    (tmp_path / "file").write_text("")
    lost = Journal(tmp_path / "file" / "below", {})
    assert lost.step("one", lambda: {"x": 1}) == {"x": 1} and lost.step("one", never) == {"x": 1}
    assert Journal(None, {}).path is None


def test_dropping_what_cannot_be_deleted_forgets_it_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file", {})
    journal.drop()
    assert journal.step("one", lambda: {"x": 1}) == {"x": 1}


def test_old_questions_are_cleared_and_nothing_else(tmp_path: Path) -> None:
    paths = {}
    for question in ("old", "mine", "young"):
        journal = Journal(tmp_path, {"model": question})
        journal.step("one", lambda: {"ms": 1})
        paths[question] = journal.path
    paths["notes"] = tmp_path / "notes.txt"
    paths["notes"].write_text("a user's own")
    for name, path in paths.items():
        then = time.time() - (KEPT_DAYS + (-1 if name == "young" else 1)) * 86400
        os.utime(path, (then, then))
    assert Journal(tmp_path, {"model": "mine"}).resumed == 1  # the one that is asked again stays
    assert [name for name, path in paths.items() if not path.exists()] == ["old"]
    assert Journal(tmp_path / "nowhere", {}).resumed == 0
