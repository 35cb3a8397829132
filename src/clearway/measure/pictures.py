"""Pictures beside a report: found by name in a folder, put into the page, compared with the reference."""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearway.errors import RequestError, one_line

if TYPE_CHECKING:
    import numpy as np

    from clearway.measure.groups import Entry, Report

GAIN = 8
"""How much a difference map exaggerates."""


@dataclass(frozen=True)
class Pair:
    """A contender's picture as a data URI and, where the reference's is there too, their difference."""

    contender: str
    picture: str
    reference: str | None = None
    difference: str | None = None
    found: dict[str, Any] | None = None


def picture_name(scenario: str, contender: str) -> str:
    """The file of a contender's picture: <scenario>--<contender>.png, unusual signs as hyphens."""
    safe = (re.sub(r"[^A-Za-z0-9._+-]+", "-", name) for name in (scenario, contender))
    return f"{'--'.join(safe)}.png"


def pictures(folder: str | Path) -> dict[str, Path]:
    """The PNGs of a folder and of its folders (one a machine) by their path; RequestError: no folder."""
    root = Path(folder)
    if not root.is_dir():
        raise RequestError(f"--pictures {folder}: there is no such folder")
    return {
        path.relative_to(root).as_posix(): path
        for path in sorted([*root.glob("*.png"), *root.glob("*/*.png")])
    }


def assign(report: Report, found: Mapping[str, Path]) -> dict[int, tuple[Path, Path | None]]:
    """id of an entry -> its picture and its reference's, where exactly one entry can have drawn it.

    Looked for in the machine's folder first, then at the top. Of machines, builds or runs that would share a
    picture none gets it.
    """
    claims: Counter[str] = Counter()
    places: dict[int, tuple[Entry, str]] = {}
    for entry in (one for group in report.groups for one in group.published()):
        name = picture_name(entry.record.scenario, entry.record.contender)
        own = f"{entry.record.provenance.get('machine')}/{name}"
        if place := next((each for each in (own, name) if each in found), None):
            claims[place] += 1
            places[id(entry)] = entry, place
    assigned: dict[int, tuple[Path, Path | None]] = {}
    for key, (entry, place) in places.items():
        reference = (entry.record.correctness or {}).get("reference")
        beside = picture_name(entry.record.scenario, reference) if isinstance(reference, str) else ""
        other = f"{place.rpartition('/')[0]}/{beside}".lstrip("/")
        if claims[place] == 1:
            assigned[key] = found[place], found.get(other) if claims[other] <= 1 else None
    return assigned


def pair(contender: str, mine: Path, reference: Path | None) -> Pair:
    """A contender's picture beside the reference's, with the map of differences; no texts are kept."""
    from clearway.measure.quality import compare_pictures, difference_map

    a = _read(mine)
    if reference is None or reference == mine:
        return Pair(contender, data_uri(a))
    b = _read(reference)
    if a.shape != b.shape:
        return Pair(contender, data_uri(a), data_uri(b))
    found = compare_pictures(a[None], b[None])
    return Pair(contender, data_uri(a), data_uri(b), data_uri(difference_map(a, b, gain=GAIN)), found)


def data_uri(image: np.ndarray) -> str:
    """uint8 (H, W, 3) as a PNG inside an address."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _read(path: Path) -> np.ndarray:
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(f"{path} cannot be read as a picture: {one_line(error)}") from error
