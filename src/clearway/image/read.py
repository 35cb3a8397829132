"""A picture's header -> how it came about: A1111's infotext, ComfyUI's graph, NovelAI's and InvokeAI's JSON.

Nothing is decoded that need not be. Files are not trusted: what Pillow refuses becomes one RequestError.
"""

from __future__ import annotations

import json
import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from clearway import infotext
from clearway.errors import RequestError, one_line
from clearway.image import comfyui, exif
from clearway.image.encode import EVIDENCE_KEY

READABLE = ("PNG", "JPEG", "WEBP", "GIF", "AVIF")
_MOST_BYTES = 2**31  # WebP and AVIF are read whole
_TRAILING_PIXELS = 2**26  # up to here a PNG is decoded to find text chunks behind its pixels
_SIDECAR_BYTES = 2**20
_TELLING = {"parameters", "prompt", "workflow", "Comment", "invokeai_metadata", "sd-metadata", "UserComment"}
_NOVELAI_SAMPLERS = {
    "k_euler": "Euler", "k_euler_ancestral": "Euler a", "k_dpmpp_2m": "DPM++ 2M", "k_dpmpp_sde": "DPM++ SDE",
    "k_dpmpp_2s_ancestral": "DPM++ 2S a", "k_dpmpp_2m_sde": "DPM++ 2M SDE", "k_dpm_2": "DPM2",
    "k_dpm_2_ancestral": "DPM2 a", "k_dpm_fast": "DPM fast", "k_lms": "LMS", "k_heun": "Heun", "ddim": "DDIM",
    "ddim_v3": "DDIM", "plms": "PLMS",
}  # fmt: skip
_NOVELAI_SCHEDULES = {"karras": "Karras", "exponential": "Exponential", "polyexponential": "Polyexponential"}


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a picture says of itself; sides in pixels.

    `kind` is "a1111" (infotext: Clearway, WebUI, Forge, SD.Next), "comfyui", "novelai", "invokeai", "other"
    (texts that are none of these) or "none". `infotext` is what `Request.from_infotext` takes, found in
    `source`. `summary` has the gist of ComfyUI's graph (see `comfyui.summarise`) or InvokeAI's JSON; `texts`
    everything found, by name.
    """

    path: Path
    format: str
    width: int
    height: int
    kind: str = "none"
    infotext: str | None = None
    source: str | None = None
    comfyui_prompt: Any = None
    comfyui_workflow: Any = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    evidence: Any = None
    texts: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, for JSON (a graph may hold NaN)."""
        return asdict(self) | {"path": str(self.path)}


def read_metadata(path: str | Path) -> Metadata:
    """How the picture at `path` came about, as far as the file says.

    PNG text first, EXIF overrides it (the WebUI's order), then GIF and JPEG comments, then a .txt beside the
    picture. PNG, JPEG, WebP, GIF and, where Pillow has it, AVIF. Raises RequestError for what is no such
    picture, is damaged before its metadata, holds oversized texts, or declares more pixels than Pillow takes
    (179 million).
    """
    path = _regular_file(path)
    texts, damaged, image = _texts(path)
    found = _classify(texts, Metadata(path, *image))
    if found.infotext is None and found.kind in ("none", "other"):
        beside = _sidecar(path)
        if beside:
            name = f"{path.stem}.txt"
            return replace(found, kind="a1111", infotext=beside, source=name, texts={**texts, name: beside})
        if found.kind == "none" and damaged:
            raise RequestError(f"{path} has damaged EXIF data and no other parameters: {damaged}")
    return found


def _regular_file(path: str | Path) -> Path:
    try:
        found = Path(path).expanduser()
        status = os.stat(found)
    except FileNotFoundError:
        raise RequestError(f"there is no file {path}; it would be a picture") from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise RequestError(f"{str(path)[:200]!r} cannot be read: {reason}") from error
    if stat.S_ISDIR(status.st_mode):
        raise RequestError(f"{path} is a folder; it would be a picture")
    if not stat.S_ISREG(status.st_mode):
        raise RequestError(f"{path} is a device or pipe; it would be a picture file")
    if status.st_size == 0:
        raise RequestError(f"{path} is empty; it would be a picture")
    if status.st_size > _MOST_BYTES:
        raise RequestError(f"{path} has {status.st_size} bytes; pictures up to {_MOST_BYTES} are read")
    return found


def _texts(path: Path) -> tuple[dict[str, str], str, tuple[str, int, int]]:
    """The texts of a file by name, what is wrong with its EXIF ("" nothing), and (format, width, height)."""
    Image.init()
    formats = [name for name in READABLE if name in Image.OPEN]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large pictures, odd EXIF: told below where it matters
            with open(path, "rb") as file, Image.open(file, formats=formats) as image:
                texts, damaged = _read(image.info)
                small = image.width * image.height <= _TRAILING_PIXELS
                if image.format == "PNG" and small and _TELLING.isdisjoint(texts):
                    _load_trailing(image)
                    texts, damaged = _read(image.info)
                return texts, damaged, (image.format or "", image.width, image.height)
    except UnidentifiedImageError:
        kinds = ", ".join(formats)
        raise RequestError(
            f"{path} is no picture that can be read, or is cut off; it would be {kinds}"
        ) from None
    except Image.DecompressionBombError as error:
        raise RequestError(f"{path} declares too many pixels: {one_line(error)}") from error
    except PermissionError as error:
        raise RequestError(f"{path} may not be read") from error
    except Exception as error:  # decoders raise almost anything on hostile files
        raise RequestError(f"{path} cannot be read as a picture: {one_line(error)}") from error


def _load_trailing(image: Image.Image) -> None:
    try:
        image.load()
    except Exception:  # the pixels are damaged; the header was not, and that is what was asked for
        return


def _read(info: Mapping[str | tuple[int, int], Any]) -> tuple[dict[str, str], str]:
    texts = {
        key: str(value)
        for key, value in info.items()
        if isinstance(key, str) and isinstance(value, str) and not key.startswith(("XML:", "Raw profile"))
    }
    damaged = ""
    block = info.get("exif")
    if isinstance(block, bytes):
        try:
            found = exif.read(block)
        except Exception as error:  # as above
            damaged = one_line(error)
        else:
            for value in found.texts.values():
                name, _, rest = value.partition(":")
                if name.lower() in ("prompt", "workflow") and rest.lstrip().startswith("{"):
                    texts[name.lower()] = rest.strip("\0")
            if found.comment:
                texts["UserComment"] = found.comment
            if found.evidence is not None:
                texts[EVIDENCE_KEY] = found.evidence
    comment = info.get("comment")
    if isinstance(comment, bytes):
        texts["comment"] = exif.decode_text(comment)
    return texts, damaged


def _classify(texts: Mapping[str, str], found: Metadata) -> Metadata:
    evidence = _json(texts.get(EVIDENCE_KEY, ""))
    found = replace(found, texts=texts, evidence=texts.get(EVIDENCE_KEY) if evidence is None else evidence)
    graphs = [_json(texts.get(name, "")) for name in ("prompt", "UserComment")]
    graph = next((value for value in graphs if comfyui.is_graph(value)), None)
    workflow = _json(texts.get("workflow", ""))
    if graph is not None or isinstance(workflow, dict):
        found = replace(
            found,
            kind="comfyui",
            comfyui_prompt=graph,
            comfyui_workflow=workflow,
            summary=comfyui.summarise(graph),
        )
    for name in ("UserComment", "parameters", "comment"):
        text = texts.get(name, "").strip()
        plain = name == "parameters" and text and not isinstance(_json(text), dict)
        if plain or (infotext.parse(text).values and _json(text) is None):
            return replace(found, kind="a1111", infotext=text, source=name)
    if found.kind == "comfyui":
        return found
    novelai = _json(texts.get("Comment", ""))
    if texts.get("Software") == "NovelAI" and isinstance(novelai, dict):
        text = _novelai(texts.get("Description"), novelai, found)
        return replace(found, kind="novelai", infotext=text, source="Comment")
    for name in ("invokeai_metadata", "sd-metadata"):
        invoke = _json(texts.get(name, ""))
        if isinstance(invoke, dict):
            return replace(found, kind="invokeai", summary=_invokeai(invoke))
    return replace(found, kind="other") if texts.keys() - {EVIDENCE_KEY} else found


def _novelai(description: str | None, values: Mapping[str, Any], picture: Metadata) -> str:
    """NovelAI's JSON as an infotext; its models skip CLIP's last layer and shift later noise by 31337.

    Source: behaviour of the WebUI v1.10.1 (`read_info_from_image`).
    """
    sampler = str(values.get("sampler") or "")
    schedule = values.get("noise_schedule")
    prompt = description if description is not None else values.get("prompt")
    return infotext.build(
        str(prompt or "").strip(),
        str(values.get("uc") or "").strip(),
        {
            "Steps": values.get("steps"),
            "Sampler": _NOVELAI_SAMPLERS.get(sampler, sampler) or None,
            "Schedule type": _NOVELAI_SCHEDULES.get(schedule) if isinstance(schedule, str) else None,
            "CFG scale": values.get("scale"),
            "Seed": values.get("seed"),
            "Size": f"{picture.width}x{picture.height}",
            "Clip skip": 2,
            "ENSD": 31337,
            "App": "NovelAI",
        },
    )


def _invokeai(values: Mapping[str, Any]) -> dict[str, Any]:
    """InvokeAI's JSON (from 3.0: flat; before: under "image") in Request's words, as far as it says."""
    image = values.get("image")
    flat = {**values, **image} if isinstance(image, dict) else dict(values)
    model = flat.get("model")
    if isinstance(model, dict):
        model = model.get("name") or model.get("model_name")
    found = {
        "prompt": flat.get("positive_prompt", flat.get("prompt")),
        "negative_prompt": flat.get("negative_prompt"),
        "model": model or values.get("model_weights"),
        "seed": flat.get("seed"),
        "steps": flat.get("steps"),
        "cfg_scale": flat.get("cfg_scale"),
        "scheduler": flat.get("scheduler", flat.get("sampler")),
        "width": flat.get("width"),
        "height": flat.get("height"),
    }
    return {name: value for name, value in found.items() if isinstance(value, str | int | float)}


def _sidecar(path: Path) -> str | None:
    """The infotext in the .txt file beside a picture; None for other texts, such as a training caption."""
    try:
        with open(path.with_suffix(".txt"), "rb") as file:
            text = file.read(_SIDECAR_BYTES).decode("utf-8-sig", "replace").strip()
    except (OSError, ValueError):
        return None
    return text if infotext.parse(text).values else None


def _json(text: str) -> Any:
    """The JSON value of `text`, NaN included as ComfyUI writes it; None where there is none."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
