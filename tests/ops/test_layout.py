"""What _layout.py reads off strides, against the addresses they stand for, and _cases.py's inputs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from clearway.ops._cases import normal
from clearway.ops._layout import in_layout_of, plane_strides, refuse_others, row_groups, row_stride

BASE = torch.arange(2 * 6 * 4 * 8).reshape(2, 6, 4, 8)
VIEWS = [
    BASE,
    BASE[:, ::2],
    BASE[:, :, ::2],
    BASE[..., ::2],
    BASE[..., 2:5],
    BASE[:1, :, 1:2],
    BASE.transpose(1, 2),
    BASE.transpose(2, 3),
    BASE.movedim(1, -1),
    BASE[:, :, :1],
    BASE[0, 0],
    BASE[0, 0, 0],
]


def starts(x: Tensor) -> list[int]:
    """Where each row along the last axis begins."""
    places = itertools.product(*map(range, x.shape[:-1]))
    return [sum(i * stride for i, stride in zip(place, x.stride()[:-1], strict=True)) for place in places]


@pytest.mark.parametrize("x", VIEWS, ids=lambda x: f"{tuple(x.shape)} {x.stride()}")
def test_row_stride_is_the_step_between_rows(x: Tensor) -> None:
    steps = {b - a for a, b in itertools.pairwise(starts(x))}
    uniform = len(steps) <= 1 and x.stride(-1) == 1
    found = row_stride(x)
    assert (found is not None) == uniform
    assert not steps or not uniform or steps == {found}


@pytest.mark.parametrize("x", VIEWS, ids=lambda x: f"{tuple(x.shape)} {x.stride()}")
def test_row_groups_reach_every_row(x: Tensor) -> None:
    found = row_groups(x)
    if found is None:
        assert row_stride(x) is None
        return
    rows, group, step = found
    places = starts(x)
    assert [(i // rows) * group + (i % rows) * step for i in range(len(places))] == places
    assert row_stride(x) is None or rows == len(places)


def test_row_groups_of_packed_heads_and_of_what_has_none() -> None:
    packed = torch.empty(2, 5, 3, 4, 8)
    assert row_groups(packed[:, :, 1]) == (4, 96, 8)
    assert row_groups(packed[:, :, 1].transpose(1, 2)) is None  # image, head and position at three strides
    assert row_groups(packed[:1, :, 1].transpose(1, 2)) == (5, 8, 96)
    assert row_groups(packed.transpose(3, 4)) is None


@pytest.mark.parametrize("x", [view for view in VIEWS if view.dim() == 4], ids=lambda x: str(x.stride()))
def test_plane_strides_reach_every_element(x: Tensor) -> None:
    found = plane_strides(x)
    wanted = x.flatten(2) if x[0, 0].is_contiguous() else None
    if found is not None:
        size = x[0, 0].numel()
        again = BASE.flatten().as_strided((*x.shape[:2], size), found, x.storage_offset())
        assert torch.equal(again, x.flatten(2))
    else:
        assert wanted is None


def test_parameters_must_fit() -> None:
    x = torch.zeros(2, 4, dtype=torch.float16)
    assert refuse_others(x, 4, weight=torch.ones(4), bias=None) is None
    assert refuse_others(x, 4, weight=torch.ones(4).half(), bias=torch.ones(4).half()) is None
    assert "differ" in str(refuse_others(x, 4, weight=torch.ones(4), bias=torch.ones(4).half()))
    assert "weight is torch.bfloat16" in str(refuse_others(x, 4, weight=torch.ones(4).bfloat16()))
    assert "contiguous" in str(refuse_others(x, 4, weight=torch.ones(8)[::2]))


def test_in_layout_of_copies_only_if_it_must() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    fitting, other = torch.randn_like(x), torch.randn(2, 3, 4, 5)
    assert in_layout_of(x, fitting) is fitting
    moved = in_layout_of(x, other)
    assert torch.equal(moved, other) and moved.stride() == x.stride()


def test_cases_are_seeded_by_shape_and_seed() -> None:
    assert torch.equal(normal(3, 4), normal(3, 4))
    assert not torch.equal(normal(3, 4), normal(3, 4, seed=1))
    with torch.device("meta"):
        assert normal(3, 4).is_meta
