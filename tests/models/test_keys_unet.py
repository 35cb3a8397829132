"""UNets in the original layout: real architectures on meta, and tensors against Diffusers' own converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from builders import original_unet
from clearway.models.family import SD1, SD2, SDXL, Family
from clearway.models.keys import below
from clearway.models.keys_unet import layout

# The published unet/config.json of SD 1.5, SD 2.1 and SDXL base 1.0, what differs from Diffusers' defaults.
REAL: dict[str, tuple[Family, int | None, dict[str, Any]]] = {
    "SD 1.5": (SD1, None, {"cross_attention_dim": 768}),
    "SD 2.1": (
        SD2,
        None,
        {
            "cross_attention_dim": 1024,
            "attention_head_dim": (5, 10, 20, 20),
            "use_linear_projection": True,
        },
    ),
    "SDXL": (
        SDXL,
        1280,
        {
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_architectures(name: str) -> None:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    family, pooled, config = REAL[name]
    with torch.device("meta"):
        real = UNet2DConditionModel(**config)
    shapes = {key: tuple(value.shape) for key, value in original_unet(real.state_dict()).items()}
    assert len(shapes) == len(real.state_dict())
    found = layout(shapes, family, pooled, {})
    for key, value in config.items():
        assert found.config[key] == value, key
    assert {target: shapes[source.key] for target, source in found.sources.items()} == {
        key: tuple(value.shape) for key, value in real.state_dict().items()
    }
    with torch.device("meta"):
        built = UNet2DConditionModel(**found.config)
    theirs = {
        key: tuple(getattr(value, "shape", ())) for key, value in built.state_dict().items()
    }  # the same modules
    assert theirs == {key: tuple(value.shape) for key, value in real.state_dict().items()}
    heads = [m.heads for m in built.modules() if type(m).__name__ == "Attention"]
    assert heads == [m.heads for m in real.modules() if type(m).__name__ == "Attention"]


@pytest.mark.parametrize(("name", "family", "pooled"), [("sd1", SD1, None), ("sdxl", SDXL, 48)])
def test_tensors_are_those_of_diffusers_converter(
    folders: dict[str, Path], tensors: dict[str, dict[str, Any]], name: str, family: Family, pooled: int |
    None
) -> None:  # fmt: skip
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    config = UNet2DConditionModel.load_config(folders[name], subfolder="unet")
    theirs = convert_ldm_unet_checkpoint(dict(tensors[name]), config)
    held = below({key: tuple(value.shape) for key, value in tensors[name].items()}, "model.diffusion_model.")
    ours = layout(held, family, pooled, {}).sources
    assert set(ours) == set(theirs)
    original = layout(held, family, pooled, {}).original
    assert all(original(target) == source.key for target, source in ours.items())
    for target, source in ours.items():
        assert source.turn is None
        assert torch.equal(tensors[name][f"model.diffusion_model.{source.key}"], theirs[target]), target


def shapes_of(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return below({key: tuple(value.shape) for key, value in tensors.items()}, "model.diffusion_model.")


def test_overrides_win(tensors: dict[str, dict[str, Any]]) -> None:
    found = layout(shapes_of(tensors["sd1"]), SD1, None, {"attention_head_dim": 4, "norm_num_groups": 16})
    assert (found.config["attention_head_dim"], found.config["norm_num_groups"]) == (4, 16)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda s: [s.pop(key) for key in list(s) if key.startswith("middle_block.1.")], KeyError),
        (lambda s: [s.pop(key) for key in list(s) if "input_blocks.2.1.transformer" in key], KeyError),
        (lambda s: [s.pop(key) for key in list(s) if key.startswith("input_blocks.8.")], ValueError),
        (lambda s: s.update({"input_blocks.9.0.op.bias": (64,)}), ValueError),
        (lambda s: s.pop("out.2.weight"), KeyError),
        (lambda s: [s.pop(key) for key in list(s) if key.startswith("input_blocks.1.")], KeyError),
        (lambda s: s.update({"input_blocks.2.0.in_layers.2.weight": (48, 32, 3, 3)}), ValueError),
        (lambda s: [s.pop(key) for key in list(s) if key.startswith("input_blocks.2.1.")], ValueError),
        (lambda s: s.update({"label_emb.0.0.weight": (128, 96)}), ValueError),
        (lambda s: s.update({"middle_block.1.proj_in.weight": (), "out.2.weight": ()}), IndexError),
    ],
)
def test_other_structures_are_refused(tensors: dict[str, dict[str, Any]], change: Any, error: type) -> None:
    shapes = shapes_of(tensors["sd1"])
    change(shapes)
    with pytest.raises(error):
        layout(shapes, SD1, None, {})


@pytest.mark.parametrize(
    "name", ["input_blocks.2.1.transformer_blocks.0.norm1.weight", "input_blocks.3.0.op.weight"]
)
def test_a_block_that_lacks_a_tensor_is_still_a_block(tensors: dict[str, dict[str, Any]], name: str) -> None:
    shapes = shapes_of(tensors["sd1"])
    whole = layout(shapes, SD1, None, {})
    del shapes[name]
    assert layout(shapes, SD1, None, {}).config == whole.config


def test_sdxl_sizes_must_fit_the_label_embedding(tensors: dict[str, dict[str, Any]]) -> None:
    for pooled in (None, 47, 200):
        with pytest.raises(ValueError, match="label_emb takes 96 values"):
            layout(shapes_of(tensors["sdxl"]), SDXL, pooled, {})
