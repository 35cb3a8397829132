"""The table of pictures under a cap: what each record shows, and what it does not."""

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GIB = 2**30
LINE: dict[str, Any] = {
    "case": "sdxl-random, 8 GiB",
    "size": "1024x1024",
    "steps": 8,
    "cap_bytes": 8 * GIB,
    "loaded_on": "device",
    "plan": {
        "text": "visiting",
        "unet": "visiting",
        "vae": "resident",
        "graphs": [],
        "joined": True,
        "tiled": False,
    },
    "memory_loading": {},
    "memory": {"allocator_peak_bytes": 6 * GIB},
    "outside_allocator_bytes": GIB,
    "process_peak_bytes": 7.5 * GIB,
    "capped_first_s": 9.0,
    "capped_s": [3.0, 3.5],
    "resident_s": [7.0, 0.3, 0.4],
    "psnr_db": None,
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "commit": "0123456789abcdef",
    "date": "2026-11-30T08:27:18Z",
}


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "docs_memory", raising=False)
    import docs_memory

    return docs_memory


def test_a_process_that_was_capped_from_its_start(docs: ModuleType) -> None:
    told = docs.table([LINE])
    assert "| 7.50 GiB | yes | 9.00 | 3.25 | 0.35 | the same |" in told
    assert "text visiting, unet visiting, vae resident; no graphs |" in told
    assert "capped from its start" in told and "of 8 steps" in told and "commit 0123456789," in told


def test_what_self_tests_took_beside_it_counts(docs: ModuleType) -> None:
    whens = ("loading", "first", "later")
    peaks = {"device_peak_bytes": dict(zip(whens, (7 * GIB, 7.75 * GIB, 7 * GIB), strict=True))}
    line = {**LINE, **peaks, **{f"{when}_within_cap": True for when in whens}}
    told = docs.table([line])
    assert "| 7.50 GiB, 7.75 GiB with self-tests | yes | 9.00 |" in told and "whole device" in told
    assert "| **no** |" in docs.table([{**line, "first_within_cap": False}])
    assert "whole device" not in docs.table([{**LINE, "device_peak_bytes": None}])


def test_one_that_had_held_more_before_shows_later_pictures_alone(docs: ModuleType) -> None:
    line = {**LINE, "process_peak_bytes": 9 * GIB}
    assert "| 9.00 GiB | **no** |" in docs.table([line])
    del line["memory_loading"]
    told = docs.table([line])
    assert "| 7.00 GiB (9.00 GiB) | later ones |" in told and "is not shown" in told
    assert "is not shown" in docs.table([LINE, line])


def test_how_it_was_drawn(docs: ModuleType) -> None:
    line = copy.deepcopy(LINE) | {"loaded_on": "host", "psnr_db": 46.25}
    line["plan"] |= {"unet": "streamed", "graphs": ["unet", "vae"], "joined": False, "tiled": True}
    *_, psnr, how = docs.row(line)
    assert psnr == "46.2 dB"
    assert how == (
        "text visiting, unet streamed, vae resident, by tiles, guidance's halves one by one;"
        " graphs of unet and vae, loaded on the host"
    )


def test_nothing_where_there_is_no_record(
    docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    assert docs.memory_block() == ""
