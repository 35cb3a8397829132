"""Text encoders of the original layouts as transformers' CLIP models: CLIP's own keys, and OpenCLIP's.

Targets are named as published files name them ("text_model.…"); build.py takes the prefix off where the
installed transformers has none (CLIPTextModel since 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from clearway.models.keys import Layout, Shapes, Source, count, rename

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


def canonical(name: str) -> str:
    """A name as published files have it: with the prefix that old ldm files and transformers 5 lack."""
    plain = name.startswith(("embeddings.", "encoder.", "final_layer_norm."))
    return f"text_model.{name}" if plain else name


def clip_layout(shapes: Shapes, overrides: dict[str, Any]) -> Layout:
    """Config and sources of a CLIP text encoder (quick_gelu) whose tensors have these shapes."""
    sources = {canonical(name): Source(name) for name in shapes if not name.endswith("position_ids")}
    known = {target: shapes[source.key] for target, source in sources.items()}
    return Layout(_config(known, "quick_gelu") | overrides, sources)


def open_clip_layout(
    shapes: Shapes, overrides: dict[str, Any], *, projected: bool, last_layer: bool
) -> Layout:
    """Config and sources of an OpenCLIP text encoder (gelu).

    `projected`: with its projection of the end token (stored transposed). Without `last_layer` the last layer
    is left out: SD 2.x reads the one before it, and Diffusers folders of it do not have it either.
    """
    layers = count(shapes, "transformer.resblocks.{}.ln_1.weight") - (not last_layer)
    sources: dict[str, Source] = {}
    for name in shapes:
        if name in OPEN_CLIP_OUTSIDE:
            sources[OPEN_CLIP_OUTSIDE[name]] = Source(name)
        elif name.startswith("transformer.resblocks."):
            index, _, rest = name.removeprefix("transformer.resblocks.").partition(".")
            if not index.isdecimal() or int(index) >= layers:
                continue
            new = f"text_model.encoder.layers.{index}"
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
    known = {
        target: shapes[source.key] for target, source in sources.items() if "self_attn.q_proj" not in target
    }
    config = _config(known, "gelu")
    if projected:
        width = shapes.get("text_projection.weight") or tuple(reversed(shapes["text_projection"]))
        config["projection_dim"] = width[0]
    return Layout(config | overrides, sources)


def _config(known: Shapes, activation: str) -> dict[str, Any]:
    vocabulary, width = known["text_model.embeddings.token_embedding.weight"]
    layers = count(known, "text_model.encoder.layers.{}.layer_norm1.weight")
    if layers == 0:
        raise KeyError("text_model.encoder.layers.0.layer_norm1.weight")
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": known["text_model.encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // 64),
        "max_position_embeddings": known["text_model.embeddings.position_embedding.weight"][0],
        "projection_dim": width,
        "hidden_act": activation,
        "bos_token_id": END_TOKEN - 1,
        "eos_token_id": END_TOKEN,
        "pad_token_id": END_TOKEN,
    }


def _third(number: int) -> Callable[[Tensor], Tensor]:
    """Takes query (0), key (1) or value (2) out of a fused projection."""
    return lambda fused: fused.chunk(3, 0)[number]


def _transposed(weight: Tensor) -> Tensor:
    return weight.t()
