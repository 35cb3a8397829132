"""Padding: the reference against a tensor filled and written into."""

from __future__ import annotations

import pytest
import torch

from clearway.ops.constant_pad import constant_pad


@pytest.mark.parametrize("pad", [[1, 2], [0, 1, 0, 1], [2, 0, 0, 3, 1, 1]])
def test_the_middle_is_x_and_the_rest_the_value(pad: list[int]) -> None:
    x = torch.randn(2, 3, 4)
    out = constant_pad(x, pad, 1.5)
    before = [*pad[::2], *[0] * (3 - len(pad) // 2)][::-1]
    place = tuple(slice(start, start + size) for start, size in zip(before, x.shape, strict=True))
    expected = torch.full_like(out, 1.5)
    expected[place] = x
    assert torch.equal(out, expected)


def test_negative_amounts_cut() -> None:
    x = torch.randn(2, 5, 6)
    assert torch.equal(constant_pad(x, [-1, -2, -1, 0], 0.0), x[:, 1:, 1:-2])


def test_nothing_to_add_is_still_a_new_tensor() -> None:
    x = torch.randn(2, 3)
    out = constant_pad(x, [0, 0], 0.0)
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()
