"""The page of candidates: every figure is a measurement's, none is written by hand."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    for name in ("docs_candidates", "candidates_tried", "candidates_form"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import docs_candidates

    return docs_candidates


def made(docs: ModuleType, tmp_path: Path, *lines: dict[str, object]) -> object:
    file = tmp_path / "candidates.jsonl"
    rows = [{"provenance": {}}, *({"part": "p", "case": "c", **line} for line in lines)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return docs.Measured(file)


def figure(docs: ModuleType, *after: str, runs: tuple[int, int] | None = None) -> object:
    return docs.Figure("it", "p", "c", "old", after, runs)


def test_figures_are_of_one_run_where_one_has_them(docs: ModuleType, tmp_path: Path) -> None:
    measured = made(
        docs,
        tmp_path,
        {"candidate": "old", "p50_ms": 0.0121, "run": 1},
        {"candidate": "new", "p50_ms": 0.0116, "run": 1},
        {"candidate": "new", "p50_ms": 0.002, "run": 2},
        {"candidate": "more", "p50_ms": 0.0031, "run": 1},
        {"candidate": "other", "p50_ms": 12.5, "run": 3},
        {"candidate": "none", "failed": "BuildError", "run": 1},
    )
    assert measured.words(figure(docs, "new")) == "it: 12.1 → 11.6 µs"
    assert measured.words(figure(docs, "new", "more")) == "it: 12.1 → 11.6 + 3.1 µs"
    assert measured.words(figure(docs, "other")) == "it: 0.01 → 12.50 ms (two runs)"
    assert measured.words(figure(docs, "new", runs=(1, 2))) == "it: 12.1 → 2.0 µs (two runs)"
    with pytest.raises(KeyError, match="'none' was not measured"):
        measured.words(figure(docs, "none"))


def test_every_row_has_its_figures(docs: ModuleType) -> None:
    page = docs.candidates_page()
    rows = [line for line in page.splitlines() if line.startswith("| ") and " → " in line]
    assert len(rows) == len(docs.ENTRIES)
    for entry in docs.ENTRIES:
        assert entry.verdict in docs.VERDICTS and entry.figures
        assert not re.search(r"\d\.\d|\d %", entry.why.replace("SD 1.5", "SD")), (
            "a figure in a sentence is looked up"
        )


def test_the_results_say_where_they_come_from(docs: ModuleType) -> None:
    measured = docs.Measured(docs.FILE)
    about = measured.head["provenance"]
    assert measured.head["source"] and about["device"] and about["torch"] and about["date"]
    for line in measured.lines:
        assert {"part", "case", "candidate"} <= set(line)
        assert (
            line.get("p50_ms", 1) > 0 and ("p50_ms" in line) + ("failed" in line) + ("span_ms" in line) == 1
        )
