"""The benchmark of products: its plumbing, on this CPU with small shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench_on_cpu import lines_of

ROOT = Path(__file__).parents[2]


def test_every_product_runs_and_each_line_is_written(tmp_path: Path) -> None:
    _, *lines = lines_of("products_on_device.py", tmp_path)
    cases = [line for line in lines if "us" in line]
    assert [line["case"] for line in cases] == ["16x32x24 bias", "8x16x32"] and "seconds" in lines[-1]
    for line in cases:
        assert line["failed"] == {} and line["us"]["linear"] > 0
        assert 0 < line["error_of_linear"] < 1e-3


def test_products_have_the_biases_that_the_unets_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import products_on_device as products

    found = products.used()
    assert (8192, 1920, 640, False) in found and (8192, 1920, 640, True) not in found  # packed QKV
    assert (2048, 10240, 1280, True) in found and (2048, 10240, 1280, False) not in found  # GEGLU
    assert {(8192, 640, 640, True), (8192, 640, 640, False)} <= set(found)  # proj_in, out; a query
