"""EXIF: what is written, taken apart by hand; every form of UserComment read."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clearway.image import exif

PARAMETERS = "\nSteps: 20, Sampler: Euler a, Seed: 1, Size: 512x512"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=100)


def directory(tiff: bytes, offset: int) -> dict[int, tuple[int, bytes | int]]:
    """{tag: (type, bytes, or the number of a LONG)} of the TIFF directory at `offset`; TIFF 6.0 §2."""
    order = {b"II": "<", b"MM": ">"}[tiff[:2]]
    (count,) = struct.unpack_from(order + "H", tiff, offset)
    found: dict[int, tuple[int, bytes | int]] = {}
    for index in range(count):
        at = offset + 2 + 12 * index
        tag, kind, length = struct.unpack_from(order + "HHI", tiff, at)
        size = length * {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 7: 1}[kind]
        (value,) = struct.unpack_from(order + "I", tiff, at + 8)
        start = at + 8 if size <= 4 else value
        found[tag] = (kind, value if kind == 4 else tiff[start : start + size])
    return found


def user_comment(block: bytes) -> bytes:
    """UserComment's bytes of an EXIF block, read by hand."""
    assert block[:6] == b"Exif\0\0"
    tiff = block[6:]
    order = {b"II": "<", b"MM": ">"}[tiff[:2]]
    first = directory(tiff, struct.unpack_from(order + "I", tiff, 4)[0])
    offset = first[0x8769][1]
    assert isinstance(offset, int)
    kind, value = directory(tiff, offset)[0x9286]
    assert kind == 7 and isinstance(value, bytes)
    return value


@settings(deadline=None)
@given(texts)
def test_user_comment_is_piexifs_unicode(text: str) -> None:
    raw = user_comment(exif.write(text, "evidence"))
    assert raw[:8] == b"UNICODE\0" and raw[8:].decode("utf-16-be") == text


@settings(deadline=None)
@given(texts, st.none() | texts)
@example("一" * 500, None)
@example("Ā" * 500, "{}")
def test_what_is_written_is_read(text: str, evidence: str | None) -> None:
    found = exif.read(exif.write(text + PARAMETERS, evidence))
    assert (found.comment, found.evidence) == (text + PARAMETERS, evidence)


@pytest.mark.parametrize(
    "raw",
    [
        b"UNICODE\0" + ("ä😀" + PARAMETERS).encode("utf-16-be"),
        b"UNICODE\0" + ("ä😀" + PARAMETERS).encode("utf-16-le"),
        b"UNICODE\0" + ("ä😀" + PARAMETERS).encode("utf-16"),
        b"UNICODE\0" + ("ä😀" + PARAMETERS).encode("utf-16-be") + b"\0",
        b"ASCII\0\0\0" + ("ä😀" + PARAMETERS).encode(),
        b"\0" * 8 + ("ä😀" + PARAMETERS).encode() + b"\0",
        ("ä😀" + PARAMETERS).encode(),
        "ä😀" + PARAMETERS + "\0",
    ],
)
def test_every_form_of_user_comment_is_read(raw: bytes | str) -> None:
    assert exif.decode_comment(raw) == "ä😀" + PARAMETERS


def test_ordinary_words_in_either_byte_order() -> None:
    for order in ("utf-16-be", "utf-16-le"):
        assert exif.decode_comment(b"UNICODE\0" + "a red apple".encode(order)) == "a red apple"


def test_latin_1_where_it_is_not_utf_8() -> None:
    assert exif.decode_comment(b"ASCII\0\0\0caf\xe9") == "café"


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_comment_gives_a_text(raw: bytes) -> None:
    assert isinstance(exif.decode_comment(raw), str)
    assert isinstance(exif.decode_comment(b"UNICODE\0" + raw), str)
