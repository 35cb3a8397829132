"""GEGLU inside its product: the formula, its turns, and what a launch is given."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clearway.ops import _triton, geglu_linear
from clearway.ops._cases import loose
from clearway.ops._described import Described
from clearway.ops.contract import REFERENCE
from clearway.ops.geglu_linear import inputs, use

op = geglu_linear.geglu_linear


def test_matches_the_formula() -> None:
    x, weight, bias = (arg.double() for arg in inputs((3, 5), 7, 4))
    both = x @ weight.T + bias
    a, b = both[..., :4], both[..., 4:]
    gelu = 0.5 * b * (1 + torch.erf(b / math.sqrt(2)))
    torch.testing.assert_close(op(x, weight, bias), a * gelu)
    torch.testing.assert_close(op(x, weight, None), op(x, weight, torch.zeros_like(bias)))
    with pytest.raises(ValueError, match="3 rows; they must be even"):
        op(x, weight[:3], bias[:3])


@pytest.mark.parametrize(
    ("rows", "outputs", "wanted"),
    [(2048, 5120, True), (8192, 1280, True), (2048, 2560, True), (512, 5120, False), (77, 1280, False)],
)
def test_turns_that_are_mostly_full_are_preferred(rows: int, outputs: int, wanted: bool) -> None:
    """On an H200's 132 multiprocessors those were the quicker ones (bench/gluon_on_device.py)."""
    assert (use(rows, outputs, 132) >= geglu_linear.LEAST_USE) == wanted


@pytest.mark.parametrize(("down", "outputs"), [(1, 128), (16, 5120), (17, 640), (128, 5120), (31, 2560)])
def test_every_tile_has_its_place(down: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel computes from a tile's number, by Python's own whole numbers."""
    monkeypatch.setattr(geglu_linear, "gl", SimpleNamespace(minimum=min))
    tiles = down * (outputs // 128)
    places = [geglu_linear._place.function(tile, down, outputs, 128, 128, 16) for tile in range(tiles)]
    assert sorted(places) == [(128 * m, 128 * n) for m in range(down) for n in range(outputs // 128)]
    for first in range(0, tiles - 131, 131):  # what runs at a time reads few rows, and not all weights
        assert len({m for m, _ in places[first : first + 132]}) <= 32


def test_a_launch_covers_all_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        _triton.Kernel, "launch", lambda self, grid, *args, **given: seen.append((grid, args, given))
    )
    with torch.device("meta"):
        x, weight, bias = (arg.half() for arg in inputs((2, 500), 640, 2560))
    out = geglu_linear._gluon_run(x, weight, bias)
    assert out.shape == (2, 500, 2560) and out.is_contiguous()
    (((programs,), args, given),) = seen
    parts = [arg for arg in args if isinstance(arg, Described)]
    assert [tuple(part.tensor.shape) for part in parts] == [(1000, 640), (5120, 640), (1000, 2560)]
    assert [part.block for part in parts] == [(128, 64), (128, 64), (128, 128)]
    down, tiles, outputs, blocks = args[4:]
    assert (programs, down, tiles, outputs, blocks) == (132, 8, 160, 2560, 10)
    stage = 2 * given["BLOCK_K"] * (given["ROWS"] + 2 * given["COLUMNS"])
    assert given["STAGES"] * stage + 2 * given["ROWS"] * given["COLUMNS"] + 1024 <= 227 * 1024


def test_strides_along_axes_of_length_1_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[Described] = []
    monkeypatch.setattr(
        _triton.Kernel,
        "launch",
        lambda self, grid, *args, **given: parts.extend(a for a in args if isinstance(a, Described)),
    )
    x, weight, bias = (arg.half() for arg in inputs((1, 1), 64, 128))
    for one in (loose(x), loose(x)[0], x.as_strided((1, 1, 64), (3, 5, 1))):
        assert geglu_linear._refuse(one, weight, bias) is None
        geglu_linear._gluon_run(one, weight, bias)
    assert [part.strides() for part in parts] == [[64, 1], [64, 1], [128, 1]] * 3


def test_off_the_gpu_it_is_pytorchs() -> None:
    args = tuple(arg.half() for arg in inputs((2, 128), 64, 128))
    assert op.route(*args).name == REFERENCE
    assert op.defaults["cuda"](*args) == REFERENCE
