import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clearway.measure.groups import Report, arrange
from clearway.measure.page import page
from clearway.measure.pictures import pictures
from clearway.measure.record import Record
from clearway.measure.report import as_json, markdown
from record_builders import H200, MAC, made, pair, samples, throughput

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(1)>\" onmouseover='x' {{7*7}} ]]>"


class _Read(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.values: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.values += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def _read(report: Report, **more: Any) -> _Read:
    read = _Read()
    read.feed(page(report, **more))
    read.close()
    return read


def _full(name: str, provenance: dict[str, Any]) -> list[Record]:
    """Records in which every text that a file can hold is `name`."""
    base, mine = pair(provenance=provenance)
    stages = throughput(samples(1.0), stages_ms={name: 3.0})
    work = {"name": name, "n": 3, "p50_ms": 1.0, "bytes_moved": 1e9, "flops": 1e11}
    records = [
        base,
        dataclasses.replace(
            mine, comparisons=[one | {"against": name, "test": name} for one in mine.comparisons]
        ),
        made(
            "s",
            "c",
            None,
            provenance,
            throughput=stages,
            operations=[work],
            correctness={"reference": name, "verified": name, "psnr_db": 40.0},
            memory={"driver_peak_bytes": 2**31, "sources": {name: name}, "timeline": [[0, 1e9], [1, 2e9]]},
            intended={name: name},
            routes={name: 3},
        ),
        made("s", "x", None, provenance, refused=name),
        made("s", "y", None, provenance, failed=name),
        made("s", "z", None, provenance, throughput={"p50_s": 1.0}),
    ]
    return [
        dataclasses.replace(one, scenario=name, contender=f"{name} {index}")
        for index, one in enumerate(records)
    ]


def _provenance(name: str) -> dict[str, Any]:
    roofs = {"ceilings": {"gb_per_s": 4000, "tflop_per_s": 700}, "dtype": name}
    texts = {key: name for key, value in H200.items() if isinstance(value, str) and key != "date"}
    return {**H200, **texts, "settings": roofs}


def test_no_text_of_a_record_becomes_markup() -> None:
    harmless, hostile = (
        _read(arrange((name, one) for one in _full(name, _provenance(name))))
        for name in ("p" * len(HOSTILE), HOSTILE)
    )
    assert hostile.tags == harmless.tags
    assert {tag for tag, _ in hostile.tags}.isdisjoint({"script", "iframe", "object", "link", "form", "base"})
    assert not any(name.startswith("on") or name == "style" for _, names in hostile.tags for name in names)
    assert any(HOSTILE in words for words in hostile.words)


def test_nothing_comes_from_elsewhere() -> None:
    text = page(arrange(("f", one) for one in pair()))
    read = _read(arrange(("f", one) for one in pair()))
    assert "default-src 'none'" in text and "http-equiv" in text
    assert not re.search(r"url\(|@import|https?:|//", text.replace("<!doctype html>", ""))
    assert ("script", ()) not in read.tags


def test_machines_have_a_section_each_with_four_ledgers() -> None:
    report = arrange(
        (name, one) for name, made_on in (("a", H200), ("b", MAC)) for one in pair(provenance=made_on)
    )
    text = page(report)
    first, second = text.split('<section id="m2"')
    assert re.findall(r"</span>(\w+)</h3>", second) == ["Throughput", "Operations", "Correctness", "Memory"]
    assert (
        "Apple" not in first.partition('<section id="m1"')[2]
        and "H200" not in second.partition("Side by side")[0]
    )
    assert "Side by side" in second and "No test is made across machines" in second


def test_one_machine_has_nothing_beside_it() -> None:
    assert "Side by side" not in page(arrange(("f", one) for one in [*pair(), *pair("other")]))


def test_kinds_of_work_are_not_put_side_by_side() -> None:
    less = [made("sdxl-30", "fp8", samples(1.0), MAC, work="less work")]
    report = arrange(("f", one) for one in [*pair(), *less])
    assert "Side by side" not in page(report)
    beside = page(arrange(("f", one) for one in [*pair(), *pair(provenance=MAC), *less])).partition(
        "Side by side"
    )[2]
    assert "fp8" not in beside and beside.count("<figure>") == 2


def test_channels_are_kept_apart() -> None:
    nightly = {**H200, "torch_channel": "nightly"}
    text = page(arrange(("f", one) for one in [*pair(), *pair(provenance=nightly)]))
    assert text.count("PyTorch release") == text.count("PyTorch nightly") == 1
    assert len(re.findall("<caption>Time of one call</caption>", text)) == 2
    assert "Side by side" not in text


def test_losses_refusals_and_doubts_are_as_plain_as_wins() -> None:
    lie = made("s", "liar", None, throughput={"samples_s": [2.0, 2.0], "p50_s": 1.0})
    records = [*pair(), *pair("other", factor=1.3), made("s", "x", None, refused="no graph"), lie]
    text = page(arrange(("f", one) for one in records))
    assert text.count('class="verdict faster"') == text.count('class="verdict slower"') == 1
    assert "no graph" in text and "its samples give 2.000" in text
    assert "agrees with its raw data" in page(arrange(("f", one) for one in pair()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    image = np.full((8, 8, 3), 100, np.uint8)
    for name, value in (("clearway", 103), ("diffusers", 100)):
        image[2, 2] = value
        Image.fromarray(image).save(tmp_path / f"sdxl-30--{name}.png")
    return tmp_path


def _shown(provenance: dict[str, Any]) -> list[Record]:
    correctness = {"reference": "diffusers", "verified": True}
    return [dataclasses.replace(one, correctness=correctness) for one in pair(provenance=provenance)]


def test_pictures_stand_beside_their_reference(folder: Path) -> None:
    read = _read(arrange(("f", one) for one in _shown(H200)), pictures=pictures(folder))
    assert [tag for tag, _ in read.tags].count("img") == 3
    words = [words for words in read.words if "PSNR" in words and "largest" in words]
    assert words == ["difference × 8: largest 3 of 255, PSNR 56.7 dB"]


@pytest.mark.parametrize("other", [MAC, {**H200, "torch_channel": "nightly"}, H200])
def test_pictures_that_several_could_have_drawn_are_not_shown(folder: Path, other: dict[str, Any]) -> None:
    report = arrange((name, one) for name, made_on in (("a", H200), ("b", other)) for one in _shown(made_on))
    assert "<img" not in page(report, pictures(folder))


def test_pictures_in_a_folder_of_the_machine_are_its_own(folder: Path) -> None:
    report = arrange((name, one) for name, made_on in (("a", H200), ("b", MAC)) for one in _shown(made_on))
    (folder / "apple-m1").mkdir()
    for file in folder.glob("*.png"):
        file.rename(folder / "apple-m1" / file.name)
    assert page(report, pictures(folder)).partition('id="m2"')[2].count("<img") == 3


def test_pictures_without_their_reference_stand_alone(folder: Path) -> None:
    (folder / "sdxl-30--diffusers.png").unlink()
    text = page(arrange(("f", one) for one in _shown(H200)), pictures(folder))
    assert text.count("<img") == 1 and "without their reference" in text


def test_odd_references_verdicts_and_stages_stop_nothing(folder: Path) -> None:
    records = _shown(H200)
    odd = dataclasses.replace(
        records[1],
        correctness={"reference": ["a"], "verified": True},
        comparisons=[records[1].comparisons[0] | {"verdict": ["faster"], "floor": -1000.0}],
        throughput={**(records[1].throughput or {}), "stages_ms": {"a": 1e308, "b": 1e308, "c": 2.0}},
    )
    text = page(arrange(("f", one) for one in (records[0], odd)), pictures(folder))
    assert "<img" in text and "nan" not in text and "c: 2.000 ms, 100 %" in text


LEDGERS = (
    "provenance",
    "intended",
    "throughput",
    "operations",
    "correctness",
    "memory",
    "routes",
    "comparisons",
)
ODD = (None, True, -1, 0, 5e-324, 1e308, 10**400, "x", [], {}, [None, 1], [[]], {"x": {}})


def _spoilt(value: Any, at: int, odd: Any) -> tuple[Any, int]:
    """The value with its `at`-th part, counted depth first, replaced by `odd`; and how many parts it has."""
    if at == 0:
        return odd, 1
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    made, parts = {}, 1
    for key, item in items:
        made[key], inner = _spoilt(item, at - parts, odd) if at - parts >= 0 else (item, 1)
        parts += inner
    return (made if isinstance(value, dict) else list(made.values())) if items else value, parts


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.sampled_from(sorted(LEDGERS)), st.integers(0, 30), st.sampled_from(ODD))
def test_no_odd_value_stops_a_report(index: int, field: str, at: int, odd: Any) -> None:
    records = _full("x", _provenance("x"))
    sound = getattr(records[index], field)
    spoilt = _spoilt(sound, at, odd)[0]
    if isinstance(spoilt, type(sound)):  # else `record.read` refuses it
        records[index] = dataclasses.replace(records[index], **{field: spoilt})
    report = arrange(("f", record) for record in records)
    page(report)
    markdown(report)
    json.dumps(as_json(report), allow_nan=False)
