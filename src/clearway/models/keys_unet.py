"""The original UNet layout (ldm, sgm: input_blocks, …) as a Diffusers UNet2DConditionModel.

The layout is read from the keys: input_blocks are numbered through all levels, each level `layers` residual
blocks (with or without attention) and, but for the last, one downsampler; output_blocks run back through the
levels with one block more in each, the upsampler sitting inside the last of a level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clearway.models.family import SDXL, Family
from clearway.models.keys import Layout, Shapes, Source, count, rename, swap

RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
OUTSIDE = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
    "middle_block.0": "mid_block.resnets.0",
    "middle_block.1": "mid_block.attentions.0",
    "middle_block.2": "mid_block.resnets.1",
}


@dataclass(frozen=True, slots=True)
class _Level:
    """A resolution of the UNet: channels, residual blocks, transformer blocks in each attention (0: none)."""

    channels: int
    layers: int
    depth: int


def layout(shapes: Shapes, family: Family, pooled_width: int | None, overrides: dict[str, Any]) -> Layout:
    """Config and sources of a UNet whose tensors (prefix taken off) have these shapes.

    `pooled_width` is the pooled text embedding's, for SDXL. KeyError names a tensor that must be there;
    ValueError says why a network cannot be a UNet2DConditionModel.
    """
    blocks = dict(OUTSIDE)
    levels = _levels(shapes, blocks)
    _output_blocks(levels, blocks)
    sources: dict[str, Source] = {}
    for name in shapes:
        found = swap(name, blocks, 4)
        if found is None:
            continue
        block, rest = found
        new = rename(rest, RESNET) if ".resnets." in block else rest
        sources[f"{block}.{new}"] = Source(name)
    return Layout(_config(shapes, levels, family, pooled_width) | overrides, sources)


def _levels(shapes: Shapes, blocks: dict[str, str]) -> list[_Level]:
    """The levels as input_blocks tells them; notes in `blocks` what each block becomes."""
    levels: list[_Level] = []
    run: list[tuple[int, int]] = []  # (channels, depth) of the level's residual blocks so far
    number = 1
    while True:
        old, level = f"input_blocks.{number}", len(levels)
        if f"{old}.0.in_layers.2.weight" in shapes:
            depth = count(shapes, f"{old}.1.transformer_blocks.{{}}.norm1.weight")
            blocks[f"{old}.0"] = f"down_blocks.{level}.resnets.{len(run)}"
            blocks[f"{old}.1"] = f"down_blocks.{level}.attentions.{len(run)}"
            run.append((shapes[f"{old}.0.in_layers.2.weight"][0], depth))
        elif run:
            if len(set(run)) != 1:
                raise ValueError(f"the blocks of UNet level {level} differ in width or attention")
            levels.append(_Level(run[0][0], len(run), run[0][1]))
            run = []
            if f"{old}.0.op.weight" not in shapes:
                break
            blocks[f"{old}.0.op"] = f"down_blocks.{level}.downsamplers.0.conv"
        else:
            break
        number += 1
    if not levels:
        raise KeyError("input_blocks.1.0.in_layers.2.weight")
    if len({level.layers for level in levels}) != 1:
        raise ValueError("the UNet's levels differ in their number of blocks")
    return levels


def _output_blocks(levels: list[_Level], blocks: dict[str, str]) -> None:
    number = 0
    for index, level in enumerate(reversed(levels)):
        for layer in range(level.layers + 1):
            old, new = f"output_blocks.{number}", f"up_blocks.{index}"
            blocks[f"{old}.0"] = f"{new}.resnets.{layer}"
            if level.depth:
                blocks[f"{old}.1"] = f"{new}.attentions.{layer}"
            if layer == level.layers:
                blocks[f"{old}.{2 if level.depth else 1}.conv"] = f"{new}.upsamplers.0.conv"
            number += 1


def _config(shapes: Shapes, levels: list[_Level], family: Family, pooled_width: int | None) -> dict[str, Any]:
    depths = [level.depth or 1 for level in levels]
    middle = count(shapes, "middle_block.1.transformer_blocks.{}.norm1.weight")
    if middle == 0:
        raise KeyError("middle_block.1.transformer_blocks.0.norm1.weight")
    if levels[-1].depth not in (0, middle):
        raise ValueError("the UNet's middle block is not as deep as its last level")
    depths[-1] = middle
    attention = "middle_block.1"
    down = ["CrossAttnDownBlock2D" if level.depth else "DownBlock2D" for level in levels]
    heads = [family.heads_for(level.channels) for level in levels]
    config: dict[str, Any] = {
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": shapes["out.2.weight"][0],
        "block_out_channels": tuple(level.channels for level in levels),
        "layers_per_block": levels[0].layers,
        "down_block_types": tuple(down),
        "up_block_types": tuple(
            name.replace("Down", "Up") for name in reversed(down)
        ),  # CrossAttnUpBlock2D, UpBlock2D
        "transformer_layers_per_block": tuple(depths),
        # Diffusers' name for the number of heads (its documentation says why); one number where all are
        # alike.
        "attention_head_dim": heads[0] if len(set(heads)) == 1 else tuple(heads),
        "cross_attention_dim": shapes[f"{attention}.transformer_blocks.0.attn2.to_k.weight"][1],
        "use_linear_projection": len(shapes[f"{attention}.proj_in.weight"]) == 2,
        "norm_num_groups": 32,
    }
    if family is SDXL:
        width = shapes["label_emb.0.0.weight"][1]
        if pooled_width is None or (width - pooled_width) % 6 or width <= pooled_width:
            raise ValueError(
                f"label_emb takes {width} values, which six sizes beside the text do not make up"
            )
        config |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": (width - pooled_width) // 6,
            "projection_class_embeddings_input_dim": width,
        }
    elif "label_emb.0.0.weight" in shapes:
        raise ValueError("its UNet has a label embedding, which only SDXL has")
    return config
