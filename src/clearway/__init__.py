"""Clearway: fast diffusion image generation on the machine you already have.

    import clearway
    result = clearway.generate(clearway.Request(prompt="a red apple"))
    clearway.save(result, "apple.png")

Importing it is light: torch, diffusers and the rest load when something is first drawn.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clearway import sampling
    from clearway.errors import Cancelled, ClearwayError, RequestError, UnavailableError
    from clearway.image import read_metadata, save
    from clearway.models.accelerate import accelerate, restore
    from clearway.models.load import load
    from clearway.models.model import Model
    from clearway.pipeline import generate
    from clearway.request import Request
    from clearway.result import Result
    from clearway.types import Defaults, PicturesDone, Precision, StageDone, StepDone
    from clearway.warmup import warm_up

_HOMES = {
    "generate": "clearway.pipeline",
    "accelerate": "clearway.models.accelerate",
    "restore": "clearway.models.accelerate",
    "load": "clearway.models.load",
    "Model": "clearway.models.model",
    "Request": "clearway.request",
    "Result": "clearway.result",
    "warm_up": "clearway.warmup",
    "save": "clearway.image",
    "read_metadata": "clearway.image",
    "Precision": "clearway.types",
    "Defaults": "clearway.types",
    "StageDone": "clearway.types",
    "StepDone": "clearway.types",
    "PicturesDone": "clearway.types",
    "ClearwayError": "clearway.errors",
    "RequestError": "clearway.errors",
    "UnavailableError": "clearway.errors",
    "Cancelled": "clearway.errors",
}

__all__ = [
    "Cancelled",
    "ClearwayError",
    "Defaults",
    "Model",
    "PicturesDone",
    "Precision",
    "Request",
    "RequestError",
    "Result",
    "StageDone",
    "StepDone",
    "UnavailableError",
    "__version__",
    "accelerate",
    "generate",
    "load",
    "read_metadata",
    "restore",
    "sampling",
    "save",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name == "sampling":
        return importlib.import_module("clearway.sampling")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'clearway' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
