"""SiLU of GroupNorm: the reference against its formula, and the launches of its Triton kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from clearway.ops import _triton, group_norm_silu_triton
from clearway.ops.group_norm_silu import group_norm_silu, inputs


def formula(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, shift: Tensor | None) -> Tensor:
    """In float64, by loops over images and groups."""
    out = torch.empty(x.shape, dtype=torch.float64)
    per_group = x.shape[1] // groups
    for n, group in itertools.product(range(x.shape[0]), range(groups)):
        channels = slice(group * per_group, (group + 1) * per_group)
        part = x[n, channels].double()
        if shift is not None:
            added = (shift if shift.dim() == 1 else shift[n])[channels].double()
            part = part + added.reshape(-1, *[1] * (part.dim() - 1))
        normalised = (part - part.mean()) / (part.var(correction=0) + eps).sqrt()
        by, plus = (one[channels].double().reshape(-1, *[1] * (part.dim() - 1)) for one in (weight, bias))
        out[n, channels] = normalised * by + plus
    return out


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(2, 12, 5, 7), (2, 12, 9), (1, 12, 2, 3, 4)])
def test_matches_the_formula(shape: tuple[int, ...], last: bool, shift: int) -> None:
    x, weight, bias, groups, eps, added, _ = inputs(*shape, groups=3, last=last, shift=shift)
    plain = formula(x, weight, bias, groups, eps, added)
    torch.testing.assert_close(group_norm_silu(x, weight, bias, groups, eps, added, False), plain.float())
    expected = plain * torch.sigmoid(plain)
    torch.testing.assert_close(group_norm_silu(x, weight, bias, groups, eps, added), expected.float())


def test_is_blind_to_shift_and_scale_of_x() -> None:
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    plain = group_norm_silu(x, None, None, 2, 0.0)
    torch.testing.assert_close(group_norm_silu(3 * x + 20, None, None, 2, 0.0), plain)
    torch.testing.assert_close(group_norm_silu(x, None, None, 2, 0.0, torch.ones(8)), plain)


@pytest.mark.parametrize("last", [False, True])
def test_keeps_the_layout(last: bool) -> None:
    args = inputs(2, 8, 5, 6, groups=2, last=last)
    assert group_norm_silu(*args).stride() == args[0].stride()


def test_channels_must_fill_the_groups() -> None:
    with pytest.raises(RuntimeError):
        group_norm_silu(torch.randn(1, 7, 2, 2), None, None, 2, 1e-5)


Launches = list[tuple[str, tuple[int, ...], tuple[object, ...], dict[str, object]]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What would be launched: (kernel, grid, arguments, constants)."""
    found: Launches = []
    monkeypatch.setattr(
        _triton.Kernel,
        "launch",
        lambda self, grid, *args, **constants: found.append((self.name, grid, args, constants)),
    )
    return found


def run(*shape: int, groups: int, last: bool = False) -> None:
    x = torch.empty(shape, device="meta", dtype=torch.float16)
    x = x.to(memory_format=torch.channels_last) if last else x
    group_norm_silu_triton.run(x, None, None, groups, 1e-5, None, True)


def test_small_groups_take_one_launch_whole_rows_two_and_other_large_ones_three(launches: Launches) -> None:
    run(2, 1280, 8, 8, groups=32)
    assert [(name, grid) for name, grid, *_ in launches] == [("_group", (32, 2))]
    launches.clear()
    run(1, 128, 1024, 1024, groups=32, last=True)
    assert [name for name, *_ in launches] == ["_sums", "_normalise"]
    launches.clear()
    run(1, 128, 1024, 1024, groups=32)
    assert [name for name, *_ in launches] == ["_moments", "_merge", "_apply"]
    launches.clear()
    run(1, 8200, 64, 64, groups=1, last=True)  # a row that no tile holds
    assert [name for name, *_ in launches] == ["_moments", "_merge", "_apply"]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 320, 64, 64), (1, 128, 1024, 1024), (1, 96, 37, 411), (3, 33, 4097, 3)]
)
def test_grids_cover_everything(launches: Launches, shape: tuple[int, ...], last: bool) -> None:
    run(*shape, groups=1 if shape[1] % 32 else 32, last=last)
    size = shape[2] * shape[3]
    for name, grid, args, constants in launches:
        if name == "_moments":
            chunk = args[5]
            assert (grid[0] - 1) * chunk < size <= grid[0] * chunk and chunk % constants["BLOCK_P"] == 0
        if name in ("_moments", "_apply"):
            assert grid[1] * constants["BLOCK_C"] >= shape[1] and grid[2] == shape[0]
        if name == "_apply":
            assert grid[0] * constants["BLOCK_P"] >= size
        if name in ("_sums", "_normalise"):
            chunk = args[6] if name == "_sums" else args[9]
            assert (grid[0] - 1) * chunk < size <= grid[0] * chunk and chunk % constants["BLOCK_P"] == 0
            assert constants["GROUPS"] * constants["PER_GROUP"] >= shape[1] and grid[1] == shape[0]
        assert max(grid[1:]) <= 65535


@pytest.mark.parametrize("last", [False, True])
def test_images_beyond_two_to_the_31_are_taken(launches: Launches, last: bool) -> None:
    run(1, 128, 8192, 8192, groups=32, last=last)
    name, grid, args, constants = launches[-1]
    rows = args[9] if name == "_normalise" else constants["BLOCK_P"]
    assert grid[0] * rows >= 8192 * 8192
