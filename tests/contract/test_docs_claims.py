"""The table of claims in the README, from records under bench/results/<machine>/claims/."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from clearway.measure import record
from record_builders import pair

ROOT = Path(__file__).parents[2]


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_claims", ROOT / "tools" / "docs_claims.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_without_records_there_is_nothing(docs: ModuleType, tmp_path: Path) -> None:
    record.append(tmp_path / "nvidia-h200" / "other.jsonl", pair()[0])
    assert docs.claims_block() == ""


def test_every_contender_has_a_row_beside_the_others(docs: ModuleType, tmp_path: Path) -> None:
    records = pair(factor=1.2)
    record.replace(tmp_path / "nvidia-h200" / "claims" / "one.jsonl", records)
    rows = cells(docs.claims_block())
    assert [row[1] for row in rows] == [one.contender for one in records]
    assert rows[0][0] == records[0].scenario and rows[1][0] == ""
    slower = next(row for row in rows if row[1] != "diffusers")
    assert slower[4].startswith("1.") and "–" in slower[4] and not slower[4].startswith("[")


def test_what_is_refused_has_no_row_and_no_difference_stands_in_brackets(
    docs: ModuleType, tmp_path: Path
) -> None:
    records = pair(factor=1.0)
    file = tmp_path / "nvidia-h200" / "claims" / "one.jsonl"
    record.replace(file, records)
    ours = next(row for row in cells(docs.claims_block()) if row[1] != "diffusers")
    assert ours[4].startswith("[") and ours[4].endswith("]")
    record.replace(file, [dataclasses.replace(one, refused="cut off") for one in records])
    assert docs.claims_block() == ""


def cells(block: str) -> list[list[str]]:
    """The rows of the block's table below its heading."""
    lines = [line for line in block.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
