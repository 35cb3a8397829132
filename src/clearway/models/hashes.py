"""File hashes as the WebUI shows them, computed once a file and kept in the state folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from clearway import home

STORE = "hashes.json"
LENGTH = 10
_known: dict[tuple[str, str], str] = {}
"""Of this process, by files and seal: where the state folder cannot be written, too."""


def sha256(paths: Iterable[Path]) -> str:
    """The SHA-256 of the files' bytes one after another, in hex.

    Remembered by path, size and time of change, so that a 7 GB file is read through once and not at every
    start.
    """
    files = [path.resolve() for path in paths]
    stats = [path.stat() for path in files]
    key = "|".join(str(path) for path in files)
    seal = "|".join(f"{stat.st_size}:{stat.st_mtime_ns}" for stat in stats)
    if (key, seal) in _known:
        return _known[key, seal]
    entry = home.read_json(STORE).get(key)
    if isinstance(entry, dict) and entry.get("seal") == seal and isinstance(entry.get("sha256"), str):
        return _known.setdefault((key, seal), entry["sha256"])
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    found = _known[key, seal] = digest.hexdigest()
    home.write_json(home.read_json(STORE) | {key: {"seal": seal, "sha256": found}}, STORE)
    return found


def short_hash(paths: Iterable[Path]) -> str:
    """The WebUI's "Model hash": the first ten hex digits of sha256."""
    return sha256(paths)[:LENGTH]
