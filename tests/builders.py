"""Tiny models of the real classes, weights seeded: as Diffusers folders, and in the original layout.

The way into the original layout is written down as tables of names, from the rules that Diffusers documents
for its export script, and knows nothing of Clearway's loader, which goes the other way.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import clearway

VOCABULARY = Path(clearway.__file__).parent / "models" / "embedded" / "tokenizer"
SCHEDULER = {
    "_class_name": "PNDMScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "num_train_timesteps": 1000,
}


def tiny_sd1(folder: Path, **scheduler: Any) -> Path:
    """`folder` as a Diffusers folder of a tiny SD 1.x model; `scheduler` changes scheduler_config.json."""
    import torch

    torch.manual_seed(1)
    unet = _unet(cross_attention_dim=32, attention_head_dim=8)
    encoder = _text(32, "quick_gelu")
    return _write(
        folder, "StableDiffusionPipeline", {"unet": unet, "vae": _vae(), "text_encoder": encoder}, scheduler
    )


def tiny_sd2(folder: Path, **scheduler: Any) -> Path:
    """`folder` as a Diffusers folder of a tiny SD 2.x model."""
    import torch

    torch.manual_seed(2)
    unet = _unet(cross_attention_dim=32, attention_head_dim=1, use_linear_projection=True)
    parts = {"unet": unet, "vae": _vae(), "text_encoder": _text(32, "gelu")}
    return _write(folder, "StableDiffusionPipeline", parts, scheduler, pad=("!",))


def tiny_sdxl(folder: Path, **scheduler: Any) -> Path:
    """`folder` as a Diffusers folder of a tiny SDXL model: 3 levels, the first without attention."""
    import torch

    torch.manual_seed(3)
    unet = _unet(
        block_out_channels=(32, 64, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=(1, 1, 2),
        cross_attention_dim=96,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 48,
    )
    parts = {
        "unet": unet,
        "vae": _vae(scaling_factor=0.13025),
        "text_encoder": _text(32, "quick_gelu"),
        "text_encoder_2": _text(64, "gelu", projection=48),
    }
    return _write(folder, "StableDiffusionXLPipeline", parts, scheduler, pad=("<|endoftext|>", "!"))


def _unet(**config: Any) -> Any:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    usual = {
        "block_out_channels": (32, 64, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 2,
        "sample_size": 8,
    }
    return UNet2DConditionModel(**(usual | config))


def _vae(**config: Any) -> Any:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    usual = {
        "block_out_channels": (32, 32, 64, 64),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "latent_channels": 4,
    }
    return AutoencoderKL(**(usual | config))


def _text(width: int, activation: str, projection: int | None = None) -> Any:
    from transformers.models.clip.configuration_clip import CLIPTextConfig
    from transformers.models.clip.modeling_clip import CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=1,
        hidden_act=activation,
        projection_dim=projection or width,
        bos_token_id=49406,
        eos_token_id=49407,
        pad_token_id=49407,
    )
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def _write(
    folder: Path,
    pipeline: str,
    parts: dict[str, Any],
    scheduler: dict[str, Any],
    pad: tuple[str, ...] = ("<|endoftext|>",),
) -> Path:
    import torch

    index: dict[str, Any] = {"_class_name": pipeline, "scheduler": ["diffusers", "PNDMScheduler"]}
    for name, module in parts.items():
        with torch.no_grad():
            for key, weight in module.named_parameters():
                if key.endswith("bias"):  # Diffusers leaves many at zero, which would hide a swap
                    weight.normal_(std=0.02)
        module.save_pretrained(folder / name)
        library = "diffusers" if name in ("unet", "vae") else "transformers"
        index[name] = [library, type(module).__name__]
    for number, token in enumerate(pad):
        place = folder / ("tokenizer_2" if number else "tokenizer")
        place.mkdir()
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(VOCABULARY / name, place / name)
        write_json(
            place / "tokenizer_config.json",
            {
                "tokenizer_class": "CLIPTokenizer",
                "bos_token": "<|startoftext|>",
                "eos_token": "<|endoftext|>",
                "unk_token": "<|endoftext|>",
                "pad_token": token,
                "model_max_length": 77,
            },
        )
        index[place.name] = ["transformers", "CLIPTokenizer"]
    write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER | scheduler)
    write_json(folder / "model_index.json", index)
    return folder


def write_json(path: Path, value: Any) -> None:
    """Writes JSON, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def original(folder: Path) -> dict[str, Any]:
    """The tensors of a tiny model's folder under the names of the original layouts (ldm, for SDXL sgm)."""
    from safetensors.torch import load_file

    def part(name: str, stem: str) -> dict[str, Any]:
        return load_file(folder / name / f"{stem}.safetensors")

    sdxl = (folder / "text_encoder_2").exists()
    activation = json.loads((folder / "text_encoder" / "config.json").read_text())["hidden_act"]
    tensors = {
        f"model.diffusion_model.{key}": value
        for key, value in original_unet(part("unet", "diffusion_pytorch_model")).items()
    }
    tensors |= {
        f"first_stage_model.{key}": value
        for key, value in original_vae(part("vae", "diffusion_pytorch_model")).items()
    }
    first = part("text_encoder", "model")
    if activation == "gelu":
        tensors |= {f"cond_stage_model.model.{key}": value for key, value in open_clip(first, 32).items()}
        return tensors
    prefix = "conditioner.embedders.0.transformer." if sdxl else "cond_stage_model.transformer."
    tensors |= {
        f"{prefix}text_model.{key.removeprefix('text_model.')}": value for key, value in first.items()
    }
    if sdxl:
        second = open_clip(part("text_encoder_2", "model"), 64)
        tensors |= {f"conditioner.embedders.1.model.{key}": value for key, value in second.items()}
    return tensors


def original_unet(state: dict[str, Any]) -> dict[str, Any]:
    """Diffusers' UNet names -> input_blocks, middle_block, output_blocks; 2 residual blocks a level."""
    levels = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("down_blocks."))
    table = [
        ("time_embedding.linear_1.", "time_embed.0."),
        ("time_embedding.linear_2.", "time_embed.2."),
        ("add_embedding.linear_1.", "label_emb.0.0."),
        ("add_embedding.linear_2.", "label_emb.0.2."),
        ("conv_in.", "input_blocks.0.0."),
        ("conv_norm_out.", "out.0."),
        ("conv_out.", "out.2."),
        ("mid_block.resnets.0.", "middle_block.0."),
        ("mid_block.attentions.0.", "middle_block.1."),
        ("mid_block.resnets.1.", "middle_block.2."),
    ]
    for i in range(levels):
        for j in range(2):
            table.append((f"down_blocks.{i}.resnets.{j}.", f"input_blocks.{3 * i + j + 1}.0."))
            table.append((f"down_blocks.{i}.attentions.{j}.", f"input_blocks.{3 * i + j + 1}.1."))
        for j in range(3):
            table.append((f"up_blocks.{i}.resnets.{j}.", f"output_blocks.{3 * i + j}.0."))
            table.append((f"up_blocks.{i}.attentions.{j}.", f"output_blocks.{3 * i + j}.1."))
        place = 2 if f"up_blocks.{i}.attentions.0.norm.weight" in state else 1
        table.append((f"down_blocks.{i}.downsamplers.0.conv.", f"input_blocks.{3 * (i + 1)}.0.op."))
        table.append((f"up_blocks.{i}.upsamplers.0.", f"output_blocks.{3 * i + 2}.{place}."))
    inner = [
        ("norm1", "in_layers.0"),
        ("conv1", "in_layers.2"),
        ("norm2", "out_layers.0"),
        ("conv2", "out_layers.3"),
        ("time_emb_proj", "emb_layers.1"),
        ("conv_shortcut", "skip_connection"),
    ]
    return {_renamed(key, table, inner if "resnets" in key else []): value for key, value in state.items()}


def original_vae(state: dict[str, Any]) -> dict[str, Any]:
    """Diffusers' VAE names -> ldm's; the middle attention's linear layers become 1 x 1 convolutions."""
    levels = 4
    layers = sum(f"encoder.down_blocks.0.resnets.{j}.conv1.weight" in state for j in range(4))
    table = [("encoder.conv_norm_out.", "encoder.norm_out."), ("decoder.conv_norm_out.", "decoder.norm_out.")]
    for i in range(levels):
        for j in range(layers):
            table.append((f"encoder.down_blocks.{i}.resnets.{j}.", f"encoder.down.{i}.block.{j}."))
        for j in range(layers + 1):
            table.append((f"decoder.up_blocks.{i}.resnets.{j}.", f"decoder.up.{levels - 1 - i}.block.{j}."))
        table.append((f"encoder.down_blocks.{i}.downsamplers.0.", f"encoder.down.{i}.downsample."))
        table.append((f"decoder.up_blocks.{i}.upsamplers.0.", f"decoder.up.{levels - 1 - i}.upsample."))
    for side in ("encoder", "decoder"):
        for j in range(2):
            table.append((f"{side}.mid_block.resnets.{j}.", f"{side}.mid.block_{j + 1}."))
        table.append((f"{side}.mid_block.attentions.0.", f"{side}.mid.attn_1."))
    inner = [
        ("group_norm.", "norm."),
        ("to_q.", "q."),
        ("to_k.", "k."),
        ("to_v.", "v."),
        ("to_out.0.", "proj_out."),
    ]
    found = {}
    for key, value in state.items():
        attention = ".attentions." in key
        new = _renamed(key, table, inner if attention else [("conv_shortcut", "nin_shortcut")])
        found[new] = value[:, :, None, None] if attention and value.ndim == 2 else value
    return found


def open_clip(state: dict[str, Any], width: int) -> dict[str, Any]:
    """transformers' CLIP text names -> OpenCLIP's: query, key and value fused, the projection transposed."""
    import torch

    outside = {
        "embeddings.token_embedding.weight": "token_embedding.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        "final_layer_norm.weight": "ln_final.weight",
        "final_layer_norm.bias": "ln_final.bias",
    }
    inner = [
        ("layer_norm1", "ln_1"),
        ("layer_norm2", "ln_2"),
        ("mlp.fc1", "mlp.c_fc"),
        ("mlp.fc2", "mlp.c_proj"),
        ("self_attn.out_proj", "attn.out_proj"),
    ]
    plain = {key.removeprefix("text_model."): value for key, value in state.items()}
    found = {"logit_scale": torch.tensor(4.6)}
    for key, value in plain.items():
        if key == "text_projection.weight":
            found["text_projection"] = value.t().contiguous()
        elif key in outside:
            found[outside[key]] = value
        elif ".q_proj." in key:
            fused = torch.cat([plain[key.replace("q_proj", f"{letter}_proj")] for letter in "qkv"])
            layer, kind = key.split(".")[2], key.rpartition(".")[2]
            found[f"transformer.resblocks.{layer}.attn.in_proj_{kind}"] = fused
        elif ".k_proj." not in key and ".v_proj." not in key:
            found[_renamed(key, [("encoder.layers.", "transformer.resblocks.")], inner)] = value
    assert found["token_embedding.weight"].shape[1] == width
    return found


def _renamed(key: str, starts: list[tuple[str, str]], inner: list[tuple[str, str]]) -> str:
    for old, new in starts:
        if key.startswith(old):
            key = new + key[len(old) :]
            break
    for old, new in inner:
        key = key.replace(old, new)
    return key


def save_original(tensors: dict[str, Any], path: Path, metadata: dict[str, str] | None = None) -> Path:
    """Writes tensors as a .safetensors file."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: value.clone().contiguous() for key, value in tensors.items()},
        path,
        {"format": "pt"} | (metadata or {}),
    )
    return path
