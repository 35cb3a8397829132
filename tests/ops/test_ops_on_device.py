"""The benchmark of ops on a device: its plumbing, on this CPU with small shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ops.registry import NAMES

ROOT = Path(__file__).parents[2]


def test_one_command_checks_and_times(tmp_path: Path) -> None:
    output = tmp_path / "ops.jsonl"
    command = [sys.executable, str(ROOT / "bench" / "ops_on_device.py"), "--device", "cpu", "--small"]
    command += ["--no-compile", "--rounds", "2", "--dtype", "float32", "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert lines == [json.loads(line) for line in done.stdout.splitlines()]
    assert {"identity", "device", "commit", "date"} <= set(lines[0])
    assert "seconds" in lines[-1]
    timed = [line for line in lines if "p50_ms" in line]
    assert {line["op"] for line in timed} == set(NAMES)
    for line in timed:
        assert 0 < line["p20_ms"] <= line["p50_ms"] <= line["p80_ms"]
        assert line["verified"] in (True, "not checked")
    assert [line for line in lines if line.get("problem") or line.get("failed")] == []
