"""Which family a checkpoint file belongs to, from the names and shapes of its tensors alone.

Order and keys as the WebUI's (reference: `a1111.md` §6); what Clearway does not draw with is named and not
guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clearway.models.escape import shown
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
    names = _Names(shapes)
    if not names.begin(UNET):
        return _without_unet(names)
    found = names.first(OTHER_NETWORKS) or names.first(PARTS[2:4])
    if found:
        return found
    if f"{UNET}x_embedder.proj.weight" in shapes:
        return "is a Stable Diffusion 3 checkpoint or another transformer"
    family = _text_family(names, shapes)
    conv_in = shapes.get(f"{UNET}input_blocks.0.0.weight")
    if conv_in is None and names.begin(f"{UNET}input_blocks."):
        conv_in = (0, 4, 3, 3)  # an SD UNet that lacks it, which its key rules will say
    if conv_in is None or len(conv_in) != 4:
        return "holds a network that is no SD UNet"
    if conv_in[1] != 4:
        kind = CHANNELS.get(conv_in[1], f"checkpoint with {conv_in[1]} input channels")
        return f"is an {family.label if isinstance(family, Family) else 'SD'} {kind}"
    if isinstance(family, str):
        return family
    if family is SDXL and not names.begin(f"{UNET}middle_block.1."):
        return "is an SSD-1B or Segmind checkpoint (a distilled SDXL)"
    if not names.begin(f"{VAE}decoder."):
        return f"is an {family.label} checkpoint without a VAE"
    return family


class _Names:
    """Tensor names as one text: one search through all is 50 times quicker than one a name."""

    def __init__(self, shapes: Shapes) -> None:
        self.all = set(shapes)
        self._text = "\n" + "\n".join(shapes)

    def begin(self, *starts: str) -> bool:
        """Whether any name begins with any of `starts`."""
        return any(f"\n{start}" in self._text for start in starts)

    def first(self, table: Iterable[tuple[tuple[str, ...], str]]) -> str | None:
        """What the first row says of which any sign is in any name."""
        return next((what for signs, what in table if any(sign in self._text for sign in signs)), None)


def _text_family(names: _Names, shapes: Shapes) -> Family | str:
    """The family by its text encoders, each known by any of its tensors; or why there is none."""
    if names.begin("conditioner.embedders.1.model."):
        return SDXL
    if names.begin("conditioner.embedders.0.model."):
        # The refiner has one text encoder, as SD 2 Turbo has, but conditions on sizes as well.
        return "is an SDXL refiner" if names.begin(f"{UNET}label_emb.") else SD2
    if names.begin("cond_stage_model.model."):
        return SD2
    if names.begin("cond_stage_model.transformer."):
        return SD1
    context = next(
        (shape[-1] for name, shape in shapes.items() if name.endswith(".attn2.to_k.weight") and shape), 0
    )
    return f"holds a UNet (context width {context}) without its text encoder"


def _without_unet(names: _Names) -> str:
    found = names.first(PARTS) or names.first(OTHER_NETWORKS)
    if found:
        return found
    if "down_blocks.0.resnets.0.norm1.weight" in names.all and "conv_in.weight" in names.all:
        return "is the UNet of a Diffusers folder; give the folder that holds model_index.json"
    if names.begin("model_ema."):
        return "holds its UNet only as a training average (model_ema.…), which is not read"
    if names.begin("encoder.down", "decoder.up", VAE):
        return "is a VAE"
    if {"clip_l", "clip_g"} & names.all:
        return "is a textual inversion embedding"
    if names.begin("text_model.", "cond_stage_model.", "conditioner."):
        return "is a text encoder"
    if "input_blocks.0.0.weight" in names.all:
        return "is a UNet alone, without VAE and text encoder"
    if names.begin("blocks.0.") or names.first([(("transformer_blocks.0.",), "")]) is not None:
        return "is a transformer network of another family"
    if names.begin("model.0.", "conv_first.", "body.0."):
        return "is an image upscaler"
    few = ", ".join(shown(name) for name in sorted(names.all)[:3])
    return f"holds no model that is known (tensors: {few[:160]}{', …' if len(names.all) > 3 else ''})"
