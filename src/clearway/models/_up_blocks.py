"""The blocks of a UNet's way up that are put in place: skip concatenation as an op.

Each takes what its class's forward takes and hands over to it where a gradient is needed or FreeU is on.
Source: diffusers 0.36 to 0.42.1, models/unets/unet_2d_blocks.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearway.models._bound import needs_gradient, own
from clearway.ops.skip_concat import skip_concat


def plain_up(
    block: Any,
    hidden_states: Tensor,
    res_hidden_states_tuple: tuple[Tensor, ...],
    temb: Tensor | None = None,
    upsample_size: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """UpBlock2D."""
    x, skips = hidden_states, res_hidden_states_tuple
    if args or kwargs or _hands_over(block, x):
        return own(block, x, skips, temb, upsample_size, *args, **kwargs)
    for resnet, skip in zip(block.resnets, reversed(skips), strict=False):
        x = resnet(skip_concat(x, skip), temb)
    return _upsampled(block, x, upsample_size)


def attention_up(
    block: Any,
    hidden_states: Tensor,
    res_hidden_states_tuple: tuple[Tensor, ...],
    temb: Tensor | None = None,
    encoder_hidden_states: Any = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    upsample_size: Any = None,
    attention_mask: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
) -> Any:
    """CrossAttnUpBlock2D."""
    x, skips = hidden_states, res_hidden_states_tuple
    given = {
        "encoder_hidden_states": encoder_hidden_states,
        "cross_attention_kwargs": cross_attention_kwargs,
        "attention_mask": attention_mask,
        "encoder_attention_mask": encoder_attention_mask,
    }
    if _hands_over(block, x) or (cross_attention_kwargs or {}).get("scale") is not None:
        return own(block, x, skips, temb, upsample_size=upsample_size, **given)
    for resnet, attention, skip in zip(block.resnets, block.attentions, reversed(skips), strict=False):
        x = resnet(skip_concat(x, skip), temb)
        x = attention(x, return_dict=False, **given)[0]
    return _upsampled(block, x, upsample_size)


def _hands_over(block: Any, x: Tensor) -> bool:
    freed = all(getattr(block, name, None) for name in ("s1", "s2", "b1", "b2"))  # FreeU changes both halves
    return freed or needs_gradient(block, x)


def _upsampled(block: Any, x: Tensor, size: Any) -> Tensor:
    for upsampler in block.upsamplers or ():
        x = upsampler(x, size)
    return x
