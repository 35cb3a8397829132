"""Records: out as a line, back as they were, and every bad line named."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from clearway.errors import RequestError
from clearway.measure.clock import Comparison
from clearway.measure.record import SCHEMA, Record, append, read, replace, to_line

FULL = Record(
    scenario="embedded",
    contender="clearway",
    work="changed precision",
    provenance={"machine": "nvidia-h200", "settings": {"dtype": "float16"}},
    intended={"executor": "compiled"},
    refused="the compiled path did not run",
    throughput={"n": 3, "p50_s": 1.25, "samples_s": [1.25, 1.0, 1.5]},
    operations=[{"name": "softmax", "p50_ms": 0.5}],
    correctness={"verified": "not checked", "psnr_db": None},
    memory={"driver_peak_bytes": 2**40},
    routes={"softmax/metal \u2028 ×": 7},
    comparisons=[{"against": "diffusers", "ratio": 0.5, "verdict": "faster"}],
)
LEAST = Record(scenario="vae-512", contender="diffusers", provenance={})


def line(**changes: object) -> str:
    found = json.loads(to_line(LEAST)) | changes
    return json.dumps({name: value for name, value in found.items() if value != "absent"})


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    target = tmp_path / "results" / "nvidia-h200" / "all.jsonl"
    for record in (FULL, LEAST):
        append(target, record)
    assert read(target) == [FULL, LEAST]
    assert len(target.read_bytes().splitlines()) == 2


def test_a_line_is_one_line_of_strict_json() -> None:
    odd = dataclasses.replace(
        LEAST,
        scenario="two\nlines",
        throughput={"p50_s": np.float64(0.5), "n": np.int64(3), "samples_s": (1.0, math.nan)},
        comparisons=[
            dataclasses.asdict(Comparison(1.0, 0.0, math.inf, 0.1, "no difference", 1.0, 3, "test"))
        ],
    )
    text = to_line(odd)
    assert "\n" not in text and "NaN" not in text and "Infinity" not in text
    found = json.loads(text)
    assert found["throughput"] == {"p50_s": 0.5, "n": 3, "samples_s": [1.0, None]}
    assert found["comparisons"][0]["high"] is None


def test_a_files_records_are_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "new" / "one.jsonl"
    one, other = (Record(scenario="a", contender=name, provenance={}) for name in "bc")
    replace(file, [one, other])
    assert read(file) == [one, other]
    replace(file, [other])
    assert read(file) == [other] and list(file.parent.iterdir()) == [file]


def test_a_line_left_unfinished_spoils_no_other(tmp_path: Path) -> None:
    target = tmp_path / "killed.jsonl"
    target.write_text(to_line(FULL) + "\n" + to_line(LEAST)[:40])
    append(target, LEAST)
    with pytest.raises(RequestError, match=r"killed\.jsonl, line 2 is not JSON"):
        read(target)
    lines = target.read_text().split("\n")
    assert lines[2] == to_line(LEAST) and lines[3] == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "is no JSON object"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": -1e999}', "-1e999 is not a finite number"),
        ('{"scenario": "\\ud800"}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "no schema number"),
        ('{"intended": ' + '{"a": ' * 60 + "1" + "}" * 61, "nested more than 50 deep"),
        (line(schema="1"), "no schema number"),
        (line(schema=True), "no schema number"),
        (line(schema=0), "no schema number"),
        (line(speed=1), "field 'speed' is not known"),
        (line(scenario="absent"), "field 'scenario' is missing"),
        (line(provenance="absent"), "field 'provenance' is missing"),
        (line(scenario=3), "field 'scenario' holds '3'"),
        (line(work="more"), "field 'work' holds 'more'"),
        (line(throughput=[1]), "field 'throughput' holds"),
        (line(operations=[1]), "field 'operations' holds"),
        (line(comparisons=None), "field 'comparisons' holds 'None'"),
        (line(routes=None), "field 'routes' holds 'None'"),
        (line(routes={"unet": "3"}), "field 'routes' holds"),
        (line(refused=False), "field 'refused' holds 'False'"),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, text: str, words: str) -> None:
    target = tmp_path / "bad.jsonl"
    target.write_text(f"{to_line(FULL)}\n\n{text}\n")
    with pytest.raises(RequestError) as error:
        read(target)
    told = str(error.value)
    assert words in told and told.startswith(f"{target}, line 3 ") and "\n" not in told and len(told) < 300


def test_a_line_that_is_no_text_is_named(tmp_path: Path) -> None:
    target = tmp_path / "bad.jsonl"
    target.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="line 1 is not JSON"):
        read(target)


def test_a_newer_schema_is_refused_in_a_sentence(tmp_path: Path) -> None:
    target = tmp_path / "new.jsonl"
    target.write_text(line(schema=SCHEMA + 1, moods=["new"]))
    with pytest.raises(
        RequestError, match=r"line 1 was written by a newer Clearway \(schema 2, this one reads up to 1\)"
    ):
        read(target)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.jsonl cannot be read: No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(RequestError, match="cannot be read"):
        read(tmp_path)


def test_an_empty_file_holds_none(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert read(tmp_path / "empty.jsonl") == []
    append(tmp_path / "empty.jsonl", LEAST)
    assert read(tmp_path / "empty.jsonl") == [LEAST]


def test_a_windows_editor_does_no_harm(tmp_path: Path) -> None:
    target = tmp_path / "notepad.jsonl"
    target.write_bytes(b"\xef\xbb\xbf" + f"{to_line(FULL)}\r\n{to_line(LEAST)}\r\n".encode())
    assert read(target) == [FULL, LEAST]
