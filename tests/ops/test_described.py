"""Described tensors: told apart as Triton tells descriptors apart, and made of a stand-in too."""

from __future__ import annotations

import pytest
import torch

from clearway.ops._described import Described
from clearway.ops.ahead import Like, _like, _sign
from ops.test_triton import needs_triton


def test_a_sign_is_of_dtype_and_block_alone() -> None:
    x, y = (torch.zeros(shape, dtype=torch.float16) for shape in ((4, 64), (8, 128)))
    assert Described(x, (2, 64)).sign() == Described(y, (2, 64)).sign()
    assert Described(x, (2, 64)).sign() != Described(x, (4, 64)).sign()
    assert Described(x, (2, 64)).sign() != Described(x.bfloat16(), (2, 64)).sign()
    assert _sign(Described(x, (2, 64))) == (torch.float16, (2, 64))


@pytest.mark.parametrize(
    ("shape", "strides", "wanted"),
    [
        ((3, 4, 64), (256, 64, 1), [256, 64, 1]),
        ((3, 1, 64), (64, 1, 1), [64, 64, 1]),
        ((1, 4, 64), (7, 64, 1), [256, 64, 1]),
        ((2, 1, 1, 64), (64, 1, 1, 1), [64, 64, 64, 1]),
        ((1, 1, 64), (5, 3, 1), [64, 64, 1]),
        ((3, 1, 64), (640, 9, 1), [640, 64, 1]),
        ((4, 1), (8, 5), [8, 1]),
    ],
)
def test_strides_that_lead_nowhere_are_dense(
    shape: tuple[int, ...], strides: tuple[int, ...], wanted: list[int]
) -> None:
    x = torch.zeros(2000).as_strided(shape, strides)
    assert Described(x, shape).strides() == wanted
    assert torch.equal(x.as_strided(shape, wanted), x)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_stand_in_is_described_alike(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 16, 128, dtype=dtype)
    found, wanted = _like(Described(x, (1, 8, 64))), Described(x, (1, 8, 64)).made()
    assert isinstance(found.base, Like) and wanted.base is x
    for name in ("shape", "strides", "block_shape", "layout"):
        assert getattr(found, name) == getattr(wanted, name)
    assert wanted.shape == [3, 16, 128] and wanted.block_shape == [1, 8, 64]
