"""A VAE's decoder in two precisions: its parts, the casts between them, and the way back to float32.

Parts of an up block are its residual blocks and its upsampler, since where activations grow too large for
half precision it is the sum that residual blocks hand on, from one of them to where a convolution takes it.
Every cast looks at the part's own weights at each call, so whatever becomes of these (`vae.float()`), what
runs fits together. Source of the order of parts: diffusers 0.36 to 0.42.1, models/autoencoders/vae.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearway.models._bound import Cast, occupied, own, plain_weight
from clearway.models._joined import kind_of
from clearway.models.model import dtype_of
from clearway.ops.state import dtype_name
from clearway.types import MIXED

_ORIGINALS = "_clearway_originals"


class Originals:
    """Weights as they were read, on the host, by name: those that half precision does not give back."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: Any) -> Originals:  # nobody writes to what it holds
        made = Originals()
        made.held |= self.held
        return made


def parts(vae: Any) -> dict[str, tuple[nn.Module, ...]]:
    """What may have a precision of its own, in the order of a decode, by names within the decoder."""
    decoder, found = vae.decoder, dict[str, tuple[nn.Module, ...]]()
    if vae.post_quant_conv is not None:
        found["post_quant_conv"] = (vae.post_quant_conv,)
    found["conv_in"] = (decoder.conv_in,)
    found["mid_block"] = (decoder.mid_block,)
    for number, block in enumerate(decoder.up_blocks):
        for name, module in _steps(block):
            found[f"up_blocks.{number}.{name}"] = (module,)
    found["conv_out"] = (decoder.conv_norm_out, decoder.conv_act, decoder.conv_out)
    return found


def refuse(vae: Any) -> str | None:
    """Why this VAE's decoder cannot be run in two precisions."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.autoencoders.vae import Decoder
    from diffusers.models.unets.unet_2d_blocks import UpDecoderBlock2D

    if type(vae) is not AutoencoderKL or type(vae.decoder) is not Decoder:
        return f"it is a {type(vae).__name__}"
    if not all(type(block) is UpDecoderBlock2D for block in vae.decoder.up_blocks):
        return "its decoder has other blocks than UpDecoderBlock2D"
    for module, _ in _casting(vae):
        reason = None if isinstance(vars(module).get("forward"), Cast) else occupied(module)
        if reason is not None:
            return f"{reason} at its {type(module).__name__}"
    if not all(map(plain_weight, vae.parameters())):
        return "its weights are quantised or of a class of their own"
    return None


def place(vae: Any, half: Sequence[str], dtype: torch.dtype) -> None:
    """Puts the parts named in `half` in `dtype` and all else of the VAE in float32, with casts in between.

    What was in half precision before is float32 again as it was read; without parts nothing is in place.
    """
    whole(vae)
    if not half:
        return
    every, originals = parts(vae), Originals()
    names = {id(parameter): name for name, parameter in vae.named_parameters()}
    for part in half:
        for parameter in _parameters(every[part]):
            with kind_of(parameter):
                low = parameter.data.to(dtype)
                if not torch.equal(low.float(), parameter.data):
                    originals.held[names[id(parameter)]] = parameter.data.cpu()
                parameter.data = low
    vars(vae)[_ORIGINALS] = originals
    for module, run in _casting(vae):
        module.forward = Cast(run, module)


def whole(vae: Any) -> None:
    """Makes all of a VAE float32, with the weights that were read where those in half precision are still
    these, rounded; takes away the casts."""
    originals = vars(vae).pop(_ORIGINALS, None) or Originals()
    for name, parameter in vae.named_parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            read = originals.held.get(name)
            with kind_of(parameter):
                raised = parameter.data.float()
                if read is not None and torch.equal(read.to(parameter.dtype), parameter.data.cpu()):
                    raised.copy_(read)
                parameter.data = raised
    vae.float()
    for module, _ in _casting(vae) if getattr(vae, "decoder", None) is not None else ():
        if isinstance(vars(module).get("forward"), Cast):
            del module.forward


def halves(vae: Any) -> tuple[str, ...]:
    """The names of the parts that are in another precision than the VAE's encoder, in order."""
    if not isinstance(vars(getattr(vae, "decoder", vae)).get("forward"), Cast):
        return ()
    usual = dtype_of(vae)
    return tuple(name for name, modules in parts(vae).items() if _dtype(modules) != usual)


def precision_of(vae: Any) -> str:
    """What a VAE decodes in as it is now: a dtype by torch's name, or "mixed"."""
    return MIXED if halves(vae) else dtype_name(dtype_of(vae))


def lacking_bytes(vae: Any) -> int:
    """How many bytes more its weights will have if it has to be all float32."""
    half = halves(vae)
    if not half:
        return 0
    every = parts(vae)
    lacking = (one for name in half for one in _parameters(every[name]))
    return sum(one.numel() * (4 - one.element_size()) for one in lacking)


def sentence(vae: Any) -> str:
    """Which parts a mixed VAE decodes in which precision."""
    half = halves(vae)
    low = dtype_name(_dtype(parts(vae)[half[0]]))
    rest = [name for name in parts(vae) if name not in half]
    where = f"{', '.join(rest)} in float32, the rest in {low}" if rest else f"all of its decoder in {low}"
    return f"the VAE decoded in mixed precision: {where}"


def _parameters(modules: tuple[nn.Module, ...]) -> Iterator[nn.Parameter]:
    return (parameter for module in modules for parameter in module.parameters())


def _dtype(modules: tuple[nn.Module, ...]) -> torch.dtype:
    return next(_parameters(modules)).dtype


def _steps(block: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of what an up block calls one after the other."""
    for kind in ("resnets", "upsamplers"):
        for number, module in enumerate(getattr(block, kind) or ()):
            yield f"{kind}.{number}", module


def _casting(vae: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """(module, what runs in place of its forward) where casts are."""
    if vae.post_quant_conv is not None:
        yield vae.post_quant_conv, _one
    yield vae.decoder, _decoder
    for block in vae.decoder.up_blocks:
        yield block, _up


def _as(x: Tensor, module: nn.Module) -> Tensor:
    """x in the dtype of what is to take it. Nobody should hold the x that it was meanwhile."""
    return x.to(dtype_of(module))


def _one(module: nn.Module, x: Tensor) -> Any:
    return own(module, _as(x, module))


def _decoder(decoder: Any, sample: Tensor, latent_embeds: Tensor | None = None) -> Any:
    if latent_embeds is not None:  # no AutoencoderKL gives any
        return own(decoder, sample, latent_embeds)
    for module in (decoder.conv_in, decoder.mid_block, *decoder.up_blocks, decoder.conv_norm_out):
        sample = _as(sample, module)  # here, since during the call it is held here
        sample = module(sample)
    return decoder.conv_out(decoder.conv_act(sample))


def _up(block: Any, hidden_states: Tensor, temb: Tensor | None = None) -> Any:
    for name, module in _steps(block):
        hidden_states = _as(hidden_states, module)
        more = (temb,) if name.startswith("resnets") else ()
        hidden_states = module(hidden_states, *more)
    return hidden_states
