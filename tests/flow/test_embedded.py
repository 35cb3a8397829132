"""The model that ships in the package draws what it is asked for: colours where they must be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import clearway
from clearway import Request
from clearway.models import Model
from clearway.ops import _cpp, attention_native

FOLDER = Path(clearway.__file__).parent / "models" / "embedded"

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def model() -> Model:
    return clearway.load("embedded", device="cpu")


def draw(model: Model, prompt: str, seed: int) -> np.ndarray:
    return clearway.generate(Request(prompt=prompt, seed=seed), model).images[0].astype(float)


def middle(image: np.ndarray) -> np.ndarray:
    height, width, _ = image.shape
    return image[height * 3 // 8 : height * 5 // 8, width * 3 // 8 : width * 5 // 8].mean(axis=(0, 1))


def corners(image: np.ndarray) -> np.ndarray:
    return np.concatenate([image[:8, :8], image[:8, -8:], image[-8:, :8], image[-8:, -8:]]).mean(axis=(0, 1))


@pytest.mark.skipif(_cpp.absent() is not None, reason=f"not here: {_cpp.absent()}")
def test_attention_in_cpp_draws_the_same(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through its compilation, its self-test and the recorded calls."""
    like = Request(prompt="a red apple", seed=1, steps=3)
    plain = clearway.generate(like, model)
    monkeypatch.setattr(attention_native, "QUICKER_CAPABILITY", (torch.backends.cpu.get_cpu_capability(),))
    made = clearway.generate(like, clearway.load("embedded", device="cpu"))
    assert "attention/native" not in plain.routes and made.routes["attention/native"] > 0
    difference = np.abs(made.images.astype(int) - plain.images.astype(int))
    assert difference.max() <= 1


def test_it_is_small_whole_and_licensed(model: Model) -> None:
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    assert size <= 24 * 2**20
    assert model.notes == ()
    for name in ("README.md", "NOTICE", "LICENSE"):
        assert (FOLDER / name).stat().st_size > 200
    assert "Microsoft" in (FOLDER / "NOTICE").read_text(encoding="utf-8")


def test_its_card_gives_the_defaults(model: Model) -> None:
    card = json.loads((FOLDER / "clearway.json").read_text(encoding="utf-8"))
    request = Request(prompt="x").resolved(model.defaults)
    assert (request.width, request.height, request.steps) == (card["width"], card["height"], card["steps"])
    assert (request.cfg_scale, request.sampler, request.schedule) == (
        card["cfg_scale"], card["sampler"], card["schedule"],
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_a_red_apple_is_red_on_white(model: Model, seed: int) -> None:
    image = draw(model, "a red apple", seed)
    red, green, blue = middle(image)
    assert red > 150 and red > green + 80 and red > blue + 50
    assert corners(image).min() > 230


def test_a_blue_heart_is_blue(model: Model) -> None:
    red, _, blue = middle(draw(model, "blue heart", 3))
    assert blue > 150 and blue > red + 80


@pytest.mark.parametrize(
    ("prompt", "channel"),
    [("a penguin on a green background", 1), ("a cat on a blue background", 2), ("pizza, red background", 0)],
)
def test_the_background_is_the_one_asked_for(model: Model, prompt: str, channel: int) -> None:
    colour = corners(draw(model, prompt, 5))
    assert all(colour[channel] > colour[other] + 25 for other in range(3) if other != channel)


def test_it_runs_in_diffusers_own_pipeline_too() -> None:
    """The folder is an ordinary Diffusers model: its own loader takes every part."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

    assert UNet2DConditionModel.from_pretrained(FOLDER, subfolder="unet").config.cross_attention_dim == 64
    assert AutoencoderKL.from_pretrained(FOLDER, subfolder="vae").config.scaling_factor == 0.18215
    assert CLIPTextModel.from_pretrained(FOLDER, subfolder="text_encoder").config.hidden_size == 64
    tokenizer = CLIPTokenizer.from_pretrained(FOLDER / "tokenizer")
    assert tokenizer("a photo of a cat").input_ids == [49406, 320, 1125, 539, 320, 2368, 49407]
