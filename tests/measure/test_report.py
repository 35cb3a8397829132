import json
import re
from pathlib import Path

import pytest

from clearway.errors import RequestError
from clearway.measure import record
from clearway.measure.groups import arrange
from clearway.measure.report import as_json, load, markdown, tally, words_of
from record_builders import H200, MAC, made, pair, samples

HOSTILE = "<script>x</script> | **b** `c` [d](e)\n# f"


def _written(path: Path, records: list) -> Path:
    for one in records:
        record.append(path, one)
    return path


def test_files_of_several_machines_stand_side_by_side(tmp_path: Path) -> None:
    files = [
        _written(tmp_path / "mine.jsonl", pair()),
        _written(tmp_path / "theirs.jsonl", pair(provenance=MAC)),
    ]
    report = load(files)
    assert report.files == ["mine.jsonl", "theirs.jsonl"] and len(report.machines) == 2
    text = markdown(report)
    assert str(tmp_path) not in text
    first, second = text.split("\n## Apple M1")
    assert "H200" in first and "H200" not in second and "Apple" not in first.partition("\n## ")[2]


def test_files_of_one_name_are_runs_of_their_own_and_one_file_is_read_once(tmp_path: Path) -> None:
    files = [tmp_path / folder / "mine.jsonl" for folder in ("a", "b", "c/a")]
    for file, one in zip(files, (*pair(), pair()[0]), strict=True):
        record.append(file, one)
    report = load([*files, files[0]])
    assert report.files == ["a/mine.jsonl", "b/mine.jsonl", "a/mine.jsonl (2)"]
    assert list(report.groups[0].runs) == ["A", "B", "C"] and len(report.groups[0].entries) == 3


def test_every_ledger_has_its_section_and_says_when_it_is_empty() -> None:
    text = markdown(arrange([("f", made("s", "c", samples(1.0)))]))
    assert re.findall(r"^#### (.*)$", text, re.MULTILINE) == [
        "Throughput", "Operations", "Correctness", "Memory", "What ran",
    ]  # fmt: skip
    assert text.count("Nothing of it was recorded.") == 3


def test_losses_refusals_and_doubts_are_in_the_text() -> None:
    lie = made("s", "liar", None, throughput={"samples_s": [2.0, 2.0, 2.0], "p50_s": 1.0})
    records = [*pair(factor=1.3), made("s", "x", None, refused="the graph was not captured"), lie]
    text = markdown(arrange(("f", one) for one in records))
    assert "| slower |" in text and "the graph was not captured" in text
    assert "says p50\\_s" not in text and "says p50_s 1.000, its samples give 2.000" in text
    assert "1 slower, 0 no difference, 1 refused, 0 failed" in text


def test_a_record_cannot_write_markdown_or_html() -> None:
    hostile = {
        **H200,
        "device": HOSTILE,
        "torch_channel": HOSTILE,
        "os": HOSTILE,
        "settings": {HOSTILE: HOSTILE},
    }
    records = [
        made(HOSTILE, HOSTILE, samples(1.0), hostile, routes={HOSTILE: 1}),
        made("s", "x", None, hostile, refused=HOSTILE),
    ]
    text = markdown(arrange((HOSTILE, one) for one in records))
    assert "<" not in text and text.count("\n#") == 7
    inert = re.sub(r"\\[\\`*\[\]|]", "", text)  # what is escaped
    assert "`" not in inert and "]" not in inert and "[" not in inert and "b**" not in inert
    lines = [line.count("|") for line in inert.splitlines() if line.startswith("|")]
    assert set(lines) <= {4, 5, 6, 7, 8, 9, 10, 11}


def test_json_has_the_same_figures() -> None:
    found = as_json(arrange(("f", one) for one in pair()))
    json.dumps(found, allow_nan=False)
    (build,) = found["machines"][0]["builds"]
    assert build["channel"] == "release" and build["tally"]["faster"] == 1 and build["doubts"] == []
    compared = next(one for one in build["throughput"] if one["table"] == "compared")
    assert compared["rows"][0]["ratio"] == pair()[1].comparisons[0]["ratio"]


def test_a_tally_says_zeros_too() -> None:
    (group,) = arrange(("f", one) for one in pair()).groups
    assert words_of(tally(group)) == "2 results, 1 faster, 0 slower, 0 no difference, 0 refused, 0 failed"


def test_what_is_no_record_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"schema": 1}\n')
    with pytest.raises(RequestError, match="line 1"):
        load([tmp_path / "x.jsonl"])
    with pytest.raises(RequestError, match="cannot be read"):
        load([tmp_path / "none.jsonl"])
