"""A model's own defaults: `clearway.json` in a folder, or "defaults" in a file's `clearway` metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearway.errors import RequestError, one_line
from clearway.models import settings
from clearway.models.escape import shown
from clearway.types import Defaults

FILE = "clearway.json"
MAX_BYTES = 10_000_000  # the index of a thousand shards is smaller
LIMITS = {"width": (8, 16384), "height": (8, 16384), "steps": (1, 1000)}
OVERRIDES = {  # what a single file's metadata may say about its parts, because keys and shapes do not
    "unet": ("attention_head_dim", "num_attention_heads", "norm_num_groups", "norm_eps"),
    "vae": ("norm_num_groups", "scaling_factor", "shift_factor"),
    "text_encoder": ("num_attention_heads", "hidden_act", "layer_norm_eps"),
    "text_encoder_2": ("num_attention_heads", "hidden_act", "layer_norm_eps"),
}


def read_card(folder: Path) -> dict[str, Any]:
    """What `clearway.json` in `folder` says; empty without one. RequestError where it is no JSON object."""
    path = folder / FILE
    return read_object(path) if path.is_file() else {}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model; RequestError, naming folder and file, where there is none."""
    where = f"{path.parent.name}/{path.name}"
    if not os.path.isfile(path):  # a pipe would be waited for without end
        there = os.path.lexists(path)
        raise RequestError(f"{where} is {'not a file that can be read' if there else 'missing'}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RequestError(f"{where} is larger than {MAX_BYTES // 10**6} MB and was not read")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} cannot be read: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise RequestError(f"{where} is not a JSON object")
    return found


def apply(card: Mapping[str, Any], defaults: Defaults, where: str) -> tuple[Defaults, tuple[str, ...]]:
    """The defaults with what the card says put in, and notes; RequestError for an unusable value.

    A sampler without a schedule takes its own and not the family's.
    """
    changes: dict[str, Any] = {}
    for key, value in card.items():
        if key in LIMITS:
            low, high = LIMITS[key]
            sound = type(value) is int and low <= value <= high and (key == "steps" or value % 8 == 0)
        elif key == "cfg_scale":
            sound = type(value) in (int, float) and 0 <= value <= 1000
            value = float(value) if sound else value
        elif key in ("sampler", "schedule"):
            sound = isinstance(value, str)
        else:
            continue
        if not sound:
            raise RequestError(f"{where} gives {key} as {value!r:.60}, which cannot be used")
        changes[key] = value
    if "sampler" in changes and "schedule" not in changes:
        changes["schedule"] = "Automatic"  # the sampler's own: the family's was chosen for another
    unknown = sorted(set(card) - set(changes) - {"title"})
    names = ", ".join(map(shown, unknown[:8])) + (", …" if len(unknown) > 8 else "")
    notes = (f"{where} says {names}, which Clearway does not know.",) if unknown else ()
    return replace(defaults, **changes), notes


def title_of(card: Mapping[str, Any], name: str) -> str:
    """The card's title where it has one, else the model's name."""
    found = card.get("title")
    return found if isinstance(found, str) and found.strip() else name


def file_metadata(metadata: Mapping[str, str], where: str) -> dict[str, dict[str, Any]]:
    """The `clearway` entry of a file's metadata by part; RequestError where it says what it may not say."""
    text = metadata.get("clearway")
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: its clearway metadata is no JSON ({one_line(error)})") from error
    if not isinstance(found, dict) or not all(isinstance(part, dict) for part in found.values()):
        raise RequestError(f"{where}: its clearway metadata is not an object of objects")
    for part, values in found.items():
        if part == "defaults":
            continue
        unknown = sorted(set(values) - set(OVERRIDES.get(part, ())))
        if part not in OVERRIDES or unknown:
            names = ", ".join(map(shown, unknown)) or "anything"
            raise RequestError(f"{where}: its clearway metadata may not set {shown(part)}: {names:.200}")
        settings.check(part, values, f"{where}: its clearway metadata")
    return found
