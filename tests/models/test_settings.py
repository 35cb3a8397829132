"""Settings of parts: what could not be computed with, or built to an end, is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import clearway
from clearway.errors import RequestError
from clearway.models.card import OVERRIDES
from clearway.models.settings import RULES, check, check_blocks, side_px

EMBEDDED = Path(clearway.__file__).parent / "models" / "embedded"


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_real_settings_are_sound(part: str) -> None:
    path = EMBEDDED / part / "config.json"
    if not path.is_file():
        pytest.skip("no embedded model here")
    check(part, json.loads(path.read_text()), "x")


def test_real_lists_are_sound() -> None:
    sdxl = {
        "attention_head_dim": [5, 10, 20], "num_attention_heads": None,
        "block_out_channels": [320, 640, 1280], "layers_per_block": 2, "norm_eps": 1e-05,
        "transformer_layers_per_block": [1, 2, 10], "sample_size": 128,
        "reverse_transformer_layers_per_block": None, "cross_attention_dim": 2048,
    }  # fmt: skip
    check("unet", sdxl, "x")
    check_blocks(sdxl, 1680, "x")
    check("unet", {"transformer_layers_per_block": [[1, 2], [2, 1]], "layers_per_block": [1, 2]}, "x")
    check("text_encoder", {"eos_token_id": 2, "bos_token_id": 0, "pad_token_id": None}, "x")
    check("vae", {"scaling_factor": 0.13025, "shift_factor": None}, "x")


def test_whatever_metadata_may_say_has_a_rule() -> None:
    assert all(set(keys) <= set(RULES[part]) for part, keys in OVERRIDES.items())


@pytest.mark.parametrize(
    ("part", "key", "values"),
    [
        ("unet", "attention_head_dim", [0, -1, "8", 2.0, True, [], [8, 0], {}]),
        ("unet", "block_out_channels", [[], None, "x", 32, [-32], [32.5], [1] * 2000]),
        ("unet", "layers_per_block", [0, -1, None, [], [0]]),
        ("unet", "sample_size", [0, -4, 10**9, 2049, "64", [64], [64, 64, 64], [64, 10**9]]),
        ("unet", "norm_eps", [0, -1e-5, "a", float("nan"), float("inf"), 10**400, None, True]),
        ("unet", "downsample_padding", [-1, 5, "x", None]),
        ("vae", "scaling_factor", [0, -1, "abc", None, float("nan"), float("inf")]),
        ("vae", "shift_factor", ["x", float("nan"), [0.1]]),
        ("text_encoder", "num_hidden_layers", [0, -1, 2.5, None, "12"]),
        ("text_encoder_2", "eos_token_id", [-1, "z", None]),
        ("text_encoder_2", "hidden_act", [["x"], None, 3]),
    ],
)
def test_what_cannot_be_used_is_named(part: str, key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"m gives {key} as .*, which cannot be used") as error:
            check(part, {key: value}, "m")
        assert len(str(error.value)) < 150


@pytest.mark.parametrize(
    "config",
    [
        {"layers_per_block": 10**9},
        {"layers_per_block": [1, 10**6]},
        {"transformer_layers_per_block": [1, [1, 10**400]]},
        {"reverse_transformer_layers_per_block": 10**6},
        {"num_hidden_layers": 10**9},
        {"block_out_channels": [32] * 200, "layers_per_block": 20},
    ],
)
def test_blocks_without_end_are_not_built(config: dict[str, Any]) -> None:
    with pytest.raises(
        RequestError, match=r"m describes \w+ blocks, which its weights \(500 tensors\) do not"
    ):
        check_blocks(config, 500, "m")


def test_sides() -> None:
    assert side_px(None) is None
    assert side_px(64) == (512, 512) and side_px([64, 96]) == (768, 512)
