"""Residual addition's reference against plain sums, in any layout."""

from __future__ import annotations

import torch

from clearway.ops.residual_add import inputs, residual_add


def test_is_the_sum_of_its_parts() -> None:
    x, bias, residual = (arg.double() for arg in inputs(2, 3, 4, 5))
    expected = [
        [[[float(x[n, c, i, j] + bias[c] + residual[n, c, i, j]) for j in range(5)] for i in range(4)]
         for c in range(3)]
        for n in range(2)
    ]  # fmt: skip
    torch.testing.assert_close(residual_add(x, bias, residual), torch.tensor(expected, dtype=torch.float64))


def test_keeps_the_layout_of_x_and_gives_a_new_tensor() -> None:
    x, bias, residual = inputs(1, 4, 3, 5)
    for given in ((x, bias, residual.contiguous()), (x, None, residual), (x, None, None)):
        out = residual_add(*given)
        assert out.stride() == x.stride() and out.data_ptr() != x.data_ptr()
    assert torch.equal(residual_add(x, None, None), x)
