"""Pixels and texts -> the bytes of a PNG, JPEG or WebP file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from clearway.image import exif, png

if TYPE_CHECKING:
    import numpy as np

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
"""File suffix, in lower case, to Pillow's name of the format."""

EVIDENCE_KEY = "clearway"  # the PNG text chunk of the evidence
_LONGEST_SIDE = {"PNG": 2**31 - 1, "JPEG": 65535, "WEBP": 16383}
_JPEG_EXIF_BYTES = 65533


class DoesNotFit(Exception):
    """The picture or its texts are larger than the format allows; PNG always holds them."""


def encode(image: np.ndarray, format: str, infotext: str, evidence: str | None = None) -> bytes:
    """The file of one picture, uint8 (H, W, 3), with its texts; `format` is one of FORMATS' names.

    PNG: text chunks "parameters" and "clearway", of type tEXt where Latin-1 holds them, else iTXt. JPEG
    (quality 95, colour at full resolution) and WebP (lossless): EXIF, see `exif.write`. Signs that no
    encoding has (lone surrogates) become U+FFFD. Raises DoesNotFit for a JPEG or WebP that the format's
    limits exclude.
    """
    if max(image.shape[:2]) > _LONGEST_SIDE[format]:
        raise DoesNotFit(f"{format} takes sides of up to {_LONGEST_SIDE[format]} pixels")
    infotext = _sendable(infotext)
    evidence = None if evidence is None else _sendable(evidence)
    if format == "PNG":
        chunks = PngInfo()
        chunks.add_text("parameters", infotext)
        if evidence is not None:
            chunks.add_text(EVIDENCE_KEY, evidence)
        return png.write(image, [(kind, data) for kind, data, *_ in chunks.chunks])
    picture, file = Image.fromarray(image), io.BytesIO()
    block = exif.write(infotext, evidence)
    if format == "JPEG":
        if len(block) > _JPEG_EXIF_BYTES:
            raise DoesNotFit(f"JPEG takes EXIF of up to {_JPEG_EXIF_BYTES} bytes")
        picture.save(file, "JPEG", quality=95, subsampling=0, exif=block)
    else:
        picture.save(file, "WEBP", lossless=True, exif=block)
    return file.getvalue()


def _sendable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
