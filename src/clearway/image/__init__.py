"""Latents -> pixels -> file: decoding, encoding with metadata, names and folders, reading metadata back."""

from clearway.image.encode import FORMATS, encode
from clearway.image.files import check_target, save
from clearway.image.read import Metadata, read_metadata

__all__ = ["FORMATS", "Metadata", "check_target", "encode", "read_metadata", "save"]
