"""Random models: the published architectures, the same weights from the same seed, finite activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import clearway
from clearway.device import Device
from clearway.errors import RequestError
from clearway.measure.random_model import _PLANS, NAMES, random_model
from clearway.models.build import classes, diffusers_module, text_module
from clearway.types import Precision

CPU = Device("cpu")


@pytest.fixture(scope="module", params=["tiny-sd15", "tiny-sdxl"])
def model(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param, CPU, Precision())


def test_it_draws_pictures_that_depend_on_seed_and_words(model: Any) -> None:
    def draw(seed: int, prompt: str) -> np.ndarray:
        order = clearway.Request(prompt=prompt, seed=seed, width=64, height=64, steps=2)
        return clearway.generate(order, model).images

    first = draw(1, "a cat")
    assert np.array_equal(first, draw(1, "a cat"))
    assert not np.array_equal(first, draw(2, "a cat")) and not np.array_equal(first, draw(1, "a dog"))
    assert first.std() > 10 and (first == 0).mean() + (first == 255).mean() < 0.2


def test_the_noise_estimate_is_as_wide_as_a_trained_one(model: Any) -> None:
    sample = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    width = model.unet.config.cross_attention_dim
    added = {"text_embeds": torch.zeros(2, 32), "time_ids": torch.zeros(2, 6)}
    with torch.inference_mode():
        out = model.unet(
            sample, torch.tensor(500.0), torch.randn(2, 77, width), added_cond_kwargs=added
        ).sample
    assert 0.5 < float(out.std()) < 2


def test_the_seed_decides_the_weights() -> None:
    def first(seed: int, dtype: str = "float32") -> torch.Tensor:
        made = random_model("tiny-sd15", CPU, Precision(unet=dtype), seed)
        return made.unet.conv_in.weight.float()

    assert torch.equal(first(3), first(3)) and not torch.equal(first(3), first(4))
    assert torch.equal(first(3, "float16"), first(3).half().float())


def test_an_unknown_family_is_a_sentence() -> None:
    with pytest.raises(RequestError, match="nearest: 'sdxl'"):
        random_model("sdx", CPU, Precision())
    assert "sd15-random" in NAMES and "sdxl-random" in NAMES


@pytest.mark.parametrize(
    ("family", "unet", "vae", "texts"),
    # parameters in millions, as the published SD 1.5 and SDXL base checkpoints have them
    [("sd15", 859.5, 83.65, [123.1]), ("sdxl", 2567.5, 83.65, [123.1, 694.7])],
)
def test_the_architectures_are_the_published_ones(
    family: str, unet: float, vae: float, texts: list[float]
) -> None:
    plan, known = _PLANS[family], classes()

    def millions(module: torch.nn.Module) -> float:
        return sum(one.numel() for one in module.parameters()) / 1e6

    assert millions(diffusers_module(known.unet, plan.unet, family)) == pytest.approx(unet, abs=0.05)
    assert millions(diffusers_module(known.vae, plan.vae, family)) == pytest.approx(vae, abs=0.01)
    made = [millions(text_module(one, "gelu" in one["hidden_act"][:4], family)) for one in plan.texts]
    assert made == pytest.approx(texts, abs=0.1)
