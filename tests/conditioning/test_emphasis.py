"""How weights change an embedding."""

import torch

from clearway.conditioning.emphasis import original

Z = torch.randn(1, 77, 8, generator=torch.Generator().manual_seed(0)) + 0.3


def test_the_mean_is_kept() -> None:
    weights = torch.ones(1, 77)
    weights[:, 3:9] = 1.4
    torch.testing.assert_close(original(Z, weights).mean(), Z.mean())


def test_weights_of_one_change_nothing() -> None:
    torch.testing.assert_close(original(Z, torch.ones(1, 77)), Z)


def test_a_common_factor_cancels() -> None:
    torch.testing.assert_close(original(Z, torch.full((1, 77), 1.7)), Z)


def test_the_formula() -> None:
    weights = torch.linspace(0.5, 1.5, 77)[None]
    weighted = Z * weights[..., None]
    torch.testing.assert_close(original(Z, weights), weighted * Z.mean() / weighted.mean())


def test_all_weights_zero_is_finite() -> None:
    assert torch.isfinite(original(Z, torch.zeros(1, 77))).all()
