"""The benchmark of convolutions: its plumbing, on this CPU with small shapes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
from ops import interpreted
import convolution_on_device
interpreted.repair_interpreter()
convolution_on_device.main()
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_contender_runs_and_each_line_is_written(tmp_path: Path) -> None:
    output = tmp_path / "convolution.jsonl"
    command = [sys.executable, "-c", RUN, "--device", "cpu", "--small", "--rounds", "2"]
    path = os.pathsep.join(str(ROOT / name) for name in ("src", "tests", "bench"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, *lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [first, *lines] == [json.loads(line) for line in done.stdout.splitlines()]
    assert first["provenance"]["kind"] == "cpu" and first["source"]
    cases = [line for line in lines if "us" in line]
    assert len(cases) == 2 and "seconds" in lines[-1]
    for line in cases:
        assert line["failed"] == {}
        assert {"conv2d", "default", "product of columns"} <= line["us"].keys()
        assert any(name.startswith("last") for name in line["us"])
        assert all(value > 0 for value in line["us"].values())
        assert all(error < 2 for error in line["times_its_error"].values())
