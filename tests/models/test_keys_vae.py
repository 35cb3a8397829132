"""VAEs in the original layout: the real one on meta, and tensors against Diffusers' own converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from builders import original_vae
from clearway.models.keys import below
from clearway.models.keys_vae import folder_source, layout, optional

REAL = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 4,
}


def test_the_real_architecture() -> None:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    with torch.device("meta"):
        real = AutoencoderKL(**REAL)
    shapes = {key: tuple(value.shape) for key, value in original_vae(real.state_dict()).items()}
    found = layout(shapes, 0.13025, {})
    assert len(found.sources) == 248
    assert {key: found.config[key] for key in REAL} == REAL and found.config["scaling_factor"] == 0.13025
    with torch.device("meta"):
        built = AutoencoderKL(**found.config).state_dict()
    assert set(found.sources) == set(built)
    for target, source in found.sources.items():
        value = torch.empty(shapes[source.key], device="meta")
        assert (source.turn(value) if source.turn else value).shape == built[target].shape


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_tensors_are_those_of_diffusers_converter(
    folders: dict[str, Path], tensors: dict[str, dict[str, Any]], name: str
) -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    config = AutoencoderKL.load_config(folders[name], subfolder="vae")
    theirs = convert_ldm_vae_checkpoint(dict(tensors[name]), config)
    held = below({key: tuple(value.shape) for key, value in tensors[name].items()}, "first_stage_model.")
    ours = layout(held, 0.18215, {}).sources
    assert set(ours) == set(theirs)
    original = layout(held, 0.18215, {}).original
    assert all(original(target) == source.key for target, source in ours.items())
    for target, source in ours.items():
        value = tensors[name][f"first_stage_model.{source.key}"]
        assert torch.equal(source.turn(value) if source.turn else value, theirs[target]), target


def test_a_decoder_alone_has_the_whole_shape(tensors: dict[str, dict[str, Any]]) -> None:
    held = below({key: tuple(value.shape) for key, value in tensors["sd1"].items()}, "first_stage_model.")
    whole = layout(held, 0.18215, {}).config
    half = {key: value for key, value in held.items() if not key.startswith(("encoder.", "quant_conv."))}
    assert layout(half, 0.18215, {}).config == whole


@pytest.mark.parametrize(
    "gone",
    ["post_quant_conv.weight", "quant_conv.", "encoder.down.0.block.0.conv1.weight", "encoder.down.3."],
)
def test_the_structure_does_not_hang_on_what_is_missing(
    tensors: dict[str, dict[str, Any]], gone: str
) -> None:
    held = below({key: tuple(value.shape) for key, value in tensors["sd1"].items()}, "first_stage_model.")
    whole = layout(held, 0.18215, {}).config
    assert layout({k: s for k, s in held.items() if not k.startswith(gone)}, 0.18215, {}).config == whole


def test_only_a_whole_encoder_may_be_left_out() -> None:
    assert optional(["decoder.conv_in.weight"]) == ("encoder.", "quant_conv.")
    assert optional(["encoder.conv_in.weight"]) == ()


def test_what_is_missing_is_named() -> None:
    with pytest.raises(KeyError, match=r"decoder\.up\.0\.block\.0\.conv1\.weight"):
        layout({}, 0.18215, {})


def test_old_names_in_diffusers_folders() -> None:
    new, source = folder_source("encoder.mid_block.attentions.0.query.weight")
    assert new == "encoder.mid_block.attentions.0.to_q.weight"
    assert source.turn is not None and source.turn(torch.ones(2, 2)).shape == (2, 2)
    assert folder_source("decoder.mid_block.attentions.0.proj_attn.bias")[0].endswith(".to_out.0.bias")
    assert folder_source("decoder.mid_block.attentions.0.group_norm.weight")[1].turn is None
    assert folder_source("decoder.conv_in.weight")[0] == "decoder.conv_in.weight"
