"""VAE: latents -> pixels, one picture at a time so that the peak stays that of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearway.errors import UnavailableError
from clearway.models.model import Model


@torch.inference_mode()
def decode(model: Model, latents: Tensor, run: Callable[..., Any] | None = None) -> tuple[Tensor, str | None]:
    """Pixels (B, 3, 8h, 8w), float32, in -1..1, of latents (B, C, h, w); and a note if precision was raised.

    A half-precision VAE that gives NaN or infinity is moved to float32, for good, and runs again.
    Raises UnavailableError where the latents themselves are not finite, or float32 does not help.
    """
    if not torch.isfinite(latents).all():
        if model.precision.unet == model.precision.sampling == "float32":
            raise UnavailableError(
                "sampling ended in NaN or infinity in float32; the weights are damaged or a sampler option "
                "is too large, so smaller eta, s_noise, s_churn, sigma_max or cfg_scale may work"
            )
        raise UnavailableError(
            f"sampling ended in NaN or infinity (UNet in {model.precision.unet}, latents in "
            f"{model.precision.sampling}); dtype float32 (or bfloat16) may work"
        )
    pixels = _decode(model, latents, run)
    if torch.isfinite(pixels).all():
        return pixels, None
    before = model.vae.dtype
    if before == torch.float32:
        raise UnavailableError(
            "the VAE returned NaN in float32; its weights are damaged, use another VAE or checkpoint"
        )
    model.vae.to(torch.float32)
    pixels = _decode(model, latents, run)
    if not torch.isfinite(pixels).all():
        raise UnavailableError("the VAE returned NaN even in float32; use another VAE or checkpoint")
    return pixels, f"the VAE returned NaN in {str(before).removeprefix('torch.')} and ran again in float32"


def _decode(model: Model, latents: Tensor, run: Callable[..., Any] | None) -> Tensor:
    call = run or model.vae.decode
    scaled = latents.float() / model.latent_scale + model.latent_shift
    rows = [call(row.to(model.vae.dtype), return_dict=False)[0].float() for row in torch.split(scaled, 1)]
    return torch.cat(rows)
