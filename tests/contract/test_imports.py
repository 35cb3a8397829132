"""Importing Clearway is light: in a fresh interpreter, so that this one's imports do not count."""

import subprocess
import sys

import pytest

LIGHT = {
    "clearway": ("torch", "numpy", "PIL", "diffusers", "transformers", "triton", "torchsde"),
    "clearway.cli.main": ("torch", "numpy", "PIL", "diffusers", "transformers", "triton", "torchsde"),
    "clearway.pipeline": ("diffusers", "transformers", "triton", "torchsde", "scipy"),
    "clearway.sampling": ("diffusers", "transformers", "triton", "torchsde", "scipy"),
}


@pytest.mark.parametrize("module", LIGHT)
def test_imports_stay_light(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {LIGHT[module]!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_no_device_is_started() -> None:
    code = "import clearway.pipeline, torch; print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
