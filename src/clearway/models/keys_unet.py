"""The original UNet layout (ldm, sgm: input_blocks, …) as a Diffusers UNet2DConditionModel.

The layout is read from the keys: input_blocks are numbered through all levels, each level `layers` residual
blocks (with or without attention) and, but for the last, one downsampler; output_blocks run back through the
levels with one block more in each, the upsampler sitting inside the last of a level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clearway.models.family import SDXL, Family
from clearway.models.keys import Layout, Shapes, Source, count, dims, grouped, has, inverse, rename, swap

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

    `pooled_width` is the pooled text embedding's, for SDXL. KeyError names a tensor or block that must be
    there, IndexError one of a wrong rank; ValueError says why a network cannot be a UNet2DConditionModel.
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
    backwards = inverse(blocks)

    def original(target: str) -> str:
        found = swap(target, backwards, 5)
        if found is None:
            return target
        rest = rename(found[1], inverse(RESNET)) if ".resnets." in target else found[1]
        return f"{found[0]}.{rest}"

    return Layout(_config(shapes, levels, family, pooled_width) | overrides, sources, original)


def _levels(shapes: Shapes, blocks: dict[str, str]) -> list[_Level]:
    """The levels as input_blocks tells them; notes in `blocks` what each block becomes.

    A block is there where any of its tensors is, so that one that lacks some is found incomplete and not
    taken for the end of the network.
    """
    levels: list[_Level] = []
    run: list[tuple[int, int]] = []  # (channels, depth) of the level's residual blocks so far
    held = grouped(shapes, 2)
    for number in range(1, count(shapes, "input_blocks.")):
        old, level = f"input_blocks.{number}", len(levels)
        if has(held[old], f"{old}.0.op."):
            levels.append(_level(run, level))
            run = []
            blocks[f"{old}.0.op"] = f"down_blocks.{level}.downsamplers.0.conv"
            continue
        blocks[f"{old}.0"] = f"down_blocks.{level}.resnets.{len(run)}"
        blocks[f"{old}.1"] = f"down_blocks.{level}.attentions.{len(run)}"
        run.append((dims(shapes, f"{old}.0.in_layers.2.weight", 4)[0], _depth(held[old], f"{old}.1")))
    if not levels and not run:
        raise KeyError("input_blocks.1.0.in_layers.2.weight")
    levels.append(_level(run, len(levels)))
    if len({level.layers for level in levels}) != 1:
        raise ValueError("the UNet's levels differ in their number of blocks")
    return levels


def _level(run: list[tuple[int, int]], number: int) -> _Level:
    if len(set(run)) != 1:
        what = "differ in width or attention" if run else "are missing"
        raise ValueError(f"the blocks of UNet level {number} {what}")
    return _Level(run[0][0], len(run), run[0][1])


def _depth(shapes: Shapes, attention: str) -> int:
    """How many transformer blocks an attention has; 0 where there is no attention."""
    depth = count(shapes, f"{attention}.transformer_blocks.")
    if depth == 0 and has(shapes, f"{attention}."):
        raise KeyError(f"{attention}.transformer_blocks.0")
    return depth


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
    middle = _depth(shapes, "middle_block.1")
    if middle == 0:
        raise KeyError("middle_block.1")
    if levels[-1].depth not in (0, middle):
        raise ValueError("the UNet's middle block is not as deep as its last level")
    depths[-1] = middle
    attention = "middle_block.1"
    down = ["CrossAttnDownBlock2D" if level.depth else "DownBlock2D" for level in levels]
    heads = [family.heads_for(level.channels) for level in levels]
    config: dict[str, Any] = {
        "in_channels": dims(shapes, "input_blocks.0.0.weight", 4)[1],
        "out_channels": dims(shapes, "out.2.weight", 4)[0],
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
        "cross_attention_dim": dims(shapes, f"{attention}.transformer_blocks.0.attn2.to_k.weight", 2)[1],
        "use_linear_projection": len(dims(shapes, f"{attention}.proj_in.weight", 2, 4)) == 2,
        "norm_num_groups": 32,
    }
    if family is SDXL:
        width = dims(shapes, "label_emb.0.0.weight", 2)[1]
        if pooled_width is None or (width - pooled_width) % 6 or width <= pooled_width:
            raise ValueError(
                f"label_emb takes {width} values, which six sizes beside the text do not make up"
            )
        config |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": (width - pooled_width) // 6,
            "projection_class_embeddings_input_dim": width,
        }
    elif has(shapes, "label_emb."):
        raise ValueError("its UNet has a label embedding, which only SDXL has")
    return config
