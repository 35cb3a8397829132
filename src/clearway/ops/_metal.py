"""Metal through torch.mps.compile_shader: one library a `.metal` file, compiled when it is first needed.

A dispatch goes into the encoder PyTorch has open, with no commit and no wait. Source: PyTorch's
OperationUtils.mm and torch/mps/__init__.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from clearway import device
from clearway.errors import one_line
from clearway.ops._metal_launch import Kernels
from clearway.ops.state import BuildError

HERE = Path(__file__).parent
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def absent() -> str | None:
    """Why this machine cannot run Metal kernels; None where it can."""
    reason = device.absent("mps")
    if reason is None and not hasattr(torch.mps, "compile_shader"):
        return f"torch {torch.__version__} has no torch.mps.compile_shader"
    return reason


@functools.cache
def library(stem: str) -> Any:
    """The kernels of `<stem>.metal`, each looked up once; BuildError with Apple's text where it fails."""
    try:
        return Kernels(torch.mps.compile_shader((HERE / f"{stem}.metal").read_text(encoding="ascii")))
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{stem}.metal could not be read ({one_line(error)})") from error
    except (SyntaxError, RuntimeError) as error:  # SyntaxError carries Apple's diagnostics in all its lines
        text = " ".join(str(error).split())
        raise BuildError(f"Metal could not build {stem}.metal ({text[:500]})") from error
