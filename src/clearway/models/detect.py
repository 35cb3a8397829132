"""Which family a checkpoint file belongs to, from the names and shapes of its tensors alone.

Order and keys as the WebUI's (reference: `a1111.md` §6); what Clearway does not draw with is named and not
guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clearway.models.family import SD1, SD2, SDXL, Family

Shapes = Mapping[str, tuple[int, ...]]

UNET = "model.diffusion_model."
VAE = "first_stage_model."
CLIP_PREFIXES = {  # text encoders of the original layouts, and whose they are
    "sd1": ("cond_stage_model.transformer.",),
    "sd2": ("cond_stage_model.model.", "conditioner.embedders.0.model."),
    "sdxl": ("conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."),
}

# What a file is where any of its names contains one of these; the first that fits is said.
PARTS = (
    (("lora_up", "lora_down", "lora_A", "lora_B", "lora.up", "lora.down"), "is a LoRA"),
    (("hada_w1", "lokr_w1", "oft_blocks", "oft_diag"), "is a LyCORIS network (a kind of LoRA)"),
    (("control_model.", "controlnet_", "input_hint_block"), "is a ControlNet"),
    (("motion_modules.",), "is an AnimateDiff motion module"),
    (("emb_params", "string_to_param"), "is a textual inversion embedding"),
)
OTHER_NETWORKS = (
    (("joint_blocks.0.",), "is a Stable Diffusion 3 checkpoint"),
    (("double_blocks.0.img_attn",), "is a Flux checkpoint or a relative of it"),
    (("clip_txt_mapper.", "clip_txt_pooled_mapper."), "is a Stable Cascade checkpoint"),
    (("cond_stage_model.roberta.",), "is an AltDiffusion checkpoint"),
    (("time_mix_blocks.", "time_stack."), "is a Stable Video Diffusion checkpoint"),
    (("depth_model.",), "is an SD 2 depth checkpoint"),
    (("noise_augmentor.", "embedder.model.visual."), "is an SD 2 unCLIP checkpoint"),
    (("edm_vpred.sigma_max", "edm_mean"), "is an EDM checkpoint (Playground, CosXL)"),
)
CHANNELS = {9: "inpainting checkpoint", 8: "InstructPix2Pix checkpoint", 7: "upscaler", 5: "depth checkpoint"}


def identify(shapes: Shapes) -> Family | str:
    """The family of a checkpoint in the original layout, or what the file is instead ("is an SDXL refiner").

    Nothing is read but names and shapes, so it is as quick for a header as for loaded tensors.
    """
    if not any(name.startswith(UNET) for name in shapes):
        return _without_unet(shapes)
    found = _first(shapes, OTHER_NETWORKS) or _first(shapes, PARTS[2:4])
    if found:
        return found
    if f"{UNET}x_embedder.proj.weight" in shapes:
        return "is a Stable Diffusion 3 checkpoint or another transformer"
    family = _text_family(shapes)
    conv_in = shapes.get(f"{UNET}input_blocks.0.0.weight", ())
    if len(conv_in) != 4:
        return "holds a network that is no SD UNet"
    if conv_in[1] != 4:
        kind = CHANNELS.get(conv_in[1], f"checkpoint with {conv_in[1]} input channels")
        return f"is an {family.label if isinstance(family, Family) else 'SD'} {kind}"
    if isinstance(family, str):
        return family
    if family is SDXL and f"{UNET}middle_block.1.norm.weight" not in shapes:
        return "is an SSD-1B or Segmind checkpoint (a distilled SDXL)"
    if not any(name.startswith(f"{VAE}decoder.") for name in shapes):
        return f"is an {family.label} checkpoint without a VAE"
    return family


def _text_family(shapes: Shapes) -> Family | str:
    """The family by its text encoders, or why there is none."""
    if "conditioner.embedders.1.model.ln_final.weight" in shapes:
        return SDXL
    context = next(
        (shape[-1] for name, shape in shapes.items() if name.endswith(".attn2.to_k.weight") and shape), 0
    )
    if "conditioner.embedders.0.model.ln_final.weight" in shapes:
        # The refiner has one text encoder, as SD 2 Turbo has, but conditions on sizes as well.
        return "is an SDXL refiner" if f"{UNET}label_emb.0.0.weight" in shapes else SD2
    if "cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight" in shapes:
        return SD2
    if any(name.startswith("cond_stage_model.transformer.") for name in shapes):
        return SD1
    return f"holds a UNet (context width {context}) without its text encoder"


def _without_unet(shapes: Shapes) -> str:
    found = _first(shapes, PARTS) or _first(shapes, OTHER_NETWORKS)
    if found:
        return found
    names = set(shapes)
    if "down_blocks.0.resnets.0.norm1.weight" in names and "conv_in.weight" in names:
        return "is the UNet of a Diffusers folder; give the folder that holds model_index.json"
    if any(name.startswith(("encoder.down", "decoder.up", VAE)) for name in names):
        return "is a VAE"
    if {"clip_l", "clip_g"} & names:
        return "is a textual inversion embedding"
    if any(name.startswith(("text_model.", "cond_stage_model.", "conditioner.")) for name in names):
        return "is a text encoder"
    if "input_blocks.0.0.weight" in names:
        return "is a UNet alone, without VAE and text encoder"
    if any("transformer_blocks.0." in name or name.startswith("blocks.0.") for name in names):
        return "is a transformer network of another family"
    if any(name.startswith(("model.0.", "conv_first.", "body.0.")) for name in names):
        return "is an image upscaler"
    few = ", ".join(sorted(names)[:3])
    return f"holds no model that is known (tensors: {few[:160]}{', …' if len(names) > 3 else ''})"


def _first(shapes: Shapes, table: Iterable[tuple[tuple[str, ...], str]]) -> str | None:
    names = "\n".join(shapes)  # one search through all names is 50 times quicker than one a name
    return next((what for signs, what in table if any(sign in names for sign in signs)), None)
