"""What is put in place in transformers (Flux, SD 3 and what is built of their parts): modulation and norms.

By exact class; what is of another class is left whole. Each forward takes what its class's forward takes and
hands over to it where a gradient is needed or a part that it would pass by was replaced, hooked or wrapped.
Source: diffusers 0.36 to 0.42.1, models/normalization.py, attention.py, transformers/transformer_flux.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearway.models import _dit_attention
from clearway.models._bound import needs_gradient, occupied, own, plain, plain_weight
from clearway.models._dit_attention import Processor, qualified
from clearway.models._report import Report
from clearway.ops.adaln_modulate import adaln_modulate
from clearway.ops.rms_norm import rms_norm

OPS = ("adaln_modulate", "rms_norm", "rope")
"""What these add to the ops of UNets; `rope` comes with `attention`, whose processor does it."""

__all__ = ["OPS", "Processor", "place"]

Bind = Callable[..., bool]
Forward = tuple[str, Callable[..., Any], Callable[[Any], str | None]]


def place(name: str, module: nn.Module, ops: tuple[str, ...], bind: Bind, report: Report) -> bool:
    """Whether this module is one of those that are known here; puts in place there what `ops` asks for."""
    kind = qualified(module)
    if kind in _FORWARDS:
        what, run, refuse = _FORWARDS[kind]
        if what in ops:
            bind(name, module, what, run, refuse(module), report)
        return True
    if not hasattr(module, "processor") or not kind.startswith("diffusers."):
        return False
    processor = qualified(module.processor)
    if kind == _ATTENTION and processor != _JOINT:
        return False  # a UNet's, or somebody's own
    if "attention" in ops:
        _swap(name, module, kind, processor, "rope" in ops, report)
    return True


def _swap(name: str, attn: Any, kind: str, processor: str, rotate: bool, report: Report) -> None:
    if kind not in (_ATTENTION, _FLUX):
        report.leave(f"{type(attn).__name__} is not known here", name)
        return
    joint = kind == _ATTENTION
    if not joint and processor != _FLUX_PROCESSOR:
        report.leave(f"its processor is {type(attn.processor).__name__}", name)
        return
    refuse = _dit_attention.refuse_joint if joint else _dit_attention.refuse_flux
    reason = occupied(attn) or refuse(attn)
    if reason:
        report.leave(reason, name)
        return
    if joint:
        attn.processor = _dit_attention.JointProcessor(attn.processor)
    else:
        attn.processor = _dit_attention.FluxProcessor(attn.processor, rotate)
        if rotate:
            report.place("rope", name)
    report.place("attention", name)


def zero(
    layer: Any,
    x: Tensor,
    timestep: Any = None,
    class_labels: Any = None,
    hidden_dtype: Any = None,
    emb: Tensor | None = None,
) -> Any:
    """AdaLayerNormZero: x normed and modulated, and what modulates the rest of the block."""
    if needs_gradient(layer, x, emb) or refuse_norm(layer):
        return own(layer, x, timestep, class_labels, hidden_dtype, emb)
    if layer.emb is not None:
        emb = layer.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    shift, scale, *rest = layer.linear(layer.silu(emb)).chunk(6, dim=1)
    return _modulated(layer.norm, x, scale, shift), *rest


def single(layer: Any, x: Tensor, emb: Tensor | None = None) -> Any:
    """AdaLayerNormZeroSingle: x normed and modulated, and the gate."""
    if needs_gradient(layer, x, emb) or refuse_norm(layer):
        return own(layer, x, emb)
    shift, scale, gate = layer.linear(layer.silu(emb)).chunk(3, dim=1)
    return _modulated(layer.norm, x, scale, shift), gate


def continuous(layer: Any, x: Tensor, conditioning_embedding: Tensor) -> Any:
    """AdaLayerNormContinuous: x normed and modulated."""
    if needs_gradient(layer, x, conditioning_embedding) or refuse_norm(layer):
        return own(layer, x, conditioning_embedding)
    row = layer.linear(layer.silu(conditioning_embedding).to(x.dtype))
    scale, shift = row.chunk(2, dim=1)
    return _modulated(layer.norm, x, scale, shift)


def dual(layer: Any, hidden_states: Tensor, emb: Tensor | None = None) -> Any:
    """SD35AdaLayerNormZeroX: x normed and modulated twice, and what modulates the rest of the block."""
    if needs_gradient(layer, hidden_states, emb) or refuse_norm(layer):
        return own(layer, hidden_states, emb)
    shift, scale, *rest, shift2, scale2, gate2 = layer.linear(layer.silu(emb)).chunk(9, dim=1)
    first = _modulated(layer.norm, hidden_states, scale, shift)
    second = _modulated(layer.norm, hidden_states, scale2, shift2)
    return first, *rest, second, gate2


def refuse_norm(layer: Any) -> str | None:
    """Why what this layer norms by is not computed with the modulation."""
    return None if _bare(layer.norm) else "its norm has weights, is no LayerNorm, or is hooked"


def _bare(norm: Any) -> bool:
    """Whether this is LayerNorm over the last axis and nothing else."""
    if not plain(norm, type(norm)) or qualified(norm) not in (_LAYER_NORM, _FLOAT_NORM):
        return False
    return norm.weight is None and norm.bias is None and len(norm.normalized_shape) == 1


def _modulated(norm: nn.LayerNorm, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    out: Tensor = adaln_modulate(x, scale, shift, norm.eps)
    return out


def flux_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Any:
    """FluxTransformerBlock: the norms before the feed-forwards with their modulation."""
    x, text = hidden_states, encoder_hidden_states
    if needs_gradient(block, x, text, temb) or refuse_block(block):
        return own(block, x, text, temb, image_rotary_emb, joint_attention_kwargs)
    normed, gate, *mlp = block.norm1(x, emb=temb)
    normed_text, text_gate, *text_mlp = block.norm1_context(text, emb=temb)
    attended, attended_text, *adapter = block.attn(
        hidden_states=normed,
        encoder_hidden_states=normed_text,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    x = x + gate.unsqueeze(1) * attended
    x = _fed(x, block.norm2, block.ff, *mlp)
    if adapter:
        x = x + adapter[0]
    text = text + text_gate.unsqueeze(1) * attended_text
    text = _fed(text, block.norm2_context, block.ff_context, *text_mlp)
    return (text.clip(-65504, 65504) if text.dtype == torch.float16 else text), x


def joint_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Any:
    """JointTransformerBlock: the norms before the feed-forwards with their modulation."""
    x, text = hidden_states, encoder_hidden_states
    if needs_gradient(block, x, text, temb) or refuse_joint_block(block):
        return own(block, x, text, temb, joint_attention_kwargs)
    given = joint_attention_kwargs or {}
    normed, gate, *mlp = block.norm1(x, emb=temb)
    if block.context_pre_only:
        normed_text = block.norm1_context(text, temb)
    else:
        normed_text, text_gate, *text_mlp = block.norm1_context(text, emb=temb)
    attended, attended_text = block.attn(hidden_states=normed, encoder_hidden_states=normed_text, **given)
    x = x + gate.unsqueeze(1) * attended
    if block.use_dual_attention:
        *mlp, normed2, gate2 = mlp
        x = x + gate2.unsqueeze(1) * block.attn2(hidden_states=normed2, **given)
    x = _fed(x, block.norm2, block.ff, *mlp)
    if block.context_pre_only:
        return None, x
    text = text + text_gate.unsqueeze(1) * attended_text
    return _fed(text, block.norm2_context, block.ff_context, *text_mlp), x


def _fed(x: Tensor, norm: Any, feed: Any, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    """x and what a feed-forward makes of it."""
    added: Tensor = gate.unsqueeze(1) * feed(_modulated(norm, x, scale, shift))
    return x + added


def refuse_block(block: Any) -> str | None:
    """Why this block's second norms are not computed with their modulation."""
    if not (_bare(block.norm2) and _bare(block.norm2_context)):
        return "one of its second norms has weights, is no LayerNorm, or is hooked"
    return None


def refuse_joint_block(block: Any) -> str | None:
    """The same of an SD 3 block, whose last has no text to go on with."""
    if block._chunk_size is not None:
        return "its feed-forward is chunked"
    if not _bare(block.norm2) or not (block.context_pre_only or _bare(block.norm2_context)):
        return "one of its second norms has weights, is no LayerNorm, or is hooked"
    return None


def root_mean_square(norm: Any, *args: Any, **kwargs: Any) -> Any:
    """RMSNorm over the last axis: PyTorch's, or Diffusers' where its result has the dtype of its input."""
    x = args[0] if args else None
    if kwargs or len(args) != 1 or not isinstance(x, Tensor) or needs_gradient(norm, x) or refuse_rms(norm):
        return own(norm, *args, **kwargs)
    if norm.weight is not None and norm.weight.dtype != x.dtype:
        return own(norm, *args)
    return rms_norm(x, norm.weight, norm.eps)


def refuse_rms(norm: Any) -> str | None:
    """Why this RMSNorm is not the op's."""
    shape = getattr(norm, "normalized_shape", None) or norm.dim
    if len(shape) != 1 or norm.eps is None or getattr(norm, "bias", None) is not None:
        return "it has a bias, no epsilon, or norms several axes"
    if norm.weight is not None and not plain_weight(norm.weight):
        return "its weight is quantised or of a class of its own"
    return None


_LAYER_NORM = "torch.nn.modules.normalization.LayerNorm"
_FLOAT_NORM = "diffusers.models.normalization.FP32LayerNorm"
_ATTENTION = "diffusers.models.attention_processor.Attention"
_JOINT = "diffusers.models.attention_processor.JointAttnProcessor2_0"
_FLUX = "diffusers.models.transformers.transformer_flux.FluxAttention"
_FLUX_PROCESSOR = "diffusers.models.transformers.transformer_flux.FluxAttnProcessor"
_FORWARDS: dict[str, Forward] = {
    "diffusers.models.normalization.AdaLayerNormZero": ("adaln_modulate", zero, refuse_norm),
    "diffusers.models.normalization.AdaLayerNormZeroSingle": ("adaln_modulate", single, refuse_norm),
    "diffusers.models.normalization.AdaLayerNormContinuous": ("adaln_modulate", continuous, refuse_norm),
    "diffusers.models.normalization.SD35AdaLayerNormZeroX": ("adaln_modulate", dual, refuse_norm),
    "diffusers.models.transformers.transformer_flux.FluxTransformerBlock": (
        "adaln_modulate",
        flux_block,
        refuse_block,
    ),
    "diffusers.models.attention.JointTransformerBlock": ("adaln_modulate", joint_block, refuse_joint_block),
    "torch.nn.modules.normalization.RMSNorm": ("rms_norm", root_mean_square, refuse_rms),
    "diffusers.models.normalization.RMSNorm": ("rms_norm", root_mean_square, refuse_rms),
}
