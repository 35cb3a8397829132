"""Rotary embedding: the reference against complex numbers and against Diffusers."""

from __future__ import annotations

import torch

from clearway.ops.rope import inputs, rope


def test_is_a_rotation_of_complex_numbers() -> None:
    x, cos, sin = (arg.double() for arg in inputs(2, 3, 5, 16))
    turned = torch.view_as_complex(x.reshape(2, 3, 5, 8, 2)) * torch.complex(cos, sin)[:, ::2]
    torch.testing.assert_close(rope(x, cos, sin), torch.view_as_real(turned).flatten(-2))


def test_keeps_lengths_and_undoes() -> None:
    x, cos, sin = (arg.double() for arg in inputs(1, 2, 7, 32))
    turned = rope(x, cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rope(turned, cos, -sin), x)


def test_only_the_distance_of_positions_counts() -> None:
    """q at m with k at n scores as q at m + 3 with k at n + 3."""
    angles = torch.outer(
        torch.arange(12.0, dtype=torch.float64), torch.tensor([1.0, 0.1], dtype=torch.float64)
    )
    angles = angles.repeat_interleave(2, -1)
    q, k = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64).unbind()
    q, k = (
        rope(q.expand(1, 1, 12, 4), angles.cos(), angles.sin()),
        rope(k.expand(1, 1, 12, 4), angles.cos(), angles.sin()),
    )
    scores = (q @ k.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores[3:, 3:], scores[:-3, :-3])


def test_keeps_the_layout() -> None:
    x, cos, sin = inputs(2, 3, 5, 16, positions_first=True)
    assert rope(x, cos, sin).stride() == x.stride() != x.contiguous().stride()


def test_agrees_with_diffusers() -> None:
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.transformers.transformer_ltx import apply_rotary_emb as apply_ltx

    x, cos, sin = inputs(2, 3, 5, 16)
    torch.testing.assert_close(rope(x, cos, sin), apply_rotary_emb(x, (cos, sin)))
    wide, cos, sin = inputs(2, 1, 5, 64)
    tables = cos.expand(2, 5, 64), sin.expand(2, 5, 64)
    torch.testing.assert_close(rope(wide, cos, sin)[:, 0], apply_ltx(wide[:, 0], tables))
