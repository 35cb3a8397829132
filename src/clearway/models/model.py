"""Model: a checkpoint loaded and ready, as every later stage is handed it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearway.device import Device
from clearway.models.family import Family, Prediction
from clearway.models.hashes import short_hash
from clearway.models.tokenizer import Tokenizer
from clearway.types import Choices, Defaults, Precision

if TYPE_CHECKING:
    from torch import Tensor, dtype


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A loaded checkpoint.

    `sigmas` are the training noise levels, ascending, float32 on the CPU; `text_encoders` and `tokenizers` go
    together in the family's order. Latents are (the VAE's own values - latent_shift) * latent_scale. `notes`
    are sentences about what was missing, surplus or left out. On CUDA it is drawn with as if the device had
    `memory_limit_bytes`, the process's context included.
    """

    name: str
    title: str
    path: Path
    weights_files: tuple[Path, ...]
    family: Family
    prediction: Prediction
    zero_terminal_snr: bool
    sigmas: Tensor
    tokenizers: tuple[Tokenizer, ...]
    text_encoders: tuple[Any, ...]
    unet: Any
    vae: Any
    latent_scale: float
    latent_shift: float
    defaults: Defaults
    device: Device
    precision: Precision
    notes: tuple[str, ...] = field(default=())
    choices: Choices = field(default_factory=Choices)
    memory_limit_bytes: int | None = None

    @functools.cached_property
    def hash(self) -> str:
        """The WebUI's "Model hash": of the file, for a folder of its UNet's; computed when asked for."""
        return short_hash(self.weights_files)

    @property
    def hash_is_known(self) -> bool:
        """Whether `hash` is there already."""
        return "hash" in vars(self)

    @property
    def dtype(self) -> dtype:
        """What the UNet computes in."""
        return dtype_of(self.unet)

    @property
    def latent_channels(self) -> int:
        """How many channels latents have."""
        channels: int = self.unet.config.in_channels
        return channels

    @property
    def latent_factor(self) -> int:
        """How many pixels a side of a latent stands for (8 in every supported family)."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))


def dtype_of(module: Any) -> dtype:
    """What a network computes in, by its first parameter.

    Diffusers' own property walks all its modules, which takes milliseconds.
    """
    found: dtype = next(module.parameters()).dtype
    return found
