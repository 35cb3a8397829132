"""Files of one picture: pixels and texts come back, and the bytes are where other programs look."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from clearway.image.encode import FORMATS, DoesNotFit, encode

PIXELS = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
texts = st.text(max_size=60)


def chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """(type, body) of every PNG chunk, with its checksum verified; PNG specification §5."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = [], 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length)[0] == zlib.crc32(kind + body)
        found.append((kind, body))
        at += 12 + length
    return found


def png_texts(data: bytes) -> dict[str, str]:
    found = {}
    for kind, body in chunks(data):
        key, _, rest = body.partition(b"\0")
        if kind == b"tEXt":
            found[key.decode()] = rest.decode("latin-1")
        elif kind == b"iTXt":
            assert rest[:2] == b"\0\0"
            _, _, text = rest[2:].split(b"\0", 2)
            found[key.decode()] = text.decode()
    return found


def jpeg_exif(data: bytes) -> bytes:
    """The body of the APP1 segment; ITU T.81 annex B."""
    at = 2
    while data[at : at + 2] != b"\xff\xe1":
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return data[at + 4 : at + 2 + struct.unpack_from(">H", data, at + 2)[0]]


def webp_exif(data: bytes) -> bytes:
    """The EXIF chunk of a RIFF WebP file, as an EXIF block."""
    at = 12
    while data[at : at + 4] != b"EXIF":
        size = struct.unpack_from("<I", data, at + 4)[0]
        at += 8 + size + size % 2
    body = data[at + 8 : at + 8 + struct.unpack_from("<I", data, at + 4)[0]]
    return body if body.startswith(b"Exif\0\0") else b"Exif\0\0" + body


def sendable(text: str) -> str:
    return "".join("\ufffd" if 0xD800 <= ord(sign) < 0xE000 else sign for sign in text)


@settings(deadline=None)
@given(texts, st.none() | texts)
@example("a\udcffb", "\ud800")
@example("latin é only", None)
@example("emoji 😀 and\nlines", '{"a": 1}')
def test_png_holds_both_texts_before_the_pixels(text: str, evidence: str | None) -> None:
    data = encode(PIXELS, "PNG", text, evidence)
    wanted = {"parameters": sendable(text)} | ({} if evidence is None else {"clearway": sendable(evidence)})
    assert png_texts(data) == wanted
    kinds = [kind for kind, _ in chunks(data)]
    assert kinds.index(b"IDAT") > max(kinds.index(kind) for kind in {b"tEXt", b"iTXt"} & set(kinds))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), PIXELS)


def test_png_uses_text_chunks_of_the_type_that_pillow_readers_expect() -> None:
    assert b"tEXt" in dict(chunks(encode(PIXELS, "PNG", "café")))
    assert b"iTXt" in dict(chunks(encode(PIXELS, "PNG", "苹果")))


@settings(deadline=None)
@given(st.sampled_from([("JPEG", jpeg_exif), ("WEBP", webp_exif)]), st.text(max_size=60))
def test_jpeg_and_webp_hold_user_comment(case: tuple[str, object], text: str) -> None:
    format, block = case
    raw = user_comment(block(encode(PIXELS, format, text)))  # type: ignore[operator]
    assert raw[:8] == b"UNICODE\0" and raw[8:].decode("utf-16-be") == sendable(text)


def user_comment(block: bytes) -> bytes:
    """UserComment, found by its entry's first bytes (tag 0x9286, type 7)."""
    order = "<" if block[6:8] == b"II" else ">"
    at = block.index(struct.pack(order + "HH", 0x9286, 7))
    length, offset = struct.unpack_from(order + "II", block, at + 4)
    return block[6 + offset : 6 + offset + length]


def test_webp_is_lossless_and_jpeg_is_close_with_full_colour() -> None:
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode(PIXELS, "WEBP", "a")))), PIXELS)
    jpeg = Image.open(io.BytesIO(encode(PIXELS, "JPEG", "a")))
    assert np.abs(np.asarray(jpeg).astype(int) - PIXELS).mean() < 4  # noise, the worst case
    assert {layer[1:3] for layer in jpeg.layer} == {(1, 1)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("format", sorted(set(FORMATS.values())))
def test_same_input_same_bytes(format: str) -> None:
    assert encode(PIXELS, format, "a", "{}") == encode(PIXELS, format, "a", "{}")


def test_what_a_format_cannot_hold_is_said() -> None:
    with pytest.raises(DoesNotFit):
        encode(PIXELS, "JPEG", "x" * 40000)
    with pytest.raises(DoesNotFit):
        encode(np.zeros((8, 16384, 3), np.uint8), "WEBP", "a")
    assert encode(PIXELS, "WEBP", "x" * 40000)
