"""Modules from configs and weights: made without memory (meta), then given their tensors one by one.

So a module never exists twice, no random weights are drawn, and every tensor is converted and moved as it is
read.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearway.device import Device, dtype, is_out_of_memory, release_memory
from clearway.errors import RequestError, UnavailableError
from clearway.models.escape import shown
from clearway.models.keys import Source
from clearway.models.weights import Weights

if TYPE_CHECKING:
    import torch

FEW = 3
TEXT_SETTINGS = (  # what makes a CLIP text encoder; the rest of its config.json is not for strangers to say
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "projection_dim",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "layer_norm_eps",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@dataclass(frozen=True, slots=True)
class Classes:
    """The module classes, imported late because they cost seconds."""

    unet: Any
    vae: Any
    text: Any
    text_projected: Any
    text_config: Any


@functools.cache
def classes() -> Classes:
    """The module classes, imported on the first call.

    The collector is off meanwhile: it visits the half million objects that these imports create again and
    again (2.95 s with it, 2.3 s without; 2-core x86 VM, torch 2.13, diffusers 0.42, transformers 5.24,
    2026-11-29).
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
        from transformers.models.clip.configuration_clip import CLIPTextConfig
        from transformers.models.clip.modeling_clip import CLIPTextModel, CLIPTextModelWithProjection
    finally:
        if collecting:
            gc.enable()
    return Classes(
        UNet2DConditionModel, AutoencoderKL, CLIPTextModel, CLIPTextModelWithProjection, CLIPTextConfig
    )


def diffusers_module(cls: Any, config: Mapping[str, Any], what: str) -> torch.nn.Module:
    """An empty (meta) module of a Diffusers class; `what` names it in errors ("x.safetensors: the UNet")."""
    plain = {key: value for key, value in config.items() if not key.startswith("_")}
    return _empty(lambda: cls.from_config(plain), what)


def text_module(config: Mapping[str, Any], projected: bool, what: str) -> torch.nn.Module:
    """An empty (meta) CLIP text encoder."""
    plain = {key: config[key] for key in TEXT_SETTINGS if key in config}
    known = classes()
    return _empty(
        lambda: (known.text_projected if projected else known.text)(known.text_config(**plain)), what
    )


def _empty(make: Any, what: str) -> torch.nn.Module:
    import torch

    try:
        with torch.device("meta"):
            module: torch.nn.Module = make()
    except Exception as error:  # a foreign constructor's complaint about values that come from a file
        sentence = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"{what} cannot be built from its description: {sentence[:200]}") from error
    return module


def fill(
    module: torch.nn.Module,
    sources: Mapping[str, Source],
    weights: Weights,
    *,
    device: Device,
    dtype_name: str,
    what: str,
    optional: tuple[str, ...] = (),
    original: Callable[[str], str] = str,
) -> tuple[str, ...]:
    """Gives `module` its tensors, converted to the dtype and moved to the device; returns notes.

    `sources` are by published names. Missing tensors are a RequestError, but for those whose names begin with
    one of `optional`: they become zeros, with a note. `original` gives the file's names for them. A shape
    that does not fit is a RequestError, memory that runs out an UnavailableError. The module ends in eval
    mode and without gradients.
    """
    import torch

    wanted, aligned, missing = _matched(module, sources, what, optional, original)
    target = dtype(dtype_name)
    filled: dict[str, torch.Tensor] = {}
    with guard(what, device):
        for name in missing:
            filled[name] = torch.zeros(wanted[name].shape, dtype=target, device=str(device))
        known = [name for name in wanted if name in aligned]
        for name in sorted(known, key=lambda name: weights.order(aligned[name].key)):
            source = aligned[name]
            value = weights.read(source.key)
            if not value.is_floating_point():
                raise RequestError(
                    f"{what}: {shown(source.key)} holds {value.dtype} numbers; quantized files are not "
                    "supported"
                )
            value = source.turn(value) if source.turn else value
            if value.shape != wanted[name].shape:
                raise RequestError(
                    f"{what}: {shown(source.key)} has the shape {tuple(value.shape)}, and "
                    f"{tuple(wanted[name].shape)} would fit"
                )
            filled[name] = (
                value.detach()
                .to(device=str(device), dtype=target, copy=weights.shared or source.turn is not None)
                .contiguous(memory_format=torch.contiguous_format)
            )
        module.load_state_dict(filled, strict=True, assign=True)
        _buffers(module, device)
    module.eval().requires_grad_(False)
    if not missing:
        return ()
    names = listed([original(name) for name in missing])
    return (f"{what} lacks {names}; zeros stand for them, so pictures cannot be encoded with it.",)


def _matched(
    module: torch.nn.Module,
    sources: Mapping[str, Source],
    what: str,
    optional: tuple[str, ...],
    original: Callable[[str], str],
) -> tuple[dict[str, torch.Tensor], dict[str, Source], list[str]]:
    """The module's tensors, the sources by their names, and the optional ones that are missing."""
    wanted = dict(module.state_dict(keep_vars=True))
    plain = not any(name.startswith("text_model.") for name in wanted)
    aligned = {
        (name.removeprefix("text_model.") if plain else name): source for name, source in sources.items()
    }
    missing = [name for name in wanted if name not in aligned]
    fatal = {original(name) for name in missing if not name.startswith(optional or ("\0",))}
    if fatal:
        raise RequestError(
            f"{what} is incomplete: {listed(fatal)} {'is' if len(fatal) == 1 else 'are'} missing"
        )
    return wanted, aligned, missing


def _buffers(module: torch.nn.Module, device: Device) -> None:
    """Replaces the buffers that no file holds (CLIP's position ids) and that are still on meta."""
    import torch

    for name, buffer in list(module.named_buffers()):
        if not buffer.is_meta:
            continue
        owner = module.get_submodule(name.rpartition(".")[0])
        if not name.endswith("position_ids"):
            raise RuntimeError(f"{type(owner).__name__} has the buffer {name}, whose content is not known")
        ids = torch.arange(buffer.shape[-1], device=str(device)).expand(buffer.shape)
        owner.register_buffer("position_ids", ids, persistent=False)


@contextlib.contextmanager
def guard(what: str, device: Device) -> Iterator[None]:
    """Turns "out of memory" within it into an UnavailableError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        release_memory(device)
        raise UnavailableError(
            f"{what} does not fit into the memory of {device}; a smaller model, --dtype float16 or "
            "closing other programs would help"
        ) from error


def listed(names: Collection[str]) -> str:
    """ "3 tensors (a, b, c)" with the first few names."""
    few = ", ".join(shown(name) for name in sorted(names)[:FEW])
    return f"{len(names)} tensor{'s' * (len(names) != 1)} ({few}{', …' if len(names) > FEW else ''})"
