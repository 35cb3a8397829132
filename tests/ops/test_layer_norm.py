"""LayerNorm of a sum: the reference against its formula."""

from __future__ import annotations

import pytest
import torch

from clearway.ops.layer_norm import inputs, layer_norm


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_matches_the_formula_in_float64(residual: bool, affine: bool) -> None:
    given = inputs(3, 5, 24, residual=residual, affine=affine)
    x, other, weight, bias, eps = (arg.double() if isinstance(arg, torch.Tensor) else arg for arg in given)
    total = x if other is None else x + other
    centred = total - total.mean(-1, keepdim=True)
    expected = centred / ((centred**2).mean(-1, keepdim=True) + eps).sqrt()
    if affine:
        expected = expected * weight + bias
    out, summed = layer_norm(x, other, weight, bias, eps)
    torch.testing.assert_close(out, expected)
    if residual:
        assert torch.equal(summed, total)
    else:
        assert summed.shape == (0,)


def test_is_blind_to_shift_and_scale() -> None:
    x = torch.randn(4, 64, dtype=torch.float64)
    plain, _ = layer_norm(x, None, None, None, 0.0)
    moved, _ = layer_norm(5 * x + 100, None, None, None, 0.0)
    torch.testing.assert_close(moved, plain)


def test_both_outputs_are_contiguous_and_new() -> None:
    x, residual, *rest = inputs(4, 8, 6, residual=True)
    out, summed = layer_norm(x.transpose(1, 2), residual.transpose(1, 2), None, None, rest[-1])
    assert out.is_contiguous() and summed.is_contiguous()


def test_takes_parameters_of_another_dtype() -> None:
    x, _, weight, bias, eps = inputs(2, 16)
    out, _ = layer_norm(x.half(), None, weight, bias, eps)
    assert out.dtype == torch.float16
