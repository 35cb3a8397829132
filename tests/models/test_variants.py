"""Which kernels another size of a picture needs, of whole networks at their real widths."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MOST = {
    "sdxl": {"convolution_gluon._convolve": 4, "attention_tiled._forward": 1},
    "sd15": {
        "convolution_gluon._convolve": 7,
        "convolution_gluon._add": 3,
        "group_norm_silu_triton._group": 5,
        "group_norm_rows_triton._normalise": 4,
        "group_norm_rows_triton._sums": 1,
        "attention_tiled._forward": 2,
        "attention_gemm._softmax_rows": 1,
        "layer_norm._forward": 2,
        "geglu._forward": 1,
    },
}
"""By family, kernels that have variants by size, and how many of each one size may need more than another."""


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="needs diffusers")
@pytest.mark.parametrize("family", sorted(MOST))
def test_another_size_needs_few_kernels_and_all_are_told_beforehand(family: str, tmp_path: Path) -> None:
    lines = _lines(family, tmp_path)
    for line in lines:
        assert Counter(line["new"]) <= Counter(MOST[family]), line
        assert line["untold"] == [] and line["needless"] <= 1, line
        assert line["first"] != line["then"] or not line["new"]


def _lines(family: str, folder: Path) -> list[dict[str, Any]]:
    """In a process of its own, where tensors without storage pass for a GPU's."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "models.variants", family],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CLEARWAY_HOME": str(folder)},
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len({str(line["first"]) for line in lines}) ** 2 >= 49
    return lines
