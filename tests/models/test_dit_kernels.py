"""What the kernels are given by Flux and SD 3: they take all of it, interpreted here, and on the device."""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from clearway.models.accelerate import accelerate, restore
from clearway.ops import contract
from dit_builders import inputs, tiny_flux, tiny_sd3, tiny_sd35

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_they_refuse_nothing_and_err_no_more_than_eager(tmp_path: Path) -> None:
    """Errors against float64; eager rounds after each of the steps that the kernels take in one."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "models.dit_interpreted"],
        capture_output=True,
        text=True,
        env={**os.environ, **settings, "TRITON_INTERPRET": "1"},
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 4 * 3 * 2
    for line in lines:
        assert not line["refused"] and line["taken"], line
        assert line["error"] <= 2 * line["eager_error"], line
        assert ("rope" in line["taken"]) == line["model"].startswith("flux")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("maker", [tiny_flux, tiny_sd3, tiny_sd35])
def test_on_the_device(maker: Any, batch: int, dtype: torch.dtype) -> None:
    model = maker().to("cuda", dtype)
    given = tree_map_only(Tensor, lambda x: x.cuda(), inputs(model, batch, 6, 8))
    routes: dict[str, int] = {}
    with torch.no_grad():
        eager = model(**given)[0]
        wide = tree_map_only(Tensor, lambda x: x.double(), given)
        exact = copy.deepcopy(model).double()(**wide)[0]
        report = accelerate(model)
        with contract.recording(routes):
            found = model(**given)[0]
        restore(model)
        assert torch.equal(model(**given)[0], eager)
    assert not report.left
    error, usual = ((one.double() - exact).abs().max().item() for one in (found, eager))
    assert error <= 2 * usual + 1e-5 * exact.abs().max().item()
    assert {route for route in routes if route.endswith("/reference")} == set()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("maker", [tiny_flux, tiny_sd3, tiny_sd35])
def test_captured_on_the_device(maker: Any) -> None:
    model = maker().to("cuda", torch.bfloat16)
    twin = copy.deepcopy(model)
    report = accelerate(model, executor="cuda_graph")
    accelerate(twin, executor="eager")
    for seed, size in enumerate(((1, 6, 8), (1, 6, 8), (2, 4, 4), (1, 6, 8))):
        given = tree_map_only(Tensor, lambda x: x.cuda(), inputs(model, *size, seed=seed))
        with torch.no_grad():
            found, expected = model(**given)[0], twin(**given)[0]
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    label = type(model).__name__
    assert report.ran[label].calls == {f"{label}/cuda_graph": 4} and not report.reasons()
