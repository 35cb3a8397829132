"""Tiny transformers of the real classes, weights seeded, and what they are called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TEXT, POOLED, WIDTH = 32, 24, 48  # widths of text embeddings, of their pooled ones and of the networks


def seeded(module: nn.Module, seed: int = 0, deviation: float = 0.15) -> Any:
    """The module with weights wide enough that every part shows in the result, norms' about one."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            mean = float(weight.dim() == 1 and not name.endswith("bias"))
            weight.copy_(mean + torch.randn(weight.shape, generator=drawn) * deviation)
    return module.eval().requires_grad_(False)


def tiny_flux(**config: Any) -> Any:
    """Two blocks of both kinds, three heads of 16."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    usual = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
        "joint_attention_dim": TEXT,
        "pooled_projection_dim": POOLED,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 4, 8),
    }
    return seeded(FluxTransformer2DModel(**usual | config), 1)


def tiny_sd3(**config: Any) -> Any:
    """SD 3: three blocks, the last without text."""
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

    usual = {
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
        "joint_attention_dim": TEXT,
        "caption_projection_dim": WIDTH,
        "pooled_projection_dim": POOLED,
        "pos_embed_max_size": 16,
    }
    return seeded(SD3Transformer2DModel(**usual | config), 2)


def tiny_sd35(**config: Any) -> Any:
    """SD 3.5: queries and keys normed, the first two blocks with a second attention."""
    return tiny_sd3(**{"qk_norm": "rms_norm", "dual_attention_layers": (0, 1), **config})


def flux_inputs(batch: int, height: int, width: int, text: int = 5, seed: int = 0) -> dict[str, Any]:
    """Arguments of Flux for an image of so many patches; times that bfloat16 holds, also times 1000."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.zeros(height, width, 3)
    ids[..., 1] += torch.arange(height)[:, None]
    ids[..., 2] += torch.arange(width)
    return {
        "hidden_states": torch.randn(batch, height * width, 16, generator=drawn),
        "encoder_hidden_states": torch.randn(batch, text, TEXT, generator=drawn),
        "pooled_projections": torch.randn(batch, POOLED, generator=drawn),
        "timestep": torch.full((batch,), 0.5),
        "guidance": torch.full((batch,), 4.0),
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }


def sd3_inputs(batch: int, height: int, width: int, text: int = 5, seed: int = 0) -> dict[str, Any]:
    """Arguments of SD 3 for an image of so many patches."""
    drawn = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, 2 * height, 2 * width, generator=drawn),
        "encoder_hidden_states": torch.randn(batch, text, TEXT, generator=drawn),
        "pooled_projections": torch.randn(batch, POOLED, generator=drawn),
        "timestep": torch.full((batch,), 432.0),
        "return_dict": False,
    }


def inputs(model: Any, *size: int, **more: int) -> dict[str, Any]:
    """Arguments of either, as `flux_inputs` and `sd3_inputs` take them, in the model's dtype."""
    given = (flux_inputs if "Flux" in type(model).__name__ else sd3_inputs)(*size, **more)
    return {
        key: value.to(model.dtype) if isinstance(value, Tensor) and "ids" not in key else value
        for key, value in given.items()
    }
