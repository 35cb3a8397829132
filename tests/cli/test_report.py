"""`clearway report`: files of records in, Markdown, a page or JSON out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from clearway.cli.main import main
from clearway.measure import record
from record_builders import MAC, pair


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["report", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(autouse=True)
def files() -> None:
    for name, records in (("mine.jsonl", pair()), ("theirs.jsonl", pair(provenance=MAC))):
        for one in records:
            record.append(name, one)
    Path("empty.jsonl").write_text("\n")


def test_markdown_on_standard_output(run) -> None:
    code, out, err = run("mine.jsonl")
    assert (code, err) == (0, "") and out.startswith("# Measurements") and "| clearway | diffusers |" in out


def test_a_page_of_two_machines(run) -> None:
    code, out, err = run("mine.jsonl", "theirs.jsonl", "-o", "page.html")
    text = Path("page.html").read_text(encoding="utf-8")
    assert (code, out, err) == (0, "", "clearway: wrote page.html\n")
    assert text.startswith("<!doctype html>") and "Apple M1" in text and "H200" in text
    assert str(Path.cwd()) not in text


def test_markdown_in_a_file_and_json_beside_it(run) -> None:
    code, out, _ = run("mine.jsonl", "--output", "page.md", "--json")
    assert code == 0 and json.loads(out)["files"] == ["mine.jsonl"]
    assert Path("page.md").read_text(encoding="utf-8").startswith("# Measurements")


def test_pictures_come_from_a_folder(run) -> None:
    from PIL import Image

    Path("shots").mkdir()
    Image.new("RGB", (8, 8)).save("shots/sdxl-30--clearway.png")
    code, _, err = run("mine.jsonl", "-o", "page.html", "--pictures", "shots")
    assert code == 0 and "no picture in shots" in err
    checked = dataclasses.replace(pair()[1], correctness={"reference": "diffusers", "verified": True})
    record.append("checked.jsonl", checked)
    code, _, err = run("checked.jsonl", "-o", "page.html", "--pictures", "shots")
    assert code == 0 and "no picture" not in err
    assert "<img " in Path("page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["none.jsonl"], 2, "cannot be read"),
        (["empty.jsonl"], 2, "no record is in it"),
        (["mine.jsonl", "-o", "page.pdf"], 2, "a report ends in .html"),
        (["mine.jsonl", "--pictures", "shots"], 2, "--output FILE.html"),
        (["mine.jsonl", "-o", "page.html", "--pictures", "none"], 2, "no such folder"),
        (["mine.jsonl", "-o", "no/such/page.html"], 3, "could not be written"),
        ([], 2, "FILE"),
    ],
)
def test_a_wrong_request_is_one_sentence(run, arguments: list[str], code: int, words: str) -> None:
    found, out, err = run(*arguments)
    assert (found, out) == (code, "") and words in err and err.count("\n") == 1


def test_a_file_that_is_no_record_names_its_line(run) -> None:
    with open("mine.jsonl", "a", encoding="utf-8") as file:
        file.write("not json\n")
    code, _, err = run("mine.jsonl")
    assert code == 2 and "mine.jsonl, line 3" in err
