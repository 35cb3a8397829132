"""The forwards that are put in place: what Diffusers' classes compute, in the same order, through ops.

Each takes what its class's forward takes and hands over to it where a gradient is needed or a part that it
would pass by was meanwhile replaced, hooked or wrapped. Convolutions, linear layers and attentions are called
as modules, so LoRA, quantisation and hooks on them work as before.
Source: diffusers 0.36 to 0.42.1, models/resnet.py, upsampling.py, activations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearway.execution.kept import Kept
from clearway.models._bound import Bound, needs_gradient, own, plain, plain_weight, unheard
from clearway.models._time_embedding import projected
from clearway.ops.contract import REFERENCE
from clearway.ops.convolution import convolution
from clearway.ops.geglu import geglu
from clearway.ops.geglu_linear import geglu_linear
from clearway.ops.group_norm_silu import group_norm_silu
from clearway.ops.residual_add import residual_add
from clearway.ops.upsample_conv import made_phases, upsample_conv


def _norm(norm: nn.GroupNorm, x: Tensor, shift: Tensor | None = None, activation: bool = True) -> Tensor:
    out: Tensor = group_norm_silu(x, norm.weight, norm.bias, norm.num_groups, norm.eps, shift, activation)
    return out


def resnet(block: Any, input_tensor: Tensor, temb: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """ResnetBlock2D: both norms with their SiLU, the time embedding added inside the second."""
    if args or kwargs or needs_gradient(block, input_tensor) or refuse_resnet(block):
        return own(block, input_tensor, temb, *args, **kwargs)
    h = _norm(block.norm1, input_tensor)
    resize = block.upsample if block.upsample is not None else block.downsample
    if resize is not None:
        if block.upsample is not None and h.shape[0] >= 64:  # as Diffusers does (its issue 984)
            input_tensor, h = input_tensor.contiguous(), h.contiguous()
        input_tensor, h = resize(input_tensor), resize(h)
    h = block.conv1(h)
    shift = None  # the VAE's blocks add none
    if block.time_emb_proj is not None and temb is not None and block.time_embedding_norm == "default":
        shift = projected(block, temb, folded=False)
    h = block.conv2(block.dropout(_norm(block.norm2, h, shift)))
    if block.conv_shortcut is not None:
        input_tensor = block.conv_shortcut(input_tensor)
    out = input_tensor + h
    return out if block.output_scale_factor == 1.0 else out / block.output_scale_factor


def folded_resnet(
    block: Any, input_tensor: Tensor, temb: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """ResnetBlock2D where convolutions add their bias in a pass of its own: the first one's goes into the
    second norm, the second's and the shortcut's into the residual addition."""
    return _folded(_without_bias, block, input_tensor, temb, *args, **kwargs)


def routed_resnet(
    block: Any, input_tensor: Tensor, temb: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """`folded_resnet` whose convolutions go through the op too, which has its own ways for some images."""
    return _folded(_routed, block, input_tensor, temb, *args, **kwargs)


def _folded(
    convolve: Callable[[nn.Conv2d, Tensor], Tensor],
    block: Any,
    input_tensor: Tensor,
    temb: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    convolutions = (block.conv1, block.conv2, block.conv_shortcut)
    if (
        not bias_is_a_pass(input_tensor)
        or block.output_scale_factor != 1.0
        or block.upsample is not None
        or block.downsample is not None
        or not all(conv is None or _foldable(conv) for conv in convolutions)
    ):
        return resnet(block, input_tensor, temb, *args, **kwargs)
    if args or kwargs or needs_gradient(block, input_tensor) or refuse_resnet(block):
        return own(block, input_tensor, temb, *args, **kwargs)
    shift: Tensor | None = block.conv1.bias
    h = convolve(block.conv1, _norm(block.norm1, input_tensor))
    if block.time_emb_proj is not None and temb is not None and block.time_embedding_norm == "default":
        shift = projected(block, temb, folded=True)
    h = convolve(block.conv2, block.dropout(_norm(block.norm2, h, shift)))
    bias: Tensor | None = block.conv2.bias
    if block.conv_shortcut is not None:
        input_tensor = convolve(block.conv_shortcut, input_tensor)
        other = block.conv_shortcut.bias
        bias = other if bias is None else bias if other is None else bias + other
    out: Tensor = residual_add(h, bias, input_tensor)
    return out


def bias_is_a_pass(x: Tensor) -> bool:
    """Whether PyTorch adds a convolution's bias after it: on CUDA; on the CPU oneDNN does it within."""
    return x.is_cuda


def _foldable(conv: Any) -> bool:
    return plain(conv, nn.Conv2d) and plain_weight(conv.weight) and conv.padding_mode == "zeros"


def _without_bias(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)


def _routed(conv: nn.Conv2d, x: Tensor) -> Tensor:
    side = conv.kernel_size[0]
    centred = conv.kernel_size in ((1, 1), (3, 3)) and conv.padding == (side // 2, side // 2)
    if not centred or conv.stride != (1, 1) or conv.dilation != (1, 1) or conv.groups != 1:
        return _without_bias(conv, x)
    out: Tensor = convolution(x, conv.weight)
    return out


def refuse_resnet(block: Any) -> str | None:
    """Why this block's norms cannot be taken together with what is around them."""
    if block.time_embedding_norm == "scale_shift":
        return "its time embedding scales too"
    if not plain(block.nonlinearity, nn.SiLU):
        return f"its activation is {type(block.nonlinearity).__name__}, or hooked"
    if not (plain(block.norm1, nn.GroupNorm) and plain(block.norm2, nn.GroupNorm)):
        return "one of its norms is no plain GroupNorm, or hooked"
    return None


def upsample(
    block: Any, kept: Kept, hidden_states: Tensor, output_size: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Upsample2D by two with its convolution, whose phases a captured graph finds made."""
    x = hidden_states
    twice = output_size is None or tuple(output_size) == (2 * x.shape[2], 2 * x.shape[3])
    if args or kwargs or not twice or needs_gradient(block, x) or refuse_upsample(block):
        return own(block, hidden_states, output_size, *args, **kwargs)
    weight, phases = block.conv.weight, None
    if _asks(x) and upsample_conv.route(x, weight, block.conv.bias).name != REFERENCE:
        (phases,) = kept.of_weights((weight,), lambda: (made_phases(weight),))
    return upsample_conv(x, weight, block.conv.bias, phases)


def refuse_upsample(block: Any) -> str | None:
    """Why this upsampler is not one operation with its convolution."""
    conv: Any = getattr(block, "conv", None)
    if not block.use_conv or block.use_conv_transpose or not block.interpolate or block.norm is not None:
        return "it is not nearest upsampling and one convolution"
    if not _foldable(conv) or conv.kernel_size != (3, 3) or conv.padding != (1, 1):
        return "its convolution is wrapped, hooked or not 3x3"
    if conv.stride != (1, 1) or conv.groups != 1 or conv.dilation != (1, 1):
        return "its convolution strides, dilates or is grouped"
    return None


def gated(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """GEGLU after its projection, or both as one product where the op has one for these arguments."""
    if args or kwargs or "gelu" in vars(layer) or needs_gradient(layer, hidden_states):
        return own(layer, hidden_states, *args, **kwargs)
    proj = layer.proj
    if _asks(hidden_states) and plain(proj, nn.Linear) and plain_weight(proj.weight):
        given = hidden_states, proj.weight, proj.bias
        if geglu_linear.route(*given).name != REFERENCE:
            return geglu_linear(*given)
    return geglu(proj(hidden_states))


def _asks(x: Tensor) -> bool:
    """Whether an op is asked which way it would take: on CUDA, and not by torch.compile, which cannot follow
    its routing."""
    return has_own_ways(x) and not torch.compiler.is_compiling()


def has_own_ways(x: Tensor) -> bool:
    """Whether ops may have more than their reference for x: on CUDA."""
    return x.is_cuda


def group_norm(norm: Any, x: Tensor) -> Any:
    """A GroupNorm that no SiLU follows."""
    if x.dim() < 3 or needs_gradient(norm, x):
        return own(norm, x)
    return _norm(norm, x, activation=False)


def last_norm(norm: Any, owner: nn.Module, x: Tensor) -> Any:
    """conv_norm_out of `owner` with the SiLU of its conv_act, which `nothing` then leaves out."""
    if needs_gradient(norm, x):
        return own(norm, x)
    return _norm(norm, x, activation=_end_together(owner, norm))


def nothing(activation: Any, owner: nn.Module, x: Tensor) -> Any:
    """conv_act after `last_norm`: done, unless that could not know or a gradient made it hand over."""
    alone = torch.is_grad_enabled() and x.requires_grad
    return own(activation, x) if alone or not _end_together(owner) else x


def _end_together(owner: nn.Module, norm: Any = None) -> bool:
    """Whether what stands at both places is what was put there, and nobody listens between them."""
    last, activation = (owner._modules.get(name) for name in ("conv_norm_out", "conv_act"))
    return (norm is None or norm is last) and _stands(last, last_norm) and _stands(activation, nothing)


def _stands(module: nn.Module | None, run: Any) -> bool:
    forward = None if module is None else module.__dict__.get("forward")
    return isinstance(forward, Bound) and forward.func is run and unheard(forward.args[0])
