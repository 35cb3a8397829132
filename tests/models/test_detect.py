"""Families by names and shapes: sets of keys without any weights."""

from __future__ import annotations

import pytest

from clearway.models.detect import identify
from clearway.models.family import SD1, SD2, SDXL

UNET = {
    "model.diffusion_model.input_blocks.0.0.weight": (320, 4, 3, 3),
    "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (320, 768),
    "model.diffusion_model.middle_block.1.norm.weight": (1280,),
    "model.diffusion_model.out.2.weight": (4, 320, 3, 3),
}
VAE = {
    "first_stage_model.encoder.conv_in.weight": (128, 3, 3, 3),
    "first_stage_model.decoder.conv_in.weight": (512, 4, 3, 3),
}
CLIP = {"cond_stage_model.transformer.text_model.embeddings.token_embedding.weight": (49408, 768)}
OLD_CLIP = {"cond_stage_model.transformer.embeddings.token_embedding.weight": (49408, 768)}
OPEN_CLIP = {"cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight": (3072, 1024)}
BIG_G = {"conditioner.embedders.1.model.ln_final.weight": (1280,)}
FIRST = {"conditioner.embedders.0.model.ln_final.weight": (1280,)}
LABEL = {"model.diffusion_model.label_emb.0.0.weight": (1280, 2816)}
SD = UNET | VAE | CLIP
XL = UNET | VAE | BIG_G | LABEL


def with_channels(keys: dict, channels: int) -> dict:
    return keys | {"model.diffusion_model.input_blocks.0.0.weight": (320, channels, 3, 3)}


def without(keys: dict, start: str) -> dict:
    return {name: shape for name, shape in keys.items() if not name.startswith(start)}


def plus(keys: dict, *names: str) -> dict:
    return keys | dict.fromkeys(names, (1,))


@pytest.mark.parametrize(
    ("keys", "family"),
    [
        (SD, SD1),
        (UNET | VAE | OLD_CLIP, SD1),
        (UNET | VAE | OPEN_CLIP, SD2),
        (UNET | VAE | FIRST, SD2),  # SD 2 Turbo, in the sgm layout
        (XL, SDXL),
        (plus(XL, "v_pred", "ztsnr"), SDXL),
        # incomplete files are still of their family, so that what they lack can be named
        (UNET | VAE | LABEL | {"conditioner.embedders.1.model.positional_embedding": (77, 1280)}, SDXL),
        (UNET | VAE | {"cond_stage_model.model.positional_embedding": (77, 1024)}, SD2),
        (
            plus(
                without(
                    without(XL, "model.diffusion_model.middle_block"), "model.diffusion_model.input_blocks.0"
                ),
                "model.diffusion_model.middle_block.1.norm.bias",
            ),
            SDXL,
        ),
    ],
)
def test_families(keys: dict, family: object) -> None:
    assert identify(keys) is family


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (UNET | VAE | FIRST | LABEL, "is an SDXL refiner"),
        (with_channels(SD, 9), "is an SD 1.x inpainting checkpoint"),
        (with_channels(UNET | VAE | OPEN_CLIP, 9), "is an SD 2.x inpainting checkpoint"),
        (with_channels(XL, 9), "is an SDXL inpainting checkpoint"),
        (with_channels(SD, 8), "is an SD 1.x InstructPix2Pix checkpoint"),
        (with_channels(UNET | VAE | OPEN_CLIP, 5), "is an SD 2.x depth checkpoint"),
        (with_channels(UNET | VAE | OPEN_CLIP, 7), "is an SD 2.x upscaler"),
        (with_channels(UNET, 16), "is an SD checkpoint with 16 input channels"),
        (plus(UNET | VAE | OPEN_CLIP, "depth_model.x"), "SD 2 depth"),
        (plus(UNET | VAE | OPEN_CLIP, "noise_augmentor.x"), "unCLIP"),
        (plus(XL, "edm_vpred.sigma_max"), "EDM"),
        (without(XL, "model.diffusion_model.middle_block.1"), "SSD-1B"),
        (UNET | CLIP, "is an SD 1.x checkpoint without a VAE"),
        (UNET | VAE, "holds a UNet (context width 768) without its text encoder"),
        (plus(SD, "cond_stage_model.roberta.x"), "AltDiffusion"),
        (plus(SD, "control_model.input_blocks.0.0.weight"), "is a ControlNet"),
        (plus(UNET, "model.diffusion_model.joint_blocks.0.x"), "Stable Diffusion 3"),
        (plus({}, "joint_blocks.0.x_block.attn.qkv.weight"), "Stable Diffusion 3"),
        (plus({}, "double_blocks.0.img_attn.proj.weight"), "is a Flux checkpoint"),
        (plus({}, "model.diffusion_model.double_blocks.0.img_attn.proj.weight"), "is a Flux checkpoint"),
        (plus({}, "clip_txt_mapper.weight"), "Stable Cascade"),
        (plus({}, "lora_unet_down_blocks_0.lora_up.weight"), "is a LoRA"),
        (plus({}, "unet.down_blocks.0.attn.lora_A.weight"), "is a LoRA"),
        (plus({}, "lora_unet_mid.hada_w1_a"), "LyCORIS"),
        (plus({}, "encoder.down.0.block.0.conv1.weight"), "is a VAE"),
        (VAE, "is a VAE"),
        (plus(VAE | CLIP, "model_ema.diffusion_modelout2weight"), "only as a training average"),
        (plus({}, "a\x1b[31m\n" * 99), r"tensors: a\x1b[31m\n"),
        (plus({}, "decoder.up_blocks.0.resnets.0.conv1.weight"), "is a VAE"),
        (plus({}, "down_blocks.0.resnets.0.norm1.weight", "conv_in.weight"), "UNet of a Diffusers folder"),
        (plus({}, "input_blocks.0.0.weight"), "is a UNet alone"),
        (plus({}, "text_model.embeddings.position_embedding.weight"), "is a text encoder"),
        (plus({}, "emb_params"), "textual inversion"),
        (plus({}, "clip_l", "clip_g"), "textual inversion"),
        (plus({}, "down_blocks.0.motion_modules.0.x"), "AnimateDiff"),
        (plus({}, "controlnet_cond_embedding.conv_in.weight"), "ControlNet"),
        (plus({}, "conv_first.weight"), "upscaler"),
        (plus({}, "transformer_blocks.0.attn.to_k.weight"), "transformer network"),
        (plus({}, *(f"weight{number}" for number in range(9))), "holds no model that is known"),
    ],
)
def test_what_is_not_drawn_with_is_named(keys: dict, what: str) -> None:
    found = identify(keys)
    assert isinstance(found, str) and what in found
    assert found.split()[0] in ("is", "holds", "has") and "\n" not in found
