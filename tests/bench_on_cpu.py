"""A benchmark's script run as a person runs it, on this CPU with small shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def lines_of(script: str, folder: Path) -> list[dict[str, Any]]:
    """The lines that bench/`script` wrote into its file, which are those it printed; the first says where."""
    output = folder / "lines.jsonl"
    command = [sys.executable, str(ROOT / "bench" / script), "--device", "cpu", "--small"]
    command += ["--rounds", "2", "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert lines == [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["provenance"]["kind"] == "cpu" and lines[0]["source"]
    return lines
