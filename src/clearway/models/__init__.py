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
    from clearway.models.placement import plan as place
    from clearway.models.vae import Decoded, decode

_HOMES = {
    "Decoded": ("clearway.models.vae", "Decoded"),
    "UNetDenoiser": ("clearway.models.denoiser", "UNetDenoiser"),
    "decode": ("clearway.models.vae", "decode"),
    "place": ("clearway.models.placement", "plan"),
}

__all__ = [
    "FAMILIES",
    "Decoded",
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
    "place",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home, own = _HOMES[name]
        return getattr(importlib.import_module(home), own)
    raise AttributeError(f"module 'clearway.models' has no attribute {name!r}")
