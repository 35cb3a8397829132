"""Diffusers' own pipelines around tiny models of the real classes, as a user would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.controlnets.controlnet import ControlNetModel
from diffusers.pipelines.controlnet.pipeline_controlnet import StableDiffusionControlNetPipeline
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_img2img import (
    StableDiffusionImg2ImgPipeline,
)
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_inpaint import (
    StableDiffusionInpaintPipeline,
)
from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import StableDiffusionXLPipeline
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from PIL import Image

SIDE = 64
KINDS = ("text2img", "img2img", "inpaint", "sdxl", "controlnet", "two controlnets")


def pipeline(folders: dict[str, Path], kind: str) -> tuple[Any, dict[str, Any]]:
    """(pipeline, what its call takes beside the prompt) of one of KINDS."""
    given: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np", "guidance_scale": 4.0}
    sized = {"height": SIDE, "width": SIDE}
    usual: dict[str, Any] = {"low_cpu_mem_usage": False}
    usual["scheduler"] = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
    )
    if kind == "sdxl":
        pipe = StableDiffusionXLPipeline.from_pretrained(folders["sdxl"], **usual)
        given |= sized
    else:
        base = StableDiffusionPipeline.from_pretrained(
            folders["sd1"],
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
            **usual,
        )
        parts = base.components
        if kind == "text2img":
            pipe, given = base, given | sized
        elif kind == "img2img":
            pipe = StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False)
            given |= {"image": picture(1), "strength": 0.9}
        elif kind == "inpaint":
            pipe = StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)
            given |= {"image": picture(1), "mask_image": picture(2).convert("L"), "strength": 0.9} | sized
        else:
            nets = [controlnet(base.unet, seed) for seed in (1, 2)]
            two = kind == "two controlnets"
            pipe = StableDiffusionControlNetPipeline(
                **parts, controlnet=nets if two else nets[0], requires_safety_checker=False
            )
            given |= {"image": [picture(1), picture(2)] if two else picture(1)}
            given |= {"controlnet_conditioning_scale": [0.8, 0.5] if two else 0.8}
    pipe.set_progress_bar_config(disable=True)
    return pipe, given


def draw(pipe: Any, given: dict[str, Any], prompt: str = "a red cube", seed: int = 3) -> np.ndarray:
    """The picture (H, W, 3) in 0..1."""
    words = None if "prompt_embeds" in given else prompt
    found: np.ndarray = pipe(words, generator=torch.Generator().manual_seed(seed), **given).images[0]
    return found


def controlnet(unet: Any, seed: int) -> Any:
    """A ControlNet for this UNet whose zero convolutions are not zero."""
    torch.manual_seed(seed)
    net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 16, 32, 32)).eval()
    for block in (*net.controlnet_down_blocks, net.controlnet_mid_block):
        torch.nn.init.normal_(block.weight, std=0.05)
    torch.nn.init.normal_(net.controlnet_cond_embedding.conv_out.weight, std=0.05)
    return net.requires_grad_(False)


def lora(unet: Any, seed: int) -> dict[str, torch.Tensor]:
    """A LoRA of rank 2 for every attention's queries, keys and values, under Diffusers' names."""
    drawn = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in unet.named_modules():
        if name.endswith(("to_q", "to_k", "to_v")):
            for letter, shape in (("A", (2, module.in_features)), ("B", (module.out_features, 2))):
                found[f"unet.{name}.lora_{letter}.weight"] = 0.2 * torch.randn(shape, generator=drawn)
    return found


def image_adapter(unet: Any, width: int, seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """An IP-Adapter for embeddings (B, 1, width) of images."""
    drawn = torch.Generator().manual_seed(seed)
    context = unet.config.cross_attention_dim
    names = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    layers = {}
    for number, name in enumerate(names):
        to_k = unet.get_submodule(name.removesuffix(".processor")).to_k
        for letter in "kv":
            weight = 0.2 * torch.randn(to_k.weight.shape, generator=drawn)
            layers[f"{2 * number + 1}.to_{letter}_ip.weight"] = weight
    proj = {
        "proj.weight": torch.randn(4 * context, width, generator=drawn),
        "proj.bias": torch.zeros(4 * context),
        "norm.weight": torch.ones(context),
        "norm.bias": torch.zeros(context),
    }
    return {"image_proj": proj, "ip_adapter": layers}


def picture(seed: int) -> Image.Image:
    """Noise."""
    drawn = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    return Image.fromarray(drawn)
