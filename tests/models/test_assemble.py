"""Parts that are sound by themselves and do not fit each other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clearway.device import Device
from clearway.errors import RequestError
from clearway.models.assemble import assemble
from clearway.models.family import SD1, SDXL, Family
from clearway.models.prediction import Training
from clearway.types import Defaults, Precision

TEXT = {"vocab_size": 49408, "max_position_embeddings": 77, "hidden_size": 32, "projection_dim": 32}
UNET = {
    "cross_attention_dim": 32, "in_channels": 4, "out_channels": 4, "addition_time_embed_dim": None,
    "projection_class_embeddings_input_dim": None,
}  # fmt: skip
VAE = {
    "latent_channels": 4, "out_channels": 3, "block_out_channels": (32, 32, 64, 64), "scaling_factor": 0.5,
    "shift_factor": None,
}  # fmt: skip
BIG = {"cross_attention_dim": 96, "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 96}


def module(config: dict[str, Any]) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**config))


def made(family: Family = SD1, unet: Any = None, vae: Any = None, text: Any = None, **more: Any) -> Any:
    texts = [TEXT | (text or {})]
    if family is SDXL:
        unet = BIG | (unet or {})
        texts.append(TEXT | {"hidden_size": 64, "projection_dim": 48} | (text or {}))
    return assemble(
        family=family,
        tokenizers=tuple(SimpleNamespace(size=49408) for _ in texts),  # type: ignore[misc]
        text_encoders=tuple(module(config) for config in texts),
        unet=module(UNET | (unet or {})),
        vae=module(VAE | (vae or {})),
        **{
            "name": "m", "path": Path("m"), "weights_files": (), "training": Training(),
            "sigmas": torch.ones(2), "card": {}, "defaults": Defaults(8, 8, 1, 1.0, "Euler"),
            "device": Device("cpu"), "precision": Precision(), "notes": (),
        } | more,
    )  # fmt: skip


@pytest.mark.parametrize("family", [SD1, SDXL])
def test_parts_that_fit(family: Family) -> None:
    model = made(family, name="a\n", notes=("b\x1b",), card={"title": "c\ud800"})
    assert (model.latent_scale, model.latent_shift) == (0.5, 0.0)
    assert (model.name, model.title, model.notes) == (r"a\n", r"c\ud800", (r"b\x1b",))
    assert made(family, vae={"shift_factor": 0.25}).latent_shift == 0.25


def test_a_width_a_level_is_one_width() -> None:
    assert made(unet={"cross_attention_dim": [32, 32]})
    with pytest.raises(RequestError, match=r"its UNet reads \[32, 48\]"):
        made(unet={"cross_attention_dim": [32, 48]})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"text": {"vocab_size": 1000}}, "knows 1000 tokens, and its tokenizer gives 49408"),
        (
            {"text": {"max_position_embeddings": 40}},
            "reads 40 tokens at once, and prompts come in windows of 77",
        ),
        ({"text": {"hidden_size": 48}}, "gives 48 values a token, and its UNet reads 32"),
        ({"unet": {"out_channels": 8}}, "its UNet has 4 input and 8 output channels, and SD 1.x has 4"),
        ({"vae": {"latent_channels": 16}}, "its VAE makes 3 channels of 16, and SD 1.x has 3 and 4"),
        ({"vae": {"out_channels": 1}}, "its VAE makes 1 channels of 4"),
        ({"vae": {"block_out_channels": (32, 64)}}, "makes 2 pixels of a latent's side, and SD 1.x has 8"),
        ({"family": SDXL, "unet": {"cross_attention_dim": 64}}, r"gives 32 \+ 64 values a token"),
        ({"family": SDXL, "text": {"projection_dim": 40}}, r"projection \(40\) and six sizes give 88 values"),
        (
            {"family": SDXL, "unet": {"addition_time_embed_dim": None}},
            "give 48 values, and its UNet reads 96",
        ),
    ],
)
def test_parts_that_do_not_fit(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=f"^m: .*{sentence}") as error:
        made(**change)
    assert "\n" not in str(error.value)
