"""Tiny VAEs of the real class for mixed precision, weights seeded; the CPU's float16 stands for a GPU's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clearway.device import Device
from clearway.models import _mixed_choice, vae
from clearway.types import Precision

LATENTS = torch.randn(2, 4, 2, 2, generator=torch.Generator().manual_seed(0))
EVERY = (
    "post_quant_conv",
    "conv_in",
    "mid_block",
    *(
        f"up_blocks.{block}.{name}"
        for block in range(3)
        for name in ("resnets.0", "resnets.1", "upsamplers.0")
    ),
    "up_blocks.3.resnets.0",
    "up_blocks.3.resnets.1",
    "conv_out",
)
"""The parts of a decoder of four levels with one layer each, in order."""


@pytest.fixture
def half_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed precision on the CPU too, as if nothing had been measured in this process."""
    monkeypatch.setitem(_mixed_choice.HALF, "cpu", "float16")
    _mixed_choice.forget()


def tiny_vae(seed: int = 0) -> Any:
    """One whose activations stay small, weights that float16 does not hold exactly."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    torch.manual_seed(seed)
    made: Any = AutoencoderKL(
        block_out_channels=(16, 16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
    )
    return made.eval().requires_grad_(False)


def overflowing(block: int, factor: float = 1e6, seed: int = 0) -> Any:
    """One whose up block hands on values `factor` times as large from its last residual block to its
    upsampler, which takes them back."""
    made = tiny_vae(seed)
    up = made.decoder.up_blocks[block]
    up.resnets[-1].conv2.weight *= factor
    up.upsamplers[0].conv.weight /= factor
    return made


def model(module: Any, precision: str = "mixed", kind: str = "cpu") -> Any:
    """What `decode` reads of a model."""
    return SimpleNamespace(
        vae=module,
        latent_scale=1.0,
        latent_shift=0.0,
        latent_factor=8,
        device=Device(kind),
        precision=Precision(vae=precision),
    )


def decoded(module: Any, latents: torch.Tensor = LATENTS[:1], **more: Any) -> vae.Decoded:
    """Pictures by a VAE whose precision is mixed."""
    return vae.decode(model(module), latents, **more)


def psnr(one: torch.Tensor, other: torch.Tensor) -> float:
    """In dB, of a range of -1..1."""
    off = (one.clamp(-1, 1) - other.clamp(-1, 1)).double()
    return float(10 * torch.log10(4 / off.square().mean()))
