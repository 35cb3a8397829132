"""Transformer blocks that are put in place: residual additions inside LayerNorms, tokens as images lie.

Each takes what its class's forward takes and hands over to it where a gradient is needed or a part that it
would pass by was meanwhile replaced, hooked or wrapped.
Source: diffusers 0.36 to 0.42.1, models/attention.py, models/transformers/transformer_2d.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from clearway.models._bound import Bound, needs_gradient, own, plain, plain_weight, unheard
from clearway.models._linear import product
from clearway.ops.layer_norm import layer_norm


def transformer(
    block: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    timestep: Any = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: Any = None,
    added_cond_kwargs: Any = None,
) -> Any:
    """BasicTransformerBlock: each residual addition inside the LayerNorm that follows it."""
    x, given = hidden_states, dict(cross_attention_kwargs or {})
    if x.dim() != 3 or "gligen" in given or needs_gradient(block, x) or refuse_transformer(block):
        return own(
            block,
            hidden_states,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            timestep,
            cross_attention_kwargs,
            class_labels,
            added_cond_kwargs,
        )
    out, x = _parts(block, x, None, attention_mask, encoder_hidden_states, encoder_attention_mask, given)
    return out + x


def _parts(
    block: Any,
    x: Tensor,
    before: Tensor | None,
    mask: Tensor | None,
    context: Any,
    context_mask: Tensor | None,
    given: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """A block of x + before; its result is the sum of the two that it gives, for the next norm to add."""
    if before is None:
        normed, _ = _layer_norm(block.norm1, x, None)
    else:
        normed, x = _layer_norm(block.norm1, before, x)
    own_context = context if block.only_cross_attention else None
    out = block.attn1(normed, encoder_hidden_states=own_context, attention_mask=mask, **given)
    if block.attn2 is not None:
        normed, x = _layer_norm(block.norm2, out, x)
        out = block.attn2(normed, encoder_hidden_states=context, attention_mask=context_mask, **given)
    normed, x = _layer_norm(block.norm3, out, x)
    return block.ff(normed), x


def blocks_of_image(
    part: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    timestep: Any = None,
    added_cond_kwargs: Any = None,
    class_labels: Any = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    attention_mask: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    return_dict: bool = True,
) -> Any:
    """Transformer2DModel of an image: a block's last addition inside the next one's first norm, and 1x1
    convolutions as products of tokens, which add their bias in the same pass."""
    x, given = hidden_states, dict(cross_attention_kwargs or {})
    masks = (attention_mask, encoder_attention_mask)
    if (
        needs_gradient(part, x)
        or refuse_image(part)
        or "scale" in given
        or any(mask is not None and mask.ndim == 2 for mask in masks)
    ):
        return own(
            part,
            hidden_states,
            encoder_hidden_states,
            timestep,
            added_cond_kwargs,
            class_labels,
            cross_attention_kwargs,
            attention_mask,
            encoder_attention_mask,
            return_dict,
        )
    batch, _, height, width = x.shape
    tokens, residual, before = _tokens(part, part.norm(x)), x, None
    for block in part.transformer_blocks:
        if _placed(block) and "gligen" not in given:
            before, tokens = _parts(
                block, tokens, before, attention_mask, encoder_hidden_states, encoder_attention_mask, given
            )
            continue
        tokens, before = tokens if before is None else before + tokens, None
        tokens = block(
            tokens,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            timestep=timestep,
            cross_attention_kwargs=cross_attention_kwargs,
            class_labels=class_labels,
        )
    tokens = tokens if before is None else before + tokens
    out = image_of_tokens(part, tokens, residual, batch, height, width, tokens.shape[-1])
    if not return_dict:
        return (out,)
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return Transformer2DModelOutput(sample=out)


def refuse_image(part: Any) -> str | None:
    """Why this transformer is left to its class."""
    return None if part.is_input_continuous else "it is no transformer of an image's channels"


def _placed(block: Any) -> bool:
    """Whether the block's forward is `transformer`, and a call of it nothing else."""
    forward = block.__dict__.get("forward")
    return (
        isinstance(forward, Bound)
        and forward.func is transformer
        and unheard(block)
        and refuse_transformer(block) is None
    )


def _tokens(part: Any, image: Tensor) -> Tensor:
    """proj_in of an image (B, C, h, w), as tokens (B, h w, C')."""
    if part.use_linear_projection or _pointwise(part.proj_in):
        tokens = image.permute(0, 2, 3, 1).flatten(1, 2)
        return _projected(part.proj_in, tokens)
    made: Tensor = part.proj_in(image)
    return made.permute(0, 2, 3, 1).flatten(1, 2)


def _pointwise(conv: Any) -> bool:
    """Whether a convolution is a product of tokens that may be computed without being called."""
    return (
        plain(conv, nn.Conv2d)
        and plain_weight(conv.weight)
        and conv.kernel_size == conv.stride == (1, 1)
        and conv.padding == (0, 0)
        and conv.groups == 1
        and conv.weight.is_cuda
    )


def _projected(layer: Any, tokens: Tensor) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        return product(layer)(tokens, layer.weight.flatten(1), layer.bias)
    out: Tensor = layer(tokens)
    return out


def image_of_tokens(
    block: Any,
    hidden_states: Tensor,
    residual: Tensor,
    batch_size: int,
    height: int,
    width: int,
    inner_dim: int,
) -> Tensor:
    """The end of Transformer2DModel: tokens (B, h w, C) are a channels-last image as they lie.

    Diffusers copies them into a contiguous one.
    """
    as_tokens = block.use_linear_projection or _pointwise(block.proj_out)
    x = _projected(block.proj_out, hidden_states) if as_tokens else hidden_states
    x = x.reshape(batch_size, height, width, x.shape[-1]).permute(0, 3, 1, 2)
    if not as_tokens:
        x = block.proj_out(x)
    return x + residual


def _layer_norm(norm: nn.LayerNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = layer_norm(x, residual, norm.weight, norm.bias, norm.eps)
    return out


def refuse_transformer(block: Any) -> str | None:
    """Why this block's norms cannot take its residual additions."""
    if block.norm_type != "layer_norm":
        return f"norm_type is {block.norm_type!r}"
    if block.pos_embed is not None:
        return "it adds positions after its norms"
    if block._chunk_size is not None:
        return "its feed-forward is chunked"
    norms = (block.norm1, block.norm3) if block.attn2 is None else (block.norm1, block.norm2, block.norm3)
    if not all(plain(norm, nn.LayerNorm) for norm in norms):
        return "one of its norms is no plain LayerNorm, or hooked"
    return None
