"""The benchmark of products: its plumbing, on this CPU with small shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_product_runs_and_each_line_is_written(tmp_path: Path) -> None:
    output = tmp_path / "products.jsonl"
    command = [sys.executable, str(ROOT / "bench" / "products_on_device.py"), "--device", "cpu", "--small"]
    command += ["--rounds", "2", "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, *lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [first, *lines] == [json.loads(line) for line in done.stdout.splitlines()]
    assert first["provenance"]["kind"] == "cpu" and first["source"]
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
