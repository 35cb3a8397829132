"""Other transformers, and ControlNets, of the same parts: what applies applies, the rest is left whole."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from clearway.models.accelerate import accelerate, restore
from dit_builders import POOLED, TEXT, WIDTH, flux_inputs, sd3_inputs, seeded


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


HEADS = {"attention_head_dim": 16, "num_attention_heads": 3}
SMALL = {"attention_head_dim": 8, "num_attention_heads": 2}
TIME, SHARE = torch.tensor([431.0, 431.0]), torch.tensor([0.4, 0.4])


def flux_controlnet() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.controlnets.controlnet_flux import FluxControlNetModel

    model = FluxControlNetModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=TEXT,
        pooled_projection_dim=POOLED,
        guidance_embeds=True,
        axes_dims_rope=[4, 4, 8],
        **HEADS,
    )
    return model, flux_inputs(2, 3, 4) | {"controlnet_cond": drawn(2, 12, 16)}


def sd3_controlnet() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.controlnets.controlnet_sd3 import SD3ControlNetModel

    model = SD3ControlNetModel(
        sample_size=16,
        in_channels=4,
        num_layers=2,
        joint_attention_dim=TEXT,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=POOLED,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
        **HEADS,
    )
    return model, sd3_inputs(2, 3, 4) | {"controlnet_cond": drawn(2, 4, 6, 8)}


def chroma() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers.transformer_chroma import ChromaTransformer2DModel

    model = ChromaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=TEXT,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
        **HEADS,
    )
    mask = torch.ones(2, 17)
    mask[1, 3:5] = 0
    given = flux_inputs(2, 3, 4) | {"attention_mask": mask}
    return model, {
        key: value for key, value in given.items() if key not in ("guidance", "pooled_projections")
    }


def auraflow() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers.auraflow_transformer_2d import AuraFlowTransformer2DModel

    model = AuraFlowTransformer2DModel(
        sample_size=32,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        caption_projection_dim=16,
        joint_attention_dim=TEXT,
        out_channels=4,
        pos_embed_max_size=256,
        **SMALL,
    )
    return model, {
        "hidden_states": drawn(2, 4, 8, 8),
        "encoder_hidden_states": drawn(2, 5, TEXT),
        "timestep": SHARE,
    }


def pixart() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=1,
        caption_channels=TEXT,
        in_channels=4,
        cross_attention_dim=16,
        out_channels=8,
        num_embeds_ada_norm=8,
        use_additional_conditions=False,
        **SMALL,
    )
    return model, {
        "hidden_states": drawn(2, 4, 8, 8),
        "encoder_hidden_states": drawn(2, 5, TEXT),
        "timestep": TIME,
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def sana() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel

    model = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=TEXT,
        sample_size=8,
        qk_norm="rms_norm_across_heads",
        **SMALL,
    )
    return model, {
        "hidden_states": drawn(2, 4, 8, 8),
        "encoder_hidden_states": drawn(2, 5, TEXT),
        "timestep": TIME,
    }


def ltx() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, cross_attention_dim=16, num_layers=1, caption_channels=TEXT, **SMALL
    )
    return model, {
        "hidden_states": drawn(2, 24, 4),
        "encoder_hidden_states": drawn(2, 5, TEXT),
        "timestep": TIME,
        "encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool),
        "num_frames": 2,
        "height": 3,
        "width": 4,
    }


def qwen_image() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=1,
        joint_attention_dim=TEXT,
        axes_dims_rope=(8, 4, 4),
        **HEADS,
    )
    return model, {
        "hidden_states": drawn(2, 16, 16),
        "encoder_hidden_states": drawn(2, 7, TEXT),
        "encoder_hidden_states_mask": torch.ones(2, 7, dtype=torch.bool),
        "timestep": SHARE,
        "img_shapes": [(1, 4, 4)] * 2,
    }


def wan() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT,
        ffn_dim=32,
        num_layers=1,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": drawn(2, 4, 2, 8, 8),
        "encoder_hidden_states": drawn(2, 6, TEXT),
        "timestep": TIME,
    }


PLACED = {
    flux_controlnet: {"adaln_modulate", "attention", "rms_norm", "rope"},
    sd3_controlnet: {"adaln_modulate", "attention", "rms_norm"},
    chroma: {"attention", "rms_norm", "rope"},
    auraflow: {"adaln_modulate"},
    pixart: {"attention", "cross_kv"},
    sana: {"rms_norm"},
    ltx: {"rms_norm"},
    qwen_image: {"adaln_modulate", "rms_norm"},
    wan: {"rms_norm"},
}
LEFT = {
    auraflow: "its processor is AuraFlowAttnProcessor2_0",
    pixart: "norm_type is 'ada_norm_single'",
    sana: "its processor is SanaAttnProcessor2_0",
    ltx: "LTXAttention is not known here",
    qwen_image: "its processor is QwenDoubleStreamAttnProcessor2_0",
    wan: "WanAttention is not known here",
}


def tensors(out: Any) -> Iterator[Tensor]:
    for one in (out,) if isinstance(out, Tensor) else out:
        yield from (one,) if isinstance(one, Tensor) else tensors(one)


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # Diffusers itself calls it
@pytest.mark.parametrize("maker", PLACED, ids=lambda maker: maker.__name__)
def test_gives_the_same(maker: Any) -> None:
    model, given = maker()
    seeded(model)
    with torch.no_grad():
        expected = list(tensors(model(**given | {"return_dict": False})))
        report = accelerate(model)
        found = list(tensors(model(**given | {"return_dict": False})))
        restore(model)
        again = list(tensors(model(**given | {"return_dict": False})))
    assert set(report.placed) == PLACED[maker]
    assert not report.left if maker in (flux_controlnet, sd3_controlnet) else report.left
    assert maker not in LEFT or LEFT[maker] in report.left
    for one, other, third in zip(found, expected, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
        assert torch.equal(other, third)
