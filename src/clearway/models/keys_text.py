"""Text encoders of the original layouts as transformers' CLIP models: CLIP's own keys, and OpenCLIP's.

Targets are named as published files name them ("text_model.…"); build.py takes the prefix off where the
installed transformers has none (CLIPTextModel since 5).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from clearway.models.keys import Layout, Shapes, Source, count, dims, inverse, rename

if TYPE_CHECKING:
    from torch import Tensor

END_TOKEN = 49407
OPEN_CLIP_LAYER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
OPEN_CLIP_OUTSIDE = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
LAYERS = "text_model.encoder.layers."
FUSED = re.compile(r"self_attn\.[qkv]_proj\.")


def canonical(name: str) -> str:
    """A name as published files have it: with the prefix that old ldm files and transformers 5 lack."""
    plain = name.startswith(("embeddings.", "encoder.", "final_layer_norm."))
    return f"text_model.{name}" if plain else name


def clip_layout(shapes: Shapes, overrides: dict[str, Any]) -> Layout:
    """Config and sources of a CLIP text encoder (quick_gelu) whose tensors have these shapes."""
    sources = {canonical(name): Source(name) for name in shapes if not name.endswith("position_ids")}
    known = {target: shapes[source.key] for target, source in sources.items()}
    old = bool(shapes) and not any(name.startswith("text_model.") for name in shapes)

    def original(target: str) -> str:
        return canonical(target).removeprefix("text_model.") if old else canonical(target)

    return Layout(_config(known, "quick_gelu", original) | overrides, sources, original)


def open_clip_layout(
    shapes: Shapes, overrides: dict[str, Any], *, projected: bool, last_layer: bool
) -> Layout:
    """Config and sources of an OpenCLIP text encoder (gelu).

    `projected`: with its projection of the end token (stored transposed). Without `last_layer` the last layer
    is left out: SD 2.x reads the one before it, and Diffusers folders of it do not have it either.
    """
    layers = count(shapes, "transformer.resblocks.") - (not last_layer)
    sources: dict[str, Source] = {}
    for name in shapes:
        if name in OPEN_CLIP_OUTSIDE:
            sources[OPEN_CLIP_OUTSIDE[name]] = Source(name)
        elif name.startswith("transformer.resblocks."):
            index, _, rest = name.removeprefix("transformer.resblocks.").partition(".")
            if not index.isdecimal() or int(index) >= layers:
                continue
            new = f"{LAYERS}{index}"
            if rest in ("attn.in_proj_weight", "attn.in_proj_bias"):
                kind = rest.rpartition("_")[2]
                for third, letter in enumerate("qkv"):
                    sources[f"{new}.self_attn.{letter}_proj.{kind}"] = Source(name, _third(third))
            else:
                sources[f"{new}.{rename(rest, OPEN_CLIP_LAYER)}"] = Source(name)
        elif projected and name == "text_projection":
            sources["text_projection.weight"] = Source(name, _transposed)
        elif projected and name == "text_projection.weight":
            sources["text_projection.weight"] = Source(name)
    known = {target: shapes[source.key] for target, source in sources.items() if not FUSED.search(target)}
    config = _config(known, "gelu", _open_clip_name)
    if projected:
        upright = "text_projection.weight" in shapes
        width = dims(shapes, "text_projection.weight" if upright else "text_projection", 2)
        config["projection_dim"] = width[0 if upright else 1]
    return Layout(config | overrides, sources, _open_clip_name)


def _open_clip_name(target: str) -> str:
    """OpenCLIP's name for a tensor of transformers' CLIP model."""
    target = canonical(target)
    if target == "text_projection.weight":
        return "text_projection"
    if not target.startswith(LAYERS):
        return inverse(OPEN_CLIP_OUTSIDE).get(target, target)
    index, _, rest = target.removeprefix(LAYERS).partition(".")
    if FUSED.match(rest):
        rest = f"attn.in_proj_{rest.rpartition('.')[2]}"
    return f"transformer.resblocks.{index}.{rename(rest, inverse(OPEN_CLIP_LAYER))}"


def _config(known: Shapes, activation: str, original: Callable[[str], str]) -> dict[str, Any]:
    """The config of an encoder whose tensors, by published names, have these shapes."""

    def shape(target: str) -> tuple[int, ...]:
        try:
            return dims(known, target, 2)
        except (KeyError, IndexError) as error:
            raise type(error)(original(target)) from error

    vocabulary, width = shape("text_model.embeddings.token_embedding.weight")
    layers = count(known, LAYERS)
    if layers == 0:
        raise KeyError(original(f"{LAYERS}0.layer_norm1.weight"))
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shape(f"{LAYERS}0.mlp.fc1.weight")[0],
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // 64),
        "max_position_embeddings": shape("text_model.embeddings.position_embedding.weight")[0],
        "projection_dim": width,
        "hidden_act": activation,
        "bos_token_id": END_TOKEN - 1,
        "eos_token_id": END_TOKEN,
        "pad_token_id": END_TOKEN,
    }


def _third(number: int) -> Callable[[Tensor], Tensor]:
    """Takes query (0), key (1) or value (2) out of a fused projection."""

    def turn(fused: Tensor) -> Tensor:
        if fused.ndim == 0 or fused.shape[0] % 3:
            return fused
        rows = fused.shape[0] // 3
        return fused[number * rows : (number + 1) * rows]

    return turn


def _transposed(weight: Tensor) -> Tensor:
    return weight.t() if weight.ndim == 2 else weight
