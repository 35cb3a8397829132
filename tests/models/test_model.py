"""Model: what is computed late."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from clearway.models import load
from clearway.models.model import dtype_of


def test_the_hash_is_computed_when_asked_for(files: dict[str, Path]) -> None:
    model = load(files["sd1"], device="cpu")
    assert "hash" not in vars(model)
    assert model.hash == hashlib.sha256(files["sd1"].read_bytes()).hexdigest()[:10]


def test_a_folders_hash_is_that_of_its_unet(folders: dict[str, Path]) -> None:
    weights = folders["sdxl"] / "unet" / "diffusion_pytorch_model.safetensors"
    model = load(folders["sdxl"], device="cpu")
    assert model.hash == hashlib.sha256(weights.read_bytes()).hexdigest()[:10]
    assert (model.latent_channels, model.latent_factor) == (4, 8)


def test_the_dtype_is_that_of_the_networks_weights(folders: dict[str, Path]) -> None:
    model = load(folders["sd1"], device="cpu")
    assert model.dtype == model.unet.dtype and dtype_of(model.vae) == model.vae.dtype
    model.unet.half()
    assert model.dtype == torch.float16 and dtype_of(model.vae) == torch.float32
