"""The parts of a checkpoint -> Model, whatever they were read from: do they fit each other?

Each part may be sound by itself; what would only be found in the middle of a generation is found here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearway.device import Device
from clearway.errors import RequestError
from clearway.models.card import title_of
from clearway.models.escape import escaped
from clearway.models.family import Family
from clearway.models.model import Model
from clearway.models.prediction import Training
from clearway.models.tokenizer import Tokenizer
from clearway.types import Defaults, Precision

if TYPE_CHECKING:
    from torch import Tensor

WINDOW = 77  # tokens that a text encoder is given at once
FACTOR = 8  # pixels a latent's side stands for
PICTURE_CHANNELS = 3


def assemble(
    *,
    name: str,
    path: Path,
    weights_files: tuple[Path, ...],
    family: Family,
    training: Training,
    sigmas: Tensor,
    tokenizers: tuple[Tokenizer, ...],
    text_encoders: tuple[Any, ...],
    unet: Any,
    vae: Any,
    card: Mapping[str, Any],
    defaults: Defaults,
    device: Device,
    precision: Precision,
    notes: tuple[str, ...],
) -> Model:
    """The model made of these parts; RequestError, saying which two do not fit, where they do not."""
    for sentence in _misfits(family, tokenizers, text_encoders, unet.config, vae.config):
        raise RequestError(f"{name}: {sentence}")
    return Model(
        name=escaped(name),
        title=escaped(title_of(card, name)),
        path=path,
        weights_files=weights_files,
        family=family,
        prediction=training.prediction,
        zero_terminal_snr=training.zero_terminal_snr,
        sigmas=sigmas,
        tokenizers=tokenizers,
        text_encoders=text_encoders,
        unet=unet,
        vae=vae,
        latent_scale=float(vae.config.scaling_factor),
        latent_shift=float(vae.config.shift_factor or 0.0),
        defaults=defaults,
        device=device,
        precision=precision,
        notes=tuple(map(escaped, notes)),
    )


def _misfits(
    family: Family, tokenizers: tuple[Tokenizer, ...], encoders: tuple[Any, ...], unet: Any, vae: Any
) -> list[str]:
    """What does not fit, as sentences; the first is said."""
    found = []
    for tokenizer, encoder in zip(tokenizers, encoders, strict=True):
        config = encoder.config
        if config.vocab_size < tokenizer.size:
            found.append(
                f"its text encoder knows {config.vocab_size} tokens, and its tokenizer gives {tokenizer.size}"
            )
        if config.max_position_embeddings < WINDOW:
            found.append(
                f"its text encoder reads {config.max_position_embeddings} tokens at once, and prompts come "
                f"in windows of {WINDOW}"
            )
    widths = [encoder.config.hidden_size for encoder in encoders]
    wanted = unet.cross_attention_dim
    if any(width != sum(widths) for width in (wanted if isinstance(wanted, list | tuple) else [wanted])):
        given = " + ".join(map(str, widths))
        found.append(f"its text encoder gives {given} values a token, and its UNet reads {wanted!s:.60}")
    if family.text_encoders[-1].pooled:
        found += _pooled_misfits(encoders[-1].config, unet)
    if (unet.in_channels, unet.out_channels) != (family.latent_channels,) * 2:
        found.append(
            f"its UNet has {unet.in_channels} input and {unet.out_channels} output channels, and "
            f"{family.label} has {family.latent_channels}"
        )
    if (vae.latent_channels, vae.out_channels) != (family.latent_channels, PICTURE_CHANNELS):
        found.append(
            f"its VAE makes {vae.out_channels} channels of {vae.latent_channels}, and {family.label} has "
            f"{PICTURE_CHANNELS} and {family.latent_channels}"
        )
    factor = 2 ** (len(vae.block_out_channels) - 1)
    if factor != FACTOR:
        found.append(f"its VAE makes {factor} pixels of a latent's side, and {family.label} has {FACTOR}")
    return found


def _pooled_misfits(config: Any, unet: Any) -> list[str]:
    """What does not fit between the pooled text and the UNet's added embedding of text and six sizes."""
    given = config.projection_dim + 6 * (unet.addition_time_embed_dim or 0)
    if unet.projection_class_embeddings_input_dim != given:
        return [
            f"its text encoder's projection ({config.projection_dim}) and six sizes give {given} values, and "
            f"its UNet reads {unet.projection_class_embeddings_input_dim}"
        ]
    return []
