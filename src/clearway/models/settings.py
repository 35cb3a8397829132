"""What a part's settings may be, whether config.json or a file's metadata gives them.

Both are written by strangers. What the classes would build without end, or accept and fail on in the middle
of a generation, is refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clearway.errors import RequestError
from clearway.models.keys import MAX_BLOCKS

MAX_SIDE_PX = 16384


def _count(value: Any) -> bool:
    return type(value) is int and value > 0


def _counts(value: Any) -> bool:
    """A count, or a list of counts, one a level."""
    return _count(value) or (_list(value) and all(_counts(item) for item in value))


def _list(value: Any) -> bool:
    return isinstance(value, list | tuple) and 0 < len(value) <= MAX_BLOCKS


def _widths(value: Any) -> bool:
    return _list(value) and all(_count(item) for item in value)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # false for NaN too


def _above_zero(value: Any) -> bool:
    return _number(value) and float(value) > 0


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _side(value: Any) -> bool:
    sides = value if isinstance(value, list | tuple) and len(value) == 2 else [value]
    return all(_count(side) and 8 * side <= MAX_SIDE_PX for side in sides)


def _or_none(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or rule(value)


Rules = Mapping[str, Callable[[Any], bool]]
UNET: Rules = {
    "attention_head_dim": _or_none(_counts),
    "num_attention_heads": _or_none(_counts),
    "norm_num_groups": _count,
    "norm_eps": _above_zero,
    "block_out_channels": _widths,
    "layers_per_block": _counts,
    "transformer_layers_per_block": _counts,
    "reverse_transformer_layers_per_block": _or_none(_counts),
    "cross_attention_dim": _counts,
    "sample_size": _or_none(_side),
    "out_channels": _count,
    "freq_shift": _number,
    "downsample_padding": lambda value: type(value) is int and value in (0, 1),
    "mid_block_scale_factor": _above_zero,
    "resnet_out_scale_factor": _above_zero,
    "dropout": _number,
    "addition_time_embed_dim": _or_none(_count),
    "projection_class_embeddings_input_dim": _or_none(_count),
}
VAE: Rules = {
    "norm_num_groups": _count,
    "block_out_channels": _widths,
    "layers_per_block": _count,
    "latent_channels": _count,
    "out_channels": _count,
    "scaling_factor": _above_zero,
    "shift_factor": _or_none(_number),
}
TEXT: Rules = {
    "vocab_size": _count,
    "hidden_size": _count,
    "intermediate_size": _count,
    "projection_dim": _count,
    "num_hidden_layers": _count,
    "num_attention_heads": _count,
    "max_position_embeddings": _count,
    "layer_norm_eps": _above_zero,
    "hidden_act": lambda value: isinstance(value, str),
    "bos_token_id": _or_none(_whole),
    "eos_token_id": _whole,
    "pad_token_id": _or_none(_whole),
}
RULES = {"unet": UNET, "vae": VAE, "text_encoder": TEXT, "text_encoder_2": TEXT}


def check(part: str, values: Mapping[str, Any], where: str) -> None:
    """RequestError where a setting of `part` ("unet", …) cannot be used; `where` says who gives it."""
    for key, rule in RULES[part].items():
        if key in values and not rule(values[key]):
            raise RequestError(f"{where} gives {key} as {values[key]!r:.60}, which cannot be used")


def check_blocks(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """RequestError where a checked config describes more blocks than `tensors` tensors can fill.

    Building takes time by the block, whatever the weights hold.
    """
    levels = len(config.get("block_out_channels", (1,)))
    keys = ("layers_per_block", "num_hidden_layers")
    layers = max((_largest(config[key]) for key in keys if key in config), default=1)
    keys = ("transformer_layers_per_block", "reverse_transformer_layers_per_block")
    depth = max((_largest(config[key]) for key in keys if config.get(key) is not None), default=1)
    blocks = levels * layers * depth
    if blocks > min(tensors, MAX_BLOCKS):
        raise RequestError(
            f"{where} describes {blocks if blocks < 10**12 else 'endless'} blocks, which its weights "
            f"({tensors} tensors) do not hold"
        )


def _largest(value: Any) -> int:
    return max(map(_largest, value)) if isinstance(value, list | tuple) else int(value)


def side_px(sample_size: Any) -> tuple[int, int] | None:
    """(width, height) in pixels of a UNet's own size; None where its config says neither side nor both."""
    if sample_size is None:
        return None
    height, width = sample_size if isinstance(sample_size, list | tuple) else (sample_size, sample_size)
    return 8 * width, 8 * height
