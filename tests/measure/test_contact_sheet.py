"""The sheet holds the pictures, their labels and what differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clearway.errors import UnavailableError
from clearway.measure import contact_sheet
from clearway.measure.contact_sheet import EDGE_PX, LINE_PX, SIDE_PX, Row


def picture(seed: int, side: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (side, side, 3), dtype=np.uint8)


def test_a_row_has_before_after_and_the_difference(tmp_path: Path) -> None:
    before = picture(0)
    rows = [Row("a cat, seed 1", before, before + 3), Row("a cat, seed 2", before, before)]
    path = contact_sheet.write(tmp_path / "new" / "sheet.png", "VAE in half", ("float32", "float16"), rows)
    with Image.open(path) as image:
        sheet = np.asarray(image.convert("RGB"))
    top = EDGE_PX + 3 * LINE_PX

    def cell(row: int, column: int) -> np.ndarray:
        y, x = top + row * (64 + LINE_PX + EDGE_PX), EDGE_PX + column * (SIDE_PX + EDGE_PX)
        return sheet[y : y + 64, x : x + 64]

    assert np.array_equal(cell(0, 0), before) and np.array_equal(cell(0, 1), before + 3)
    assert (cell(0, 2) == 3 * contact_sheet.GAIN).all()
    assert (cell(1, 2) == 0).all()
    labels = sheet[: EDGE_PX + 2 * LINE_PX]
    assert (labels < 128).any()  # something is written there


def test_large_pictures_shrink_and_sizes_may_differ(tmp_path: Path) -> None:
    row = Row("a very long prompt, 猫 " * 20, picture(0, 600), picture(1, 300))
    path = contact_sheet.write(tmp_path / "sheet.png", "title " * 100, ("one", "two"), [row])
    with Image.open(path) as sheet:
        assert sheet.size == (3 * SIDE_PX + 4 * EDGE_PX, 2 * EDGE_PX + 3 * LINE_PX + SIDE_PX)
    assert contact_sheet._distance(row) == "of another size"
    assert contact_sheet._distance(Row("", row.after, row.after)) == "identical"
    assert "levels" in contact_sheet._distance(Row("", picture(1), picture(2)))


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="could not be written"):
        contact_sheet.write(
            tmp_path / "file" / "sheet.png", "", ("a", "b"), [Row("", picture(0), picture(0))]
        )


def test_a_prompt_of_several_lines_is_one_label(tmp_path: Path) -> None:
    row = Row("a cat,\non a mat\t" + "and more " * 5000, picture(0), picture(0))
    assert contact_sheet.write(tmp_path / "sheet.png", "a\nb", ("a", "b"), [row]).is_file()
