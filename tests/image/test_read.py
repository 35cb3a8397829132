"""Metadata of pictures by Clearway, by other programs (made here in their layouts), and of hostile files."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, features
from PIL.PngImagePlugin import PngInfo

from clearway.errors import RequestError
from clearway.image import encode, read_metadata
from clearway.image.exif import EXIF_IFD, USER_COMMENT
from clearway.request import Request

PIXELS = np.random.default_rng(1).integers(0, 256, (16, 24, 3), dtype=np.uint8)
TEXT = """a "red" apple, 苹果 😀
BREAK two
Negative prompt: blurry
Steps: 20, Sampler: Euler a, Seed: 5, Size: 24x16"""
GRAPH = {
    "1": {"class_type": "KSampler", "inputs": {"seed": 9, "steps": 4, "cfg": 1.5, "positive": ["2", 0]}},
    "2": {"class_type": "CLIPTextEncode", "inputs": {"text": "a boat"}},
}
WORKFLOW = {"nodes": [{"id": 1, "widgets_values": [float("nan")]}], "version": 0.4}


def png(path: Path, *, exif: Image.Exif | None = None, **texts: str) -> Path:
    chunks = PngInfo()
    for key, value in texts.items():
        chunks.add_text(key.replace("__", "-"), value)
    Image.fromarray(PIXELS).save(path, "PNG", pnginfo=chunks, **({} if exif is None else {"exif": exif}))
    return path


def comment(text: bytes) -> Image.Exif:
    block = Image.Exif()
    block[EXIF_IFD] = {USER_COMMENT: text}
    return block


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def raw_png(*chunks: bytes, width: int = 8, height: int = 8) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks)


SCAN = chunk(b"IDAT", zlib.compress(bytes(8 * 25))) + chunk(b"IEND", b"")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["PNG", "JPEG", "WEBP"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60),
)
def test_every_format_gives_back_its_infotext(tmp_path: Path, format: str, prompt: str) -> None:
    path = tmp_path / "x"
    text = f"{prompt}\nNegative prompt: {prompt}\nSteps: 3, Sampler: Euler a, Seed: 5, Size: 24x16".strip()
    path.write_bytes(encode(PIXELS, format, text, json.dumps({"prompt": prompt})))
    found = read_metadata(path)
    assert (found.kind, found.infotext, found.format) == ("a1111", text, format)
    assert (found.width, found.height, found.evidence) == (24, 16, {"prompt": prompt})
    assert json.dumps(found.as_dict())


def test_a_picture_is_a_request(tmp_path: Path) -> None:
    text = read_metadata(png(tmp_path / "x.png", parameters=TEXT)).infotext
    assert text is not None
    assert Request.from_infotext(text).prompt == 'a "red" apple, 苹果 😀\nBREAK two'


def test_exif_overrides_png_text(tmp_path: Path) -> None:
    block = comment(b"UNICODE\0" + ("other" + TEXT).encode("utf-16-be"))
    assert read_metadata(png(tmp_path / "x.png", exif=block, parameters=TEXT)).infotext == "other" + TEXT
    photo = comment(b"ASCII\0\0\0Screenshot")
    found = read_metadata(png(tmp_path / "y.png", exif=photo, parameters=TEXT))
    assert (found.infotext, found.texts["UserComment"]) == (TEXT, "Screenshot")


@pytest.mark.parametrize(
    "raw",
    [
        b"UNICODE\0" + TEXT.encode("utf-16-be"),
        b"UNICODE\0" + TEXT.encode("utf-16-le"),
        b"ASCII\0\0\0" + TEXT.encode(),
        TEXT.encode(),
    ],
)
@pytest.mark.parametrize("format", ["JPEG", "WEBP", "AVIF"])
def test_user_comments_of_other_programs(tmp_path: Path, format: str, raw: bytes) -> None:
    if format == "AVIF" and "avif" not in features.get_supported():
        pytest.skip("this Pillow has no AVIF")
    path = tmp_path / "x"
    Image.fromarray(PIXELS).save(path, format, exif=comment(raw))
    assert read_metadata(path).infotext == TEXT


def test_gif_comment(tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "x.gif", comment=TEXT.encode())
    found = read_metadata(tmp_path / "x.gif")
    assert (found.infotext, found.source, found.format) == (TEXT, "comment", "GIF")


def test_text_behind_the_pixels(tmp_path: Path) -> None:
    late = chunk(b"tEXt", b"parameters\0" + b"a\nSteps: 1, Seed: 2, Size: 8x8")
    (tmp_path / "x.png").write_bytes(raw_png(SCAN[: -len(chunk(b"IEND", b""))], late, chunk(b"IEND", b"")))
    assert read_metadata(tmp_path / "x.png").infotext == "a\nSteps: 1, Seed: 2, Size: 8x8"


def test_a_text_file_beside_the_picture(tmp_path: Path) -> None:
    path = png(tmp_path / "x.png")
    (tmp_path / "x.txt").write_text("a caption for training", encoding="utf-8")
    assert read_metadata(path).kind == "none"
    (tmp_path / "x.txt").write_text(TEXT, encoding="utf-8-sig")
    found = read_metadata(path)
    assert (found.kind, found.infotext, found.source) == ("a1111", TEXT, "x.txt")
    assert read_metadata(png(tmp_path / "x.png", parameters="in the picture")).infotext == "in the picture"


def test_comfyui_png(tmp_path: Path) -> None:
    found = read_metadata(png(tmp_path / "x.png", prompt=json.dumps(GRAPH), workflow=json.dumps(WORKFLOW)))
    assert found.kind == "comfyui" and found.infotext is None
    assert found.comfyui_prompt == GRAPH and found.comfyui_workflow["version"] == 0.4
    assert found.summary == {"prompt": "a boat", "seed": 9, "steps": 4, "cfg_scale": 1.5}


@pytest.mark.parametrize("format", ["WEBP", "JPEG"])
def test_comfyui_exif(tmp_path: Path, format: str) -> None:
    block = Image.Exif()
    block[0x0110] = "prompt:" + json.dumps(GRAPH)
    block[0x010F] = "workflow:" + json.dumps(WORKFLOW)
    Image.fromarray(PIXELS).save(tmp_path / "x", format, exif=block)
    found = read_metadata(tmp_path / "x")
    assert (found.kind, found.comfyui_prompt) == ("comfyui", GRAPH)
    assert found.comfyui_workflow["version"] == 0.4


def test_comfyui_with_an_infotext_gives_both(tmp_path: Path) -> None:
    found = read_metadata(png(tmp_path / "x.png", prompt=json.dumps(GRAPH), parameters=TEXT))
    assert (found.kind, found.infotext, found.comfyui_prompt) == ("a1111", TEXT, GRAPH)


def test_novelai(tmp_path: Path) -> None:
    values = {
        "steps": 28, "sampler": "k_euler_ancestral", "seed": 33, "scale": 11.0, "uc": "lowres",
        "noise_schedule": "karras",
    }  # fmt: skip
    path = png(
        tmp_path / "x.png", Software="NovelAI", Description="a cat", Comment=json.dumps(values), Title="AI"
    )
    found = read_metadata(path)
    assert found.kind == "novelai"
    assert found.infotext == (
        "a cat\nNegative prompt: lowres\nSteps: 28, Sampler: Euler a, Schedule type: Karras, CFG scale: 11, "
        "Seed: 33, Size: 24x16, Clip skip: 2, ENSD: 31337, App: NovelAI"
    )
    assert Request.from_infotext(found.infotext).cfg_scale == 11.0


def test_invokeai(tmp_path: Path) -> None:
    new = {
        "positive_prompt": "a cat", "negative_prompt": "", "seed": 1, "steps": 30, "cfg_scale": 7.5,
        "width": 24, "height": 16, "scheduler": "euler", "model": {"name": "dreamshaper", "hash": "x"},
    }  # fmt: skip
    found = read_metadata(png(tmp_path / "x.png", invokeai_metadata=json.dumps(new)))
    assert found.kind == "invokeai" and found.infotext is None
    assert found.summary["model"] == "dreamshaper" and found.summary["cfg_scale"] == 7.5
    old = {"model_weights": "sd-1.5", "image": {"prompt": "a dog", "steps": 3, "sampler": "k_lms"}}
    found = read_metadata(png(tmp_path / "y.png", **{"sd__metadata": json.dumps(old)}))
    assert found.summary == {"prompt": "a dog", "model": "sd-1.5", "steps": 3, "scheduler": "k_lms"}


def test_texts_of_unknown_programs_are_kept(tmp_path: Path) -> None:
    swarm = json.dumps({"sui_image_params": {"prompt": "a cat", "steps": 20, "seed": 1}})
    found = read_metadata(png(tmp_path / "x.png", parameters=swarm, Software="Swarm"))
    assert (found.kind, found.infotext) == ("other", None)
    assert found.texts == {"parameters": swarm, "Software": "Swarm"}
    assert read_metadata(png(tmp_path / "y.png", prompt="just words")).kind == "other"
    assert read_metadata(png(tmp_path / "z.png")).kind == "none"


def test_a_cut_picture_still_has_its_header(tmp_path: Path) -> None:
    for format in ("PNG", "JPEG"):
        data = encode(np.tile(PIXELS, (8, 8, 1)), format, TEXT)
        (tmp_path / "x").write_bytes(data[: len(data) // 2])
        assert read_metadata(tmp_path / "x").infotext == TEXT


def test_deep_json_is_no_graph(tmp_path: Path) -> None:
    assert read_metadata(png(tmp_path / "x.png", prompt="[" * 100_000)).kind == "other"


def refused(path: Path | str) -> str:
    with pytest.raises(RequestError) as caught:
        read_metadata(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt"])
def test_text_bombs_are_one_sentence(tmp_path: Path, kind: bytes) -> None:
    bomb = zlib.compress(bytes(50_000_000))
    body = b"parameters\0" + (b"\0" if kind == b"zTXt" else b"\1\0\0\0") + bomb
    (tmp_path / "x.png").write_bytes(raw_png(chunk(kind, body), SCAN))
    assert "too large" in refused(tmp_path / "x.png").lower()


def test_pixel_bombs_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(raw_png(SCAN, width=100_000, height=100_000))
    assert "pixels" in refused(tmp_path / "x.png")


def test_a_large_picture_is_read_without_a_warning(tmp_path: Path) -> None:
    text = chunk(b"tEXt", b"parameters\0large")
    (tmp_path / "x.png").write_bytes(raw_png(text, SCAN, width=13_000, height=13_000))
    assert read_metadata(tmp_path / "x.png").infotext == "large"


def test_what_is_no_picture_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").touch()
    (tmp_path / "cut.png").write_bytes(encode(PIXELS, "PNG", "a")[:20])
    (tmp_path / "cut.webp").write_bytes(encode(PIXELS, "WEBP", "a")[:40])
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "vast.webp", "wb") as file:
        file.truncate(2**32)
    for name, message in {
        "text.png": "no picture", "empty.png": "is empty", "cut.png": "", "cut.webp": "", "pipe": "pipe",
        "missing.png": "no file", ".": "folder", "vast.webp": "bytes", "text.png/x": "cannot be read",
    }.items():  # fmt: skip
        assert message in refused(tmp_path / name)
    assert "cannot be read" in refused("a\0b")
    assert len(refused(tmp_path / "/".join(["deep" * 60] * 40))) < 300


def test_damaged_exif_is_said_where_nothing_else_is_found(tmp_path: Path) -> None:
    tail = b"MM\0\x2a\0\0\0\x08" + b"\0\x01" + struct.pack(">HHII", 0x8769, 4, 1, 0xFFFFFFF0)
    for block in (b"Exif\0\0XX garbage", b"Exif\0\0" + tail):
        path = tmp_path / "x.jpg"
        Image.fromarray(PIXELS).save(path, exif=block)
        try:
            assert read_metadata(path).kind == "none"
        except RequestError as error:
            assert "damaged EXIF" in str(error) and "\n" not in str(error)
    Image.fromarray(PIXELS).save(tmp_path / "y.png", exif=b"Exif\0\0XX garbage")
    assert "damaged EXIF" in refused(tmp_path / "y.png")


def _samples() -> list[bytes]:
    gif = io.BytesIO()
    Image.fromarray(PIXELS).save(gif, "GIF", comment=TEXT.encode())
    return [encode(PIXELS, format, TEXT, "{}") for format in ("PNG", "JPEG", "WEBP")] + [gif.getvalue()]


SAMPLES = _samples()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=6),
    st.integers(1, 4000),
)
def test_damaged_pictures_give_metadata_or_one_sentence(
    tmp_path: Path, data: bytes, changes: list[tuple[int, int]], length: int
) -> None:
    broken = bytearray(data)
    for at, value in changes:
        broken[at % len(broken)] = value
    path = tmp_path / "x"
    path.write_bytes(bytes(broken[:length]))
    try:
        read_metadata(path)
    except RequestError as error:
        assert "\n" not in str(error)
