"""VAE: latents -> pixels, one picture at a time so that the peak stays that of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearway.errors import UnavailableError
from clearway.models import _mixed, _mixed_choice
from clearway.models.model import Model, dtype_of
from clearway.models.tiles import LABEL, decode_tiled, is_tiled
from clearway.types import MIXED


@dataclass(frozen=True, slots=True)
class Decoded:
    """`pixels` (B, 3, 8h, 8w), float32, in -1..1; for each picture the dtype its VAE computed in, by torch's
    name or "mixed", and its tiles ("64/16", None where it was decoded whole). `notes` say what was not as
    planned, and what mixed was."""

    pixels: Tensor
    dtypes: tuple[str, ...]
    tiles: tuple[str | None, ...]
    notes: tuple[str, ...] = ()


def _never(element_size: int) -> bool:
    return False


@torch.inference_mode()
def decode(
    model: Model,
    latents: Tensor,
    run: Callable[..., Any] | None = None,
    tiled: Callable[[int], bool] = _never,
) -> Decoded:
    """The pictures of latents (B, C, h, w).

    `tiled(element_size)` says whether to decode by tiles in numbers of that many bytes. A picture that half
    precision, or mixed, gives NaN or infinity in is decoded again in float32, in which the VAE then stays:
    another class of precision, which `dtypes` and a note tell. A mixed VAE is measured with the first of the
    pictures, where nothing is known of its weights. Raises UnavailableError where the latents themselves are
    not finite, or float32 does not help.
    """
    call = run or model.vae.decode
    scaled = torch.split(latents.float() / model.latent_scale + model.latent_shift, 1)
    notes = list[str]()
    if model.precision.vae == MIXED:
        notes += _mixed_choice.settle(
            model, scaled[0], lambda row: _decode(model, row, model.vae.decode, tiled)[0]
        )
    made = [_decode(model, row, call, tiled) for row in scaled]
    # the latents too are looked at here, since the device would idle while the host waits for that first
    sampled, *good = _finite([latents, *(pixels for pixels, _ in made)])
    if not sampled:
        if model.precision.unet == model.precision.sampling == "float32":
            raise UnavailableError(
                "sampling ended in NaN or infinity in float32; the weights are damaged or a sampler option "
                "is too large, so smaller eta, s_noise, s_churn, sigma_max or cfg_scale may work"
            )
        raise UnavailableError(
            f"sampling ended in NaN or infinity (UNet in {model.precision.unet}, latents in "
            f"{model.precision.sampling}); dtype float32 (or bfloat16) may work"
        )
    before = _mixed.precision_of(model.vae)
    dtypes = [before] * len(made)
    broken = [index for index, whole in enumerate(good) if not whole]
    if before == MIXED and len(broken) < len(made):
        notes.append(_mixed.sentence(model.vae))
    if broken and before == "float32":
        raise UnavailableError(
            "the VAE returned NaN in float32; its weights are damaged, use another VAE or checkpoint"
        )
    if broken:
        _mixed_choice.give_up(model)
        for index in broken:
            made[index] = _decode(model, scaled[index], call, tiled)
            dtypes[index] = "float32"
        if not all(_finite([made[index][0] for index in broken])):
            raise UnavailableError("the VAE returned NaN even in float32; use another VAE or checkpoint")
        notes.append(_raised(before, broken, made))
    return Decoded(
        torch.cat([pixels for pixels, _ in made]),
        tuple(dtypes),
        tuple(used for _, used in made),
        tuple(notes),
    )


def _raised(before: str, broken: list[int], made: list[tuple[Tensor, str | None]]) -> str:
    """What a change of precision says of itself."""
    which = "" if len(broken) == len(made) == 1 else f" in {len(broken)} of {len(made)} pictures"
    by_tiles = f", by tiles ({LABEL})" if made[broken[0]][1] else ""
    what = "these" if len(broken) > 1 else "that one" if which else "it"
    again = f"{what} ran again in float32{by_tiles}, where it stays"
    what = "mixed precision" if before == MIXED else before
    return f"the VAE returned NaN in {what}{which}: {again}"


def _decode(
    model: Model, row: Tensor, call: Callable[..., Any], tiled: Callable[[int], bool]
) -> tuple[Tensor, str | None]:
    """One picture, and its tiles."""
    dtype = dtype_of(model.vae)

    def whole(part: Tensor) -> Tensor:
        pixels: Tensor = call(part.to(dtype), return_dict=False)[0]
        return pixels.float()

    if is_tiled(*row.shape[2:]) and tiled(dtype.itemsize):
        return decode_tiled(whole, row, model.latent_factor), LABEL
    return whole(row), None


def _finite(tensors: list[Tensor]) -> list[bool]:
    """Whether each holds finite numbers alone; one wait for the device."""
    found: list[bool] = torch.stack([torch.isfinite(one).all() for one in tensors]).tolist()
    return found
