"""A contact sheet: pictures side by side with what differs, for a person to judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clearway.errors import UnavailableError, one_line
from clearway.measure.quality import compare_pictures, difference_map

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

SIDE_PX, EDGE_PX, LINE_PX = 256, 8, 18
GAIN = 8
_LONGEST = 400  # signs; no line has room for more
PAPER, INK = (250, 250, 250), (20, 20, 20)


@dataclass(frozen=True)
class Row:
    """One generation: what it is ("a red apple, seed 1"), the picture as it was and as it became.

    Both are uint8 (H, W, 3). Where the sizes differ there is no difference map.
    """

    label: str
    before: np.ndarray
    after: np.ndarray


def write(path: Path, title: str, names: tuple[str, str], rows: Sequence[Row]) -> Path:
    """A PNG at `path`: a line of three a row, as it was, as it became, and the difference times 8, labelled.

    `names` are the two columns'. Pictures are shown at most 256 pixels wide and high. Raises UnavailableError
    where the file cannot be written.
    """
    from PIL import ImageDraw, ImageFont
    from PIL.Image import new

    font = ImageFont.load_default(13)
    width = 3 * SIDE_PX + 4 * EDGE_PX
    cells = [_cells(row) for row in rows]
    heights = [max(cell.height for cell in line if cell) + LINE_PX + EDGE_PX for line in cells]
    sheet = new("RGB", (width, EDGE_PX + 2 * LINE_PX + sum(heights)), PAPER)
    draw = ImageDraw.Draw(sheet)

    def text(x: int, y: int, words: str, room: int) -> None:
        line = " ".join(words[:_LONGEST].split())  # a prompt may have several
        shown = line.encode("latin-1", "replace").decode("latin-1")  # what the built-in font has
        if draw.textlength(shown, font=font) > room:
            while shown and draw.textlength(f"{shown}...", font=font) > room:
                shown = shown[:-1]
            shown += "..."
        draw.text((x, y), shown, fill=INK, font=font)

    text(EDGE_PX, EDGE_PX, title, width - 2 * EDGE_PX)
    for column, name in enumerate((*names, f"difference x {GAIN}")):
        text(EDGE_PX + column * (SIDE_PX + EDGE_PX), EDGE_PX + LINE_PX, name, SIDE_PX)
    top = EDGE_PX + 2 * LINE_PX
    for row, line, height in zip(rows, cells, heights, strict=True):
        text(EDGE_PX, top, f"{row.label}: {_distance(row)}", width - 2 * EDGE_PX)
        for column, cell in enumerate(line):
            if cell:
                sheet.paste(cell, (EDGE_PX + column * (SIDE_PX + EDGE_PX), top + LINE_PX))
        top += height
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except OSError as error:
        raise UnavailableError(f"{path} could not be written: {one_line(error)}") from error
    return path


def _cells(row: Row) -> list[Image | None]:
    """Before, after and the difference as small Pillow images; None for a difference that there is not."""
    from PIL.Image import fromarray

    same = row.before.shape == row.after.shape
    pictures = [row.before, row.after, difference_map(row.after, row.before, GAIN) if same else None]
    cells: list[Image | None] = []
    for picture in pictures:
        if picture is None:
            cells.append(None)
            continue
        image = fromarray(picture)
        image.thumbnail((SIDE_PX, SIDE_PX))
        cells.append(image)
    return cells


def _distance(row: Row) -> str:
    if row.before.shape != row.after.shape:
        return "of another size"
    found = compare_pictures(row.after[None], row.before[None])
    return (
        "identical"
        if found["identical"]
        else f"{found['psnr_db']:.1f} dB, at most {found['max_error']} levels"
    )
