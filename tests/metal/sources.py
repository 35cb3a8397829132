"""The .metal files that ship."""

from __future__ import annotations

from pathlib import Path

import clearway

FILES = sorted((Path(clearway.__file__).parent / "ops").glob("*.metal"))


def text_of(name: str) -> str:
    """The text of `name`.metal."""
    (path,) = (path for path in FILES if path.stem == name)
    return path.read_text(encoding="ascii")
