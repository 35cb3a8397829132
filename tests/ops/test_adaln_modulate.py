"""AdaLN modulation: the reference against its formula and Diffusers' layer."""

from __future__ import annotations

import torch

from clearway.ops.adaln_modulate import adaln_modulate, inputs


def test_matches_the_formula_in_float64() -> None:
    x, scale, shift, eps = (
        arg.double() if isinstance(arg, torch.Tensor) else arg for arg in inputs(2, 5, 24)
    )
    expected = torch.empty_like(x)
    for image in range(2):
        centred = x[image] - x[image].mean(-1, keepdim=True)
        normalised = centred / ((centred**2).mean(-1, keepdim=True) + eps).sqrt()
        expected[image] = normalised * (1 + scale[image]) + shift[image]
    torch.testing.assert_close(adaln_modulate(x, scale, shift, eps), expected)


def test_zero_modulation_is_the_plain_norm() -> None:
    x, scale, shift, eps = inputs(2, 5, 24)
    plain = torch.nn.functional.layer_norm(x, (24,), None, None, eps)
    assert torch.equal(adaln_modulate(x, scale * 0, shift * 0, eps), plain)


def test_agrees_with_diffusers() -> None:
    from diffusers.models.normalization import AdaLayerNormZero

    torch.manual_seed(0)
    layer = AdaLayerNormZero(24).eval()
    x, embedding = torch.randn(2, 5, 24), torch.randn(2, 24)
    with torch.no_grad():
        expected, *_ = layer(x, emb=embedding)
        shift, scale, *_ = layer.linear(layer.silu(embedding)).chunk(6, dim=1)
        torch.testing.assert_close(adaln_modulate(x, scale, shift, 1e-6), expected)
