"""The original VAE layout (ldm's AutoencoderKL) as a Diffusers AutoencoderKL.

Differences besides names: the decoder counts its levels from the finest (Diffusers: from the coarsest), and
the middle attention's projections are 1 x 1 convolutions (Diffusers: linear layers).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clearway.models.keys import (
    Layout,
    Shapes,
    Source,
    count,
    dims,
    grouped,
    inverse,
    rename,
    swap,
    to_linear,
)

ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
DIFFUSERS_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def layout(shapes: Shapes, latent_scale: float, overrides: dict[str, Any]) -> Layout:
    """Config and sources of a VAE whose tensors have these shapes; errors as in keys_unet.

    The decoder tells the structure, since a file may lack the encoder. All VAEs of this layout have
    quant_conv and post_quant_conv, so a file without them is incomplete and not of another kind.
    """
    levels = count(shapes, "decoder.up.")
    if levels == 0:
        raise KeyError("decoder.up.0.block.0.conv1.weight")
    held = grouped(shapes, 3)
    layers = (
        max(count(held[f"decoder.up.{level}"], f"decoder.up.{level}.block.") for level in range(levels)) - 1
    )
    if layers < 1:
        raise KeyError("decoder.up.0.block.1")
    widths = tuple(dims(shapes, f"decoder.up.{level}.block.0.conv1.weight", 4)[0] for level in range(levels))
    blocks = {"quant_conv": "quant_conv", "post_quant_conv": "post_quant_conv"}
    for part, scale in (("encoder", "down"), ("decoder", "up")):
        blocks |= {
            f"{part}.conv_in": f"{part}.conv_in",
            f"{part}.norm_out": f"{part}.conv_norm_out",
            f"{part}.conv_out": f"{part}.conv_out",
            f"{part}.mid.block_1": f"{part}.mid_block.resnets.0",
            f"{part}.mid.attn_1": f"{part}.mid_block.attentions.0",
            f"{part}.mid.block_2": f"{part}.mid_block.resnets.1",
        }
        for level in range(levels):
            here = level if part == "encoder" else levels - 1 - level
            new = f"{part}.{scale}_blocks.{here}"
            blocks[f"{part}.{scale}.{level}.{scale}sample"] = f"{new}.{scale}samplers.0"
            for layer in range(layers + (part == "decoder")):
                blocks[f"{part}.{scale}.{level}.block.{layer}"] = f"{new}.resnets.{layer}"
    sources: dict[str, Source] = {}
    for name in shapes:
        found = swap(name, blocks, 5)
        if found is None:
            continue
        block, rest = found
        if block.endswith("attentions.0"):
            new = rename(rest, ATTENTION)
            turn = to_linear if new.endswith(".weight") and not new.startswith("group_norm") else None
            sources[f"{block}.{new}"] = Source(name, turn)
        else:
            sources[f"{block}.{rename(rest, {'nin_shortcut': 'conv_shortcut'})}"] = Source(name)
    config = {
        "in_channels": 3,
        "out_channels": dims(shapes, "decoder.conv_out.weight", 4)[0],
        "block_out_channels": widths,
        "layers_per_block": layers,
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "latent_channels": dims(shapes, "decoder.conv_in.weight", 4)[1],
        "norm_num_groups": 32,
        "scaling_factor": latent_scale,
        "use_quant_conv": True,
        "use_post_quant_conv": True,
    }
    backwards = inverse(blocks)

    def original(target: str) -> str:
        found = swap(target, backwards, 5)
        if found is None:
            return target
        table = inverse(ATTENTION) if ".attentions." in target else {"conv_shortcut": "nin_shortcut"}
        return f"{found[0]}.{rename(found[1], table)}"

    return Layout(config | overrides, sources, original)


def optional(names: Iterable[str]) -> tuple[str, ...]:
    """How the tensors begin that a VAE with these may lack: its encoder's, where that is left out whole."""
    return () if any(name.startswith("encoder.") for name in names) else ("encoder.", "quant_conv.")


def folder_source(name: str) -> tuple[str, Source]:
    """(today's name, source) of a tensor in a Diffusers VAE file: old ones name the attention otherwise."""
    head, mark, rest = name.partition(".attentions.0.")
    if not mark:
        return name, Source(name)
    new = rename(rest, DIFFUSERS_OLD_ATTENTION)
    turn = to_linear if new.endswith(".weight") and not new.startswith("group_norm") else None
    return f"{head}{mark}{new}", Source(name, turn)
