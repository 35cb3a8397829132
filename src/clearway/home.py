"""The one folder that keeps state between runs: verdicts, tuned tables, choices for products, file hashes.

`CLEARWAY_HOME` names it; otherwise the platform's usual place. Below it is a folder for the layout's version,
so that an older Clearway never reads what a newer one wrote. Losing the folder costs time, never a picture:
at most rounding, where a choice for a product or a mixed VAE then falls otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYOUT = "v1"


def expanded(path: str | Path) -> Path:
    """`path` with a leading ~ or ~user made a home folder; as it is where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def root() -> Path:
    """The state folder without its layout version; not created.

    Where no home folder is known (an account without one, `~nobody`), a folder for temporary files: state in
    whatever folder the process was started in would be found by nobody.
    """
    try:
        return _root()
    except RuntimeError:
        user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
        try:
            return Path(tempfile.gettempdir()) / f"clearway{user}"
        except OSError:  # no folder for temporary files either: nothing will be kept
            return Path(os.devnull) / "clearway"


def _root() -> Path:
    """As root, but RuntimeError where no home folder is known."""
    named = os.environ.get("CLEARWAY_HOME")
    if named:
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "Clearway"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "Clearway"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "clearway"


def path(*parts: str) -> Path:
    """A file or folder of the current layout, e.g. path("verdicts", "h200.json"); not created."""
    return root().joinpath(LAYOUT, *parts)


def read_json(*parts: str) -> dict[str, Any]:
    """The object stored at `parts`; empty where there is none or it cannot be read (it is only a cache)."""
    target = path(*parts)
    try:
        found = json.loads(target.read_text(encoding="utf-8")) if os.path.isfile(target) else None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: nested beyond what Python reads
        return {}
    return found if isinstance(found, dict) else {}


def names(*parts: str) -> list[str]:
    """What lies in the folder at `parts`, in order; nothing where there is none."""
    try:
        return sorted(os.listdir(path(*parts)))
    except OSError:
        return []


def write_json(value: dict[str, Any], *parts: str) -> bool:
    """Stores `value` at `parts` in one move; False where the disk does not allow it (go on without)."""
    return _stored(value, path(*parts), os.replace)


def create_json(value: dict[str, Any], *parts: str) -> bool:
    """Stores `value` at `parts` unless something is there: of several processes one does. False where there
    is, or where the disk does not allow it.
    """
    return _stored(value, path(*parts), _placed)


def _placed(name: str, target: Path) -> None:
    """Moves a file to where there is none; FileExistsError where there is one."""
    try:
        os.link(name, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links: whoever reads it half written takes it for damaged
        with open(name, "rb") as source, open(target, "xb") as file:
            file.write(source.read())
    os.unlink(name)


def _stored(value: dict[str, Any], target: Path, move: Callable[[str, Path], None]) -> bool:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True)
        move(name, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        return False
    return True
