"""Cards and metadata: what a model may say about itself."""

from __future__ import annotations

import json
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
    assert found == Defaults(256, 512, 10, 3.0, "Heun", "Karras") and notes == ()
    assert card.title_of(said, "x") == "Small" and card.title_of({}, "x") == "x"
    assert card.apply({}, USUAL, "x") == (USUAL, ())


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
