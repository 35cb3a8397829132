"""Whole pipelines of Flux and SD 3 from tiny parts of the real classes, and how they draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from builders import VOCABULARY
from dit_builders import seeded, tiny_flux, tiny_sd3, tiny_sd35

WORDS = ("▁", "▁a", "▁red", "▁blue", "▁cube", *"abcdefghijklmnopqrstuvwxyz")


def t5() -> dict[str, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.models.t5.configuration_t5 import T5Config
    from transformers.models.t5.modeling_t5 import T5EncoderModel

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -99.0)]
    pieces += [(word, -1.0 - number) for number, word in enumerate(WORDS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    config = T5Config(
        vocab_size=len(pieces), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, is_gated_act=True
    )
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        "tokenizer": PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **named),
        "text_encoder": seeded(T5EncoderModel(config), 3),
    }


def clip(width: int, projected: bool) -> dict[str, Any]:
    from transformers import CLIPTokenizer
    from transformers.models.clip.configuration_clip import CLIPTextConfig
    from transformers.models.clip.modeling_clip import CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=width,
        bos_token_id=49406,
        eos_token_id=49407,
        pad_token_id=49407,
    )
    kind = CLIPTextModelWithProjection if projected else CLIPTextModel
    tokenizer = CLIPTokenizer.from_pretrained(VOCABULARY, model_max_length=77, pad_token="<|endoftext|>")
    return {"tokenizer": tokenizer, "text_encoder": seeded(kind(config), 4)}


def vae() -> Any:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    made = AutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.36,
        shift_factor=0.1,
    )
    return seeded(made, 5, deviation=0.08)


def scheduler() -> Any:
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler()


def numbered(number: int, parts: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}_{number}": part for name, part in parts.items()}


def flux() -> Any:
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    return FluxPipeline(
        scheduler=scheduler(),
        vae=vae(),
        transformer=tiny_flux(pooled_projection_dim=32),
        **clip(32, False),
        **numbered(2, t5()),
    )


def sd3(maker: Any) -> Any:
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline(
        scheduler=scheduler(),
        vae=vae(),
        transformer=maker(pooled_projection_dim=32),
        **clip(16, True),
        **numbered(2, clip(16, True)),
        **numbered(3, t5()),
    )


PIPELINES = {"flux": flux, "sd3": lambda: sd3(tiny_sd3), "sd35": lambda: sd3(tiny_sd35)}


def draw(pipe: Any, **more: Any) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    done = pipe(
        prompt=["a red cube", "a blue cube"],
        height=24,
        width=16,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
        max_sequence_length=16,
        **more,
    )
    pictures: np.ndarray = done.images
    return pictures
