"""Convolutions in Gluon without a GPU: how they are cut, and what their addresses read and write.

Nothing interprets Gluon, so what a launch is given is recorded and done by hand in PyTorch, block by block,
as the kernel's comments say: emulated, not run.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import evidence
from clearway.ops import _triton, attention_torch
from clearway.ops import convolution_gluon as source
from clearway.ops._cases import loose
from clearway.ops._described import Described
from clearway.ops._implementation import same_layout
from clearway.ops.convolution_gluon import SPLITS, TILES, Plan, plan
from clearway.ops.upsample_conv import phases_of, upsample_conv


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Launches are emulated; what each was given besides tensors."""
    seen: list[dict[str, Any]] = []

    def launch(self: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        seen.append({"name": self.name, "grid": grid, **constants})
        (convolve if self.name == "_convolve" else add)(grid, *args, **constants)

    monkeypatch.setattr(_triton.Kernel, "launch", launch)
    return seen


def block(part: Described, at: list[int], fill: Tensor | None = None) -> Tensor:
    """A block of a described tensor, zeros beyond it; with `fill` it is written, and what is beyond lost.

    By the strides that the copy engine is told, which takes them in 16 bytes.
    """
    strides = part.strides()
    assert strides[-1] == 1 and all(step * part.tensor.element_size() % 16 == 0 for step in strides[:-1])
    whole = part.tensor.as_strided(part.tensor.shape, strides)
    read = torch.zeros(part.block, dtype=part.tensor.dtype)
    inside, there = [], []
    for start, size, limit in zip(at, part.block, part.tensor.shape, strict=True):
        first, last = max(start, 0), max(min(start + size, limit), 0)
        there.append(slice(first, max(last, first)))
        inside.append(slice(first - start, max(last, first) - start))
    if fill is not None:
        whole[tuple(there)] = fill.reshape(part.block)[tuple(inside)].to(whole.dtype)
    read[tuple(inside)] = whole[tuple(there)]
    return read


def convolve(grid: tuple[int, ...], *args: Any, **given: Any) -> None:
    x, weight, more, out, rest, bias, images, height, across, down, outputs, per_tap = args
    first, second, deep, side = (given[key] for key in ("FIRST", "SECOND", "BLOCK_K", "SIDE"))
    rows, up = given["HEIGHT"] * given["WIDTH"], side == 2
    columns = (4 if up else 1) * outputs // (first + second)
    for tile, share in itertools.product(range(grid[0]), range(grid[1])):
        place, column = divmod(tile, columns)
        column *= first + second
        phase = column // outputs
        (n, y), x0 = divmod(place // across, down), place % across * given["WIDTH"]
        y0, a, b = y * given["HEIGHT"], phase // 2, phase % 2
        total = torch.zeros(rows, first + second)
        blocks = side * side * per_tap
        for k in range(share * blocks // grid[1], (share + 1) * blocks // grid[1]):
            tap, c = k // per_tap, k % per_tap * deep
            pixels = block(x, [n, y0 + a - 1 + tap // side, x0 + b - 1 + tap % side, c]).reshape(rows, deep)
            taps = [block(weight, [column, k * deep]), block(more, [column + first, k * deep])]
            total += pixels.float() @ torch.cat(taps).float().T
        o = column - phase * outputs
        if given["HAS_BIAS"]:
            total += bias[o : o + first + second].float()
        n += share * images
        at = [n * height + y0, a, x0, b] if up else [n, y0, x0]
        block(out, [*at, o], total[:, :first])
        block(rest, [*at, o + first], total[:, first:])


def add(grid: tuple[int, ...], shares: Tensor, out: Tensor, bias: Tensor, *rest: Any, **given: Any) -> None:
    total = shares.view(given["SPLIT"], -1, rest[1]).sum(0)
    total = total + bias.float() if given["HAS_BIAS"] else total
    out.permute(0, 2, 3, 1).copy_(total.view(out.permute(0, 2, 3, 1).shape))


def drawn(*shape: int, fan: int = 1) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * fan**-0.5
    return made.half().contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made.half()


CUTS = [
    Plan(TILES[2], 8, 8, 1, 0.0),
    Plan(TILES[2], 1, 64, 1, 0.0),
    Plan(TILES[2], 4, 16, 2, 0.0),
    Plan(TILES[1], 8, 8, 3, 0.0),
    Plan(TILES[0], 32, 4, 1, 0.0),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("size", [(8, 8), (5, 11), (1, 70)])
def test_every_cut_reads_and_writes_what_a_convolution_does(
    emulated: list[dict[str, Any]], cut: Plan, size: tuple[int, int]
) -> None:
    outputs = cut.tile.first + cut.tile.second
    x, weight, bias = drawn(2, 64, *size), drawn(outputs, 64, 3, 3, fan=576), drawn(outputs)
    for plus in (None, bias):
        found = source.cut_so(x, weight, plus, cut)
        wanted = F.conv2d(x.float(), weight.float(), None if plus is None else plus.float(), padding=1)
        torch.testing.assert_close(found.float(), wanted, rtol=0, atol=4e-3)
        assert found.is_contiguous(memory_format=torch.channels_last)
    assert [one["name"] for one in emulated] == (
        ["_convolve", "_add"] if cut.split > 1 else ["_convolve"]
    ) * 2
    evidence.note("convolution", "gluon", "emulated", "CPU")


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("size", [(32, 4), (32, 11)])
def test_phases_are_written_where_they_belong(
    emulated: list[dict[str, Any]], cut: Plan, size: tuple[int, int]
) -> None:
    outputs = cut.tile.first + cut.tile.second
    x, weight, bias = drawn(2, 64, *size), drawn(outputs, 64, 3, 3, fan=576), drawn(outputs)
    for plus in (None, bias):
        found = source.cut_so(x, phases_of(weight), plus, cut)
        large = F.interpolate(x.float(), scale_factor=2.0)
        wanted = F.conv2d(large, weight.float(), None if plus is None else plus.float(), padding=1)
        torch.testing.assert_close(found.float(), wanted, rtol=0, atol=6e-3)
    assert all(one["SIDE"] == 2 for one in emulated if one["name"] == "_convolve")
    evidence.note("upsample_conv", "gluon", "emulated", "CPU")


@pytest.mark.parametrize("size", [(2, 1, 1), (1, 1, 9), (1, 9, 1), (1, 1, 1)])
def test_strides_along_axes_of_length_1_may_be_any(
    emulated: list[dict[str, Any]], size: tuple[int, int, int]
) -> None:
    """PyTorch calls such tensors channels-last."""
    batch, *sides = size
    x, weight, bias = loose(drawn(batch, 64, *sides)), drawn(160, 64, 3, 3, fan=576), drawn(160)
    assert source.refuse(x, weight) is None
    wanted = F.conv2d(x.float(), weight.float(), padding=1)
    torch.testing.assert_close(source.run(x, weight).float(), wanted, rtol=0, atol=4e-3)
    large = F.interpolate(x.float(), scale_factor=2.0)
    wanted = F.conv2d(large, weight.float(), bias.float(), padding=1)
    upsampler = next(one for one in upsample_conv.implementations if one.name == "gluon")
    assert upsampler.refuse(x, weight, bias, phases_of(weight)) is None
    found = upsampler.run(x, weight, bias, phases_of(weight))
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=6e-3)
    assert same_layout(found, upsample_conv.reference.run(x, weight, bias))
    assert emulated


@pytest.mark.parametrize("side", [2, 3])
@pytest.mark.parametrize("there", [16, 78, 132, 144])
def test_plans_fit_the_image_and_the_device(side: int, there: int) -> None:
    sizes = ((1, 1), (8, 8), (12, 20), (24, 42), (96, 168), (128, 128))
    for batch, outputs, channels, (height, width) in itertools.product(
        (1, 2, 8), (160, 320, 1280), (64, 320, 2560), sizes
    ):
        made = plan(batch, channels, outputs, height, width, there, side)
        tile = made.tile
        assert made.height * made.width == tile.rows and outputs % (tile.first + tile.second) == 0
        assert side != 2 or height % made.height == 0
        assert made.split in SPLITS and made.split <= max(side * side * channels // 64, 1)
        assert 0 < made.use <= 1


def test_what_is_read_ahead_fits_hoppers_shared_memory() -> None:
    for tile in TILES:
        stage = 2 * source.CHANNELS * (tile.rows + tile.first + tile.second)
        assert tile.stages * stage + 1024 <= 227 * 1024
        # what is written lies in the stages: the wide part in the weights', the narrow one in the pixels'
        assert 4 * tile.rows * tile.first <= tile.stages * 2 * source.CHANNELS * tile.first
        assert 4 * tile.rows * tile.second <= tile.stages * 2 * source.CHANNELS * tile.rows


@pytest.mark.parametrize(
    ("shape", "tile", "split"),
    [
        ((2, 320, 320, 128, 128), (128, 320), 1),
        ((2, 640, 640, 64, 64), (128, 320), 1),
        ((2, 1280, 1280, 32, 32), (64, 320), 1),
        ((2, 320, 320, 64, 64), (64, 320), 1),
        ((2, 640, 640, 32, 32), (64, 160), 1),
        ((2, 1280, 1280, 16, 16), (64, 320), 4),
        ((2, 1280, 1280, 8, 8), (64, 160), 8),
    ],
)
def test_plans_of_the_unets_are_those_that_were_quickest(
    shape: tuple[int, int, int, int, int], tile: tuple[int, int], split: int
) -> None:
    """On an H200, by bench/gluon_on_device.py."""
    made = plan(*shape, 132)
    assert (made.tile.rows, made.tile.first + made.tile.second, made.split) == (*tile, split)


def test_where_most_of_its_tiles_would_be_empty_pytorch_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_torch, "capability", lambda tensor: (9, 0))
    with torch.device("meta"):
        for size, wanted in (((64, 64), True), ((24, 42), False), ((12, 20), True), ((8, 8), True)):
            x = torch.empty(2, 1280, *size).half().contiguous(memory_format=torch.channels_last)
            weight = torch.empty(1280, 1280, 3, 3).half().contiguous(memory_format=torch.channels_last)
            assert source.prefer(x, weight) == wanted, size
            assert source.refuse(x, weight) is None
