"""EXIF as the WebUI uses it: infotext in UserComment; and Clearway's evidence in MakerNote, unread by it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from PIL import Image

from clearway.infotext import parse

EXIF_IFD = 0x8769
USER_COMMENT = 0x9286
MAKER_NOTE = 0x927C
MAKER = b"Clearway\0"
_UNICODE = b"UNICODE\0"
_LONG, _UNDEFINED = 4, 7  # TIFF types
_SECOND = 26  # where the second directory begins: after the header and a directory of one entry
_PREFIXES = (b"ASCII\0\0\0", b"JIS\0\0\0\0\0", b"\0" * 8)


@dataclass(frozen=True, slots=True)
class Found:
    """What `read` finds. `texts` are the first directory's texts by tag number."""

    comment: str | None = None
    evidence: str | None = None
    texts: dict[int, str] = field(default_factory=dict)


def write(infotext: str, evidence: str | None = None) -> bytes:
    """An EXIF block ("Exif", two zero bytes, a TIFF) with the texts.

    UserComment is "UNICODE" and a zero byte, then UTF-16, high byte first: what piexif writes and the WebUI
    reads. By hand, because Pillow (13.0) gives it the type BYTE, of which piexif makes numbers: the standard
    says UNDEFINED. Source: EXIF 2.3 §4.6.5, TIFF 6.0 §2; behaviour of piexif's `UserComment.dump`.
    """
    values = {USER_COMMENT: _UNICODE + infotext.encode("utf-16-be")}
    if evidence is not None:
        values[MAKER_NOTE] = MAKER + evidence.encode("utf-8")
    first = struct.pack(">HHHIII", 1, EXIF_IFD, _LONG, 1, _SECOND, 0)
    entries, data = b"", b""
    offset = _SECOND + 2 + 12 * len(values) + 4
    for tag, value in sorted(values.items()):
        entries += struct.pack(">HHII", tag, _UNDEFINED, len(value), offset + len(data))
        data += value + b"\0" * (len(value) % 2)
    second = struct.pack(">H", len(values)) + entries + struct.pack(">I", 0)
    return b"Exif\0\0" + b"MM\0\x2a" + struct.pack(">I", 8) + first + second + data


def read(block: bytes) -> Found:
    """The texts of an EXIF block. Raises whatever Pillow raises on a damaged one; see `read_metadata`."""
    exif = Image.Exif()
    exif.load(block)
    directory = exif.get_ifd(EXIF_IFD)
    comment, note = directory.get(USER_COMMENT), directory.get(MAKER_NOTE)
    evidence = None
    if isinstance(note, bytes) and note.startswith(MAKER):
        evidence = note[len(MAKER) :].decode("utf-8", "replace")
    return Found(
        comment=decode_comment(comment) if isinstance(comment, bytes | str) else None,
        evidence=evidence,
        texts={tag: value for tag, value in exif.items() if isinstance(value, str)},
    )


def decode_comment(raw: bytes | str) -> str:
    """The text of a UserComment in any of its forms: UTF-16 of either byte order, ASCII, UTF-8, no prefix.

    Of UTF-16 the order is the one that makes an infotext of it, else the one that gives more ASCII signs.
    """
    if isinstance(raw, str):
        return raw.rstrip("\0")
    if raw.startswith(_UNICODE):
        body = raw[len(_UNICODE) :]
        body = body[: len(body) - len(body) % 2]
        if body[:2] in (b"\xfe\xff", b"\xff\xfe"):
            return body.decode("utf-16", "replace").rstrip("\0")
        high_first, low_first = (body.decode(order, "replace") for order in ("utf-16-be", "utf-16-le"))
        if parse(high_first).values or _ascii(high_first) >= _ascii(low_first):
            return high_first.rstrip("\0")
        return low_first.rstrip("\0")
    for prefix in _PREFIXES:
        if raw.startswith(prefix):
            raw = raw[len(prefix) :]
            break
    return decode_text(raw)


def decode_text(raw: bytes) -> str:
    """Bytes without a named encoding: UTF-8 where they are, else Latin-1; zero bytes at the end removed."""
    raw = raw.rstrip(b"\0")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _ascii(text: str) -> int:
    return sum("\t" <= sign < "\x7f" for sign in text)
