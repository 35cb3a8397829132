"""Write the trained parts as a Diffusers folder in half precision.

  python export.py --work WORK --model MODEL

text_encoder keeps the published SD 1.x names (prefix ``text_model.``), which transformers 4 and 5 both
read. The scheduler is SD 1.x's PNDM configuration. vae_decoder.pt is taken if it is there, vae.pt
otherwise.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from text import text_config
from unet import unet_config
from vae import vae_config

LARGEST_BYTES = 24 * 2**20


def write(folder: Path, name: str, state: dict[str, torch.Tensor], config: dict, file: str) -> None:
    """One part: config.json and its weights."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    half = {key: value.half().contiguous() for key, value in state.items()}
    save_file(half, folder / name / file, metadata={"format": "pt"})
    (folder / name / file).chmod(0o644)
    (folder / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def export(work: Path, model: Path) -> None:
    """Write MODEL; raises ValueError if it is larger than 24 MiB."""
    decoder = work / "vae_decoder.pt"
    vae = torch.load(decoder if decoder.exists() else work / "vae.pt", map_location="cpu")
    config = {"_class_name": "AutoencoderKL", **vae_config()}
    write(model, "vae", vae, config, "diffusion_pytorch_model.safetensors")
    unet = torch.load(work / "unet.pt", map_location="cpu")
    config = {"_class_name": "UNet2DConditionModel", **unet_config()}
    write(model, "unet", unet, config, "diffusion_pytorch_model.safetensors")
    published = torch.load(work / "text.pt", map_location="cpu")["text"]
    state = {f"text_model.{name}": value for name, value in published.items()}
    config = {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model", **text_config()}
    write(model, "text_encoder", state, config, "model.safetensors")
    scheduler = {
        "_class_name": "PNDMScheduler",
        "num_train_timesteps": 1000,
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "prediction_type": "epsilon",
        "skip_prk_steps": True,
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "clip_sample": False,
        "timestep_spacing": "leading",
    }
    (model / "scheduler").mkdir(exist_ok=True)
    (model / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler, indent=2) + "\n")
    (model / "tokenizer").mkdir(exist_ok=True)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(work / "tokenizer" / name, model / "tokenizer" / name)
    index = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": "0.42.1",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "PNDMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (model / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    print(f"{model.name}: {size / 2**20:.2f} MiB")
    if size > LARGEST_BYTES:
        raise ValueError(f"the model has {size} bytes; at most {LARGEST_BYTES} are allowed")


def main() -> None:
    """Read the arguments and export."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    arguments = parser.parse_args()
    export(arguments.work, arguments.model)


if __name__ == "__main__":
    main()
