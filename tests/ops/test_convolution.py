"""Convolution of small images: the formula, its properties, how it is cut and where it is preferred."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clearway.ops import _triton, attention_torch
from clearway.ops import convolution as source
from clearway.ops.contract import REFERENCE
from clearway.ops.convolution import Plan, convolution, inputs, plan
from ops.registry import named
from ops.test_triton import needs_triton

ROOT = Path(__file__).parents[2]


def direct(x: Tensor, weight: Tensor) -> Tensor:
    """Pixel by pixel in float64: y[o, r, s] = sum over taps of weight * x[r + i - 1, s + j - 1]."""
    batch, _, height, width = x.shape
    out = torch.zeros(batch, weight.shape[0], height, width, dtype=torch.float64)
    middle = weight.shape[-1] // 2
    for row in range(height):
        for column in range(width):
            for i in range(weight.shape[2]):
                for j in range(weight.shape[3]):
                    r, s = row + i - middle, column + j - middle
                    if 0 <= r < height and 0 <= s < width:
                        out[:, :, row, column] += x[:, :, r, s].double() @ weight[:, :, i, j].double().T
    return out


@pytest.mark.parametrize("side", [1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_matches_the_formula(side: int, last: bool) -> None:
    x, weight = (arg.double() for arg in inputs(2, 3, 4, 3, 5, side=side, last=last))
    y = convolution(x, weight)
    torch.testing.assert_close(y, direct(x, weight))
    assert y.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


INTERPRETED = """
import json, torch
from ops import interpreted
interpreted.repair_interpreter()
from clearway.ops import convolution as source
from ops.test_convolution import direct
run = source._split_k_run
found = {}

def apart(one, other):
    return float((one.double() - other.double()).abs().max())

def drawn(*shape, fan=1):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * fan**-0.5
    return made.half().contiguous(memory_format=torch.channels_last)

x, other, weight = drawn(2, 128, 5, 6), drawn(2, 128, 6, 5).transpose(2, 3), drawn(64, 128, 3, 3, fan=1152)
other = other.contiguous(memory_format=torch.channels_last)
y = run(x, weight)
found["formula"] = apart(y, direct(x, weight))
found["repeats"] = torch.equal(y, run(x, weight))
found["halved"] = torch.equal(run(x / 2, weight), y / 2)
found["sum"] = apart(run(x + other, weight), y + run(other, weight))
inside = torch.zeros_like(x)
inside[:, :, 1:-2, 1:-2] = x[:, :, 1:-2, 1:-2]
moved = torch.roll(inside, (1, 1), (2, 3)).contiguous(memory_format=torch.channels_last)
found["moved"] = apart(run(moved, weight)[:, :, 1:, 1:], run(inside, weight)[:, :, :-1, :-1])
ones, taps = torch.ones_like(x), torch.full_like(weight, 1 / 128)
found["border"] = run(ones, taps)[0, 0].tolist()
found["images"] = apart(run(x[1:], weight), y[1:])
found["shares"] = {}
for split in (1, 2, 5, 18):
    source._planned = lambda *_, split=split: source.Plan(64, 64, 64, split, 4, 2)
    found["shares"][split] = apart(run(x, weight), direct(x, weight))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    settings["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


ULP = 2.0**-10
"""Between numbers of 1 to 2 in float16; values here are below 4, so rounding once errs by half of two."""


@needs_triton
def test_split_k_is_linear_and_repeats_bit_for_bit(interpreted: dict[str, Any]) -> None:
    assert interpreted["formula"] < 2 * ULP
    assert interpreted["repeats"] and interpreted["halved"]
    assert interpreted["sum"] < 8 * ULP  # x + other is rounded, and three results are


@needs_triton
def test_split_k_moves_with_the_image(interpreted: dict[str, Any]) -> None:
    """Within a rounding: the interpreter's products add up in an order that depends on the row."""
    assert interpreted["moved"] < 4 * ULP and interpreted["images"] < 4 * ULP


@needs_triton
def test_split_k_sees_zeros_beyond_the_border(interpreted: dict[str, Any]) -> None:
    """Ones everywhere: a pixel counts the taps that lie within the image."""
    high, wide = ([2, 3, 3, 3, 2], [2, 3, 3, 3, 3, 2])
    assert interpreted["border"] == [[float(a * b) for b in wide] for a in high]


@needs_triton
def test_split_k_is_as_near_however_a_sum_is_cut(interpreted: dict[str, Any]) -> None:
    assert all(error < 2 * ULP for error in interpreted["shares"].values())


@pytest.mark.parametrize("rows", [1, 64, 65, 128, 256, 512])
@pytest.mark.parametrize("processors", [16, 108, 132, 188])
def test_plans_fit_the_image_and_the_device(rows: int, processors: int) -> None:
    for outputs, reduction in itertools.product((64, 320, 640, 1280), (64, 640, 576, 11520, 23040)):
        made = plan(rows, outputs, reduction, processors, True)
        tiles = -(-rows // made.block_m) * (outputs // made.block_n)
        assert outputs % made.block_n == 0 and source.CHANNELS % made.block_k == 0
        assert 1 <= made.split <= reduction // made.block_k  # each share has a block at least
        assert made.split == 1 or tiles * made.split <= processors
        if reduction // made.block_k >= source.LEAST_BLOCKS * processors:  # enough to cut
            assert tiles * made.split > processors // 2


def test_plan_of_the_smallest_image_of_sd15() -> None:
    assert plan(128, 1280, 11520, 132, True)[:4] == (128, 128, 64, 13)
    assert plan(512, 1280, 11520, 132, True)[:4] == (128, 128, 64, 3)


@pytest.mark.parametrize(("roomy", "most_kib"), [(True, 163), (False, 99)])
def test_what_is_read_ahead_fits_in_shared_memory(roomy: bool, most_kib: int) -> None:
    for rows, outputs in itertools.product((8, 128, 512), (64, 320, 1280)):
        made = plan(rows, outputs, 11520, 132, roomy)
        assert 2 * made.stages * made.block_k * (made.block_m + made.block_n) <= 1024 * most_kib


def test_shares_are_held_once_and_added_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors: shapes only."""
    launched: list[tuple[str, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        _triton.Kernel,
        "launch",
        lambda self, grid, *args, **options: launched.append((self.name, grid, args, options)),
    )
    with torch.device("meta"):
        x, weight = (arg.half() for arg in inputs(2, 1280, 1280, 8, 8))
    out = source._split_k_run(x, weight)
    assert out.shape == x.shape and out.is_contiguous(memory_format=torch.channels_last)
    (name, grid, args, _), (added, blocks, summed, options) = launched
    assert (name, added) == ("_product", "_add") and grid == (10, 1, 13) and blocks == (160,)
    assert args[2] is summed[0] and summed[1] is out and options["SPLIT"] == 13
    assert args[2].shape == (13, 128, 1280) and args[2].dtype == torch.float32
    monkeypatch.setattr(source, "_planned", lambda *_: Plan(128, 128, 64, 1, 8, 4))
    launched.clear()
    out = source._split_k_run(x, weight)
    assert [one[0] for one in launched] == ["_product"] and launched[0][2][2] is out


def test_it_is_preferred_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = (arg.half() for arg in inputs(1, 64, 64, 3, 3))
    for capability, wanted in (
        ((9, 0), "split_k"),
        ((8, 0), REFERENCE),
        ((10, 0), REFERENCE),
        (None, REFERENCE),
    ):
        monkeypatch.setattr(attention_torch, "capability", lambda tensor, found=capability: found)
        assert convolution.defaults["cuda"](x, weight) == wanted


def test_large_images_are_left_to_pytorch() -> None:
    refuse = named(convolution, "split_k").refuse
    with torch.device("meta"):
        fits, larger = ([arg.half() for arg in inputs(2, 1280, 1280, side, side)] for side in (16, 32))
    assert refuse(*fits) is None
    assert "2048 pixels in all; it takes up to 512" in str(refuse(*larger))
