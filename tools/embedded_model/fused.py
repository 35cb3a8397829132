"""Diffusers' blocks for SD 1.x computed with the fused kernels; on a CPU with PyTorch's own operations."""

import types

import torch
import torch.nn.functional as F

from kernels import GEGLU, AddLayerNorm, GroupNormSiLU, triton


def _runs(x: torch.Tensor) -> bool:
    return triton is not None and x.is_cuda


def group_norm_silu(
    norm: torch.nn.GroupNorm, x: torch.Tensor, silu: bool, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """``norm`` of (B, C, H, W) plus a (B, C) shift, then SiLU if ``silu``."""
    if _runs(x):
        return GroupNormSiLU.apply(x, shift, norm.weight, norm.bias, norm.num_groups, norm.eps, silu)
    y = norm(x if shift is None else x + shift[:, :, None, None])
    return F.silu(y) if silu else y


def add_layer_norm(
    norm: torch.nn.LayerNorm, x: torch.Tensor, delta: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + delta + shift, and ``norm`` of it."""
    if _runs(x):
        return AddLayerNorm.apply(x, delta, shift, norm.weight, norm.bias, norm.eps)
    total = x + delta + shift
    return total, norm(total)


def layer_norm(norm: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    """``norm`` of x."""
    if _runs(x):
        return AddLayerNorm.apply(x, None, None, norm.weight, norm.bias, norm.eps)
    return norm(x)


def geglu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """value * GELU(gate) of (..., 2 D) plus bias."""
    if _runs(x):
        return GEGLU.apply(x, bias)
    value, gate = (x + bias).chunk(2, dim=-1)
    return value * F.gelu(gate)


def _residual(self, input_tensor, temb=None, *args, **kwargs):
    conv = self.conv1
    hidden = group_norm_silu(self.norm1, input_tensor, True)
    if temb is not None and self.time_emb_proj is not None:
        # the convolution's bias and the time embedding go into the next norm
        hidden = F.conv2d(hidden, conv.weight, None, conv.stride, conv.padding)
        shift = self.time_emb_proj(F.silu(temb)) + conv.bias
    else:
        hidden = conv(hidden)
        shift = None
    hidden = self.conv2(group_norm_silu(self.norm2, hidden, True, shift))
    if self.conv_shortcut is not None:
        input_tensor = self.conv_shortcut(input_tensor)
    return input_tensor + hidden


def _attention(attention, x, states):
    """Multi-head attention without the output's bias."""
    batch, length, width = x.shape
    heads = attention.heads
    query = attention.to_q(x).view(batch, length, heads, width // heads).transpose(1, 2)
    key = attention.to_k(states).view(batch, -1, heads, width // heads).transpose(1, 2)
    value = attention.to_v(states).view(batch, -1, heads, width // heads).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(query, key, value)
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, width), attention.to_out[0].weight)


def _block(block, hidden, states):
    normed = layer_norm(block.norm1, hidden)
    mixed = _attention(block.attn1, normed, normed)
    hidden, normed = add_layer_norm(block.norm2, hidden, mixed, block.attn1.to_out[0].bias)
    mixed = _attention(block.attn2, normed, states)
    hidden, normed = add_layer_norm(block.norm3, hidden, mixed, block.attn2.to_out[0].bias)
    project = block.ff.net[0].proj
    inner = geglu(F.linear(normed, project.weight), project.bias)
    return hidden + block.ff.net[2](inner)


def _transformer(self, hidden_states, encoder_hidden_states=None, **kwargs):
    batch, channels, height, width = hidden_states.shape
    hidden = self.proj_in(group_norm_silu(self.norm, hidden_states, False))
    hidden = hidden.permute(0, 2, 3, 1).reshape(batch, height * width, channels)
    for block in self.transformer_blocks:
        hidden = _block(block, hidden, encoder_hidden_states)
    hidden = hidden.reshape(batch, height, width, channels).permute(0, 3, 1, 2)
    return (self.proj_out(hidden) + hidden_states,)


def fuse(module: torch.nn.Module) -> torch.nn.Module:
    """``module`` with its residual blocks and spatial transformers computed by the functions of this file.

    The same arithmetic as Diffusers' for SD 1.x configurations (no dropout, no up- or downsampling inside a
    residual block, output scale 1); the state dict doesn't change.
    """
    for child in module.modules():
        kind = type(child).__name__
        if kind == "ResnetBlock2D":
            child.forward = types.MethodType(_residual, child)
        if kind == "Transformer2DModel":
            child.forward = types.MethodType(_transformer, child)
    return module
