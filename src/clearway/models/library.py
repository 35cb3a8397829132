"""The user's models folders (CLEARWAY_MODELS): which models lie there, and where one of them is."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clearway.errors import ClearwayError, RequestError, nearest
from clearway.home import expanded
from clearway.models.detect import identify
from clearway.models.escape import escaped
from clearway.models.folder import INDEX, identify_folder
from clearway.models.header import read_header, size_of
from clearway.models.weights import PICKLE_SUFFIXES, is_pickle

VARIABLE = "CLEARWAY_MODELS"
EMBEDDED = "embedded"
SUFFIXES = (".safetensors", *PICKLE_SUFFIXES)


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that could be named: its family's label, or the problem for which it cannot be used."""

    name: str
    path: Path
    size_bytes: int
    family: str | None = None
    problem: str | None = None


def embedded_folder() -> Path:
    """Where the model that ships with the package lies."""
    import importlib.resources

    return Path(str(importlib.resources.files("clearway.models"))) / EMBEDDED


def folders() -> tuple[Path, ...]:
    """The models folders that the environment names; they need not exist."""
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    return tuple(expanded(name) for name in named if name)


def embedded_problem() -> str | None:
    """Why the embedded model cannot be used; None where it can."""
    return _entry(embedded_folder()).problem


def available(more: Iterable[str | Path] = ()) -> list[Entry]:
    """The embedded model, then by name what lies in the folders `more` and in those of CLEARWAY_MODELS.

    Only headers and configs are read. RequestError where one of `more` is no folder.
    """
    places = [expanded(folder) for folder in more]
    for place in places:
        if not place.is_dir():
            raise RequestError(f"there is no folder {str(place)!r} to look for models in")
    own = embedded_folder()
    paths = [path for path in _models([*places, *folders()]) if path.resolve() != own.resolve()]
    return [_entry(own), *sorted(map(_entry, paths), key=_by_name)]


def find(name: str) -> Path | None:
    """The model of a CLEARWAY_MODELS folder called `name`: a file's stem or name, or a folder's name.

    Case matters only between two that differ by it. None where there is
    none; RequestError where there are several.
    """
    models = list(_models(folders()))
    for turn in (str, str.lower):
        asked = {turn(name), turn(escaped(name))}
        hits = [path for path in models if not asked.isdisjoint((turn(path.name), turn(name_of(path))))]
        if len(hits) > 1:
            few = ", ".join(repr(str(hit)) for hit in hits[:3])
            raise RequestError(f"model {name!r} is there {len(hits)} times: {few}; give the path")
        if hits:
            return hits[0]
    return None


def not_found(source: str) -> RequestError:
    """The error for a model that is nowhere, with the names most like it."""
    if _looks_like_path(source):
        path = expanded(source)
        parent = path.parent
        try:
            names = [item.name for item in parent.iterdir() if _is_model(item)]
        except (FileNotFoundError, NotADirectoryError):
            return RequestError(f"model {source!r}: there is no folder {str(parent)!r}")
        except OSError as error:
            return RequestError(f"model {source!r}: {str(parent)!r} cannot be read ({error.strerror})")
        there = _near(path.name, names) or "no models"
        return RequestError(f"model {source!r} does not exist; {str(parent)!r} holds {there}")
    places = folders()
    names = [EMBEDDED, *(name_of(path) for path in _models(places))]
    lost = [str(place) for place in places if not place.is_dir()]
    set_up = "" if places else f" (set {VARIABLE} to folders with models)"
    set_up += f" ({VARIABLE} names {', '.join(map(repr, lost))}: no folder)" if lost else ""
    return RequestError(
        f"model {source!r} is not known; nearest: {_near(source, names)}{set_up}; a path or a hub id "
        "'owner/name' works too"
    )


def name_of(path: Path) -> str:
    """A model's name, escaped: a file's stem, a folder's name."""
    stem = path.suffix.lower() in SUFFIXES and not os.path.isdir(path)
    return escaped(path.stem if stem else path.name)


def _looks_like_path(source: str) -> bool:
    return (
        source.startswith((".", "~", "/", "\\"))
        or "\\" in source
        or source.count("/") > 1
        or ("/" in source and source.lower().endswith(SUFFIXES))
    )


def _near(value: str, names: Iterable[str]) -> str:
    """Up to three names most like `value`, quoted."""
    few = difflib.get_close_matches(value, list(names), n=3, cutoff=0.0)
    return nearest(value, few)


def _models(where: Iterable[Path]) -> Iterator[Path]:
    """All checkpoints and Diffusers folders below the given folders, each once; links are followed."""
    seen: set[str] = set()
    for root in where:
        for place, below, files in os.walk(root, followlinks=True):
            real = os.path.realpath(place)
            if real in seen:
                below.clear()
                continue
            seen.add(real)
            if INDEX in files:
                below.clear()
                yield Path(place)
                continue
            below[:] = sorted(name for name in below if not name.startswith("."))
            for file in sorted(files):
                if file.lower().endswith(SUFFIXES) and not file.startswith("."):
                    yield Path(place, file)


def _is_model(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES) if os.path.isfile(path) else os.path.isfile(path / INDEX)


def _entry(path: Path) -> Entry:
    embedded = path == embedded_folder()
    name = EMBEDDED if embedded else name_of(path)
    if embedded and not os.path.isfile(path / INDEX):
        return Entry(name, path, 0, problem="is not part of this installation")
    size = size_of(path)
    try:
        if os.path.isfile(path / INDEX):
            found = identify_folder(path)
        elif is_pickle(path):
            return Entry(name, path, size, problem="is a pickle checkpoint (needs --allow-pickle)")
        else:
            found = identify(read_header(path).shapes)
    except ClearwayError as error:
        return Entry(name, path, size, problem=escaped(str(error)))
    if isinstance(found, str):
        return Entry(name, path, size, problem=escaped(found))
    return Entry(name, path, size, family=found.label)


def _by_name(entry: Entry) -> tuple[str, str]:
    return entry.name.lower(), str(entry.path)
