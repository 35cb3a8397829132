"""What a first picture's networks will launch, begun to be built before it is known what they are given.

Their kernels are built one network after the other, when each is first called: the VAE's when the picture is
done but for it. Where another process builds (ops/elsewhere.py), which is where nothing was built before, the
UNet and the VAE's decoder are run beforehand with nothing of ours launched, on zeros of the shapes they will
be given; what else a first run makes ready of PyTorch's libraries is ready then too. Nothing of it is kept.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from clearway import device as machine
from clearway.device import Device
from clearway.execution.eager import heard
from clearway.execution.fingerprint import moves
from clearway.execution.kept import Frame, within
from clearway.models._bound import own
from clearway.ops import ahead, elsewhere

KIND = "cuda"
TOKENS = 77
ROOM_BYTES = 2**19
"""Of the device's memory that must be free, for each of a latent's points: twice what a VAE takes in half
precision, which is more than a UNet does."""


_seen: weakref.WeakSet[Any] = weakref.WeakSet()


def begin(unet: Any, vae: Any, height: int, width: int, rows: int = 2) -> int:
    """Begins to build what a UNet called with `rows` latents of `height` x `width`, and a VAE's decoder with
    one of them, launch; how many kernels that is. Once for a UNet; 0 where nothing builds them but this
    process, where a network is not one that this knows how to call, or is moved about or listened to, and
    where memory is short."""
    if elsewhere.builder() is None:
        return 0
    try:
        if unet in _seen or type(vae) is not _classes()[1] or moves(vars(vae)):
            return 0
        if not all(map(_plain, (unet, vae.decoder))):
            return 0
        return _begun(unet, vae, height, width, rows)
    except Exception as error:  # the picture itself will meet it, if it is more than this run's
        if machine.is_out_of_memory(error):
            machine.release_memory(_of(unet))
        return 0


def _begun(unet: Any, vae: Any, height: int, width: int, rows: int) -> int:
    device = _of(unet)
    if device.index is not None and device.index != torch.cuda.current_device():
        return 0
    given = _inputs(unet, height, width, rows)
    if given is None or machine.memory(device).available_bytes < ROOM_BYTES * rows / 2 * height * width:
        return 0
    _seen.add(unet)
    context, call = given
    dtype = next(vae.parameters()).dtype
    latents = torch.zeros((1, vae.config.latent_channels, height, width), device=str(device), dtype=dtype)

    def run() -> None:
        with within(Frame((context,))) as frame:
            own(unet, **call)
            frame.gather()
        with within(Frame(())):
            own(vae.decoder, latents)

    with torch.no_grad():
        return ahead.begin(run)


def _of(part: nn.Module) -> Device:
    place = next(part.parameters()).device
    return Device(place.type, place.index)


def _classes() -> tuple[Any, Any]:
    """Of a UNet and of a VAE, as this knows how to call them."""
    from diffusers import AutoencoderKL, UNet2DConditionModel

    return UNet2DConditionModel, AutoencoderKL


def _plain(part: Any) -> bool:
    """Whether it is a network on a CUDA device with nobody about it who would hear of this."""
    if not isinstance(part, nn.Module) or heard(part) or moves(vars(part)):
        return False
    return all(one.device.type == KIND for one in part.parameters())


def _inputs(unet: Any, height: int, width: int, rows: int) -> tuple[torch.Tensor, dict[str, Any]] | None:
    """Words as `unet` reads them, and all its arguments, in zeros; None of one that takes more than these."""
    if type(unet) is not _classes()[0]:
        return None
    more = ("encoder_hid_dim_type", "class_embed_type", "time_cond_proj_dim")
    added = getattr(unet.config, "addition_embed_type", None)
    if any(getattr(unet.config, name, None) for name in more) or added not in (None, "text_time"):
        return None
    first = next(unet.parameters())

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros((rows, *shape), device=first.device, dtype=first.dtype)

    context = zeros(TOKENS, unet.config.cross_attention_dim)
    conditions = {}
    if added == "text_time":
        sizes = 6
        pooled = unet.add_embedding.linear_1.in_features - sizes * unet.config.addition_time_embed_dim
        conditions = {"text_embeds": zeros(pooled), "time_ids": zeros(sizes)}
    return context, {
        "sample": zeros(unet.config.in_channels, height, width),
        "timestep": torch.zeros(rows, device=first.device),
        "encoder_hidden_states": context,
        "added_cond_kwargs": conditions,
        "return_dict": False,
    }
