"""Checkpoints as models, and what a model does: network -> denoiser, latents -> pixels.

Light to import: torch comes with the denoiser and the VAE, diffusers and transformers with the first load.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clearway.models.family import FAMILIES, Family, TextEncoder
from clearway.models.library import Entry, available, embedded_problem, find
from clearway.models.load import load
from clearway.models.model import Model
from clearway.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from clearway.models.denoiser import UNetDenoiser
    from clearway.models.vae import decode

_HOMES = {"UNetDenoiser": "clearway.models.denoiser", "decode": "clearway.models.vae"}

__all__ = [
    "FAMILIES",
    "Entry",
    "Family",
    "Model",
    "TextEncoder",
    "Tokenizer",
    "UNetDenoiser",
    "available",
    "decode",
    "embedded_problem",
    "find",
    "load",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'clearway.models' has no attribute {name!r}")
