"""Cards and metadata: what a model may say about itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clearway.errors import RequestError
from clearway.models import card
from clearway.types import Defaults

USUAL = Defaults(512, 512, 20, 7.0, "DPM++ 2M", "Karras")


def test_a_card_changes_what_it_says() -> None:
    said = {"width": 256, "steps": 10, "cfg_scale": 3, "sampler": "Heun", "title": "Small"}
    found, notes = card.apply(said, USUAL, "x")
    assert found == Defaults(256, 512, 10, 3.0, "Heun", "Automatic") and notes == ()
    assert card.title_of(said, "x") == "Small" and card.title_of({}, "x") == "x"
    assert card.apply({}, USUAL, "x") == (USUAL, ())


def test_a_sampler_alone_brings_its_own_schedule() -> None:
    assert card.apply({"sampler": "Euler"}, USUAL, "x")[0].schedule == "Automatic"
    assert card.apply({"sampler": "Euler", "schedule": "Karras"}, USUAL, "x")[0].schedule == "Karras"
    assert card.apply({"schedule": "Exponential"}, USUAL, "x")[0].schedule == "Exponential"


def test_what_is_not_known_is_noted() -> None:
    assert card.apply({"hight": 3, "author": "me"}, USUAL, "m")[1] == (
        "m says author, hight, which Clearway does not know.",
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("width", 100), ("width", 0), ("height", "256"), ("width", True), ("steps", 0), ("steps", 2.5),
        ("cfg_scale", "3"), ("cfg_scale", float("nan")), ("sampler", 3), ("schedule", None),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(key: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"m gives {key} as"):
        card.apply({key: value}, USUAL, "m")


def test_reading(tmp_path: Path) -> None:
    assert card.read_card(tmp_path) == {}
    (tmp_path / card.FILE).write_text('{"steps": 3}')
    assert card.read_card(tmp_path) == {"steps": 3}


@pytest.mark.parametrize("data", [b"", b"[1]", b"\xff", b"{" * 9, b'{"a":' * 50_000])
def test_a_broken_card(tmp_path: Path, data: bytes) -> None:
    (tmp_path / card.FILE).write_bytes(data)
    with pytest.raises(RequestError, match=r"clearway\.json") as error:
        card.read_card(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(RequestError, match=r"config\.json is not a file that can be read"):
        card.read_object(tmp_path / "config.json")


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(card.MAX_BYTES + 1)
    with pytest.raises(RequestError, match=r"config\.json is larger than 10 MB"):
        card.read_object(tmp_path / "config.json")


@pytest.mark.parametrize(
    "text",
    [
        '{"unet": {"norm_eps": "a"}}', '{"unet": {"attention_head_dim": -1}}',
        '{"vae": {"scaling_factor": NaN}}', '{"text_encoder_2": {"num_attention_heads": 0}}',
    ],
)  # fmt: skip
def test_metadata_gives_usable_numbers(text: str) -> None:
    with pytest.raises(RequestError, match=r"x: its clearway metadata gives \w+ as .*, which cannot be used"):
        card.file_metadata({"clearway": text}, "x")


def test_metadata_of_a_file() -> None:
    said = {"unet": {"attention_head_dim": 4}, "defaults": {"steps": 3}}
    assert card.file_metadata({"clearway": json.dumps(said)}, "x") == said
    assert card.file_metadata({"format": "pt"}, "x") == {}


@pytest.mark.parametrize(
    "text",
    ["no JSON", "3", '{"unet": 3}', '{"unet": {"in_channels": 9}}', '{"scheduler": {"a": 1}}', '{"x": {}}'],
)
def test_metadata_may_not_say_everything(text: str) -> None:
    with pytest.raises(RequestError, match="clearway metadata"):
        card.file_metadata({"clearway": text}, "x")
