"""The tables that documentation takes from records under bench/results/."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from clearway.measure import record
from record_builders import MAC, pair

ROOT = Path(__file__).parents[2]


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_results", ROOT / "tools" / "docs_results.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_other_kinds_of_result_are_left_alone(docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "routing.jsonl").write_text('{"scenario": "routing", "n": 3}\n')
    (tmp_path / "empty.jsonl").write_text("")
    assert docs.record_files() == [] and docs.results_block() == docs.NOTHING
    assert docs.NOTHING in docs.results_page()


def test_records_become_tables(docs: ModuleType, tmp_path: Path) -> None:
    for one in [*pair(factor=1.2), *pair("other")]:
        record.append(tmp_path / "nvidia-h200" / "whole.jsonl", one)
    for one in pair(provenance=MAC):
        record.append(tmp_path / "apple-m1" / "whole.jsonl", one)
    block, page = docs.results_block(), docs.results_page()
    assert "| slower |" in block and block.count("| faster |") == 2
    assert block.index("Apple M1") < block.index("H200")
    assert page.startswith("# Results\n") and "From apple-m1/whole.jsonl, nvidia-h200/whole.jsonl." in page
    assert str(tmp_path) not in page + block
