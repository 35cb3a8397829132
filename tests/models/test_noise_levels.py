"""Noise levels against formulas in numpy and against Diffusers' rescaling."""

import math

import numpy as np
import pytest
import torch

from clearway.models.noise_levels import from_betas, linear, scaled_linear


def test_the_usual_levels() -> None:
    found = scaled_linear()
    assert found.shape == (1000,) and found.dtype == torch.float32 and found.device.type == "cpu"
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=np.float64) ** 2
    kept = np.exp(np.cumsum(np.log1p(-betas)))
    assert np.allclose(found.numpy(), np.sqrt(1 / kept - 1), rtol=1e-6)
    assert found[0].item() == pytest.approx(0.02917, abs=5e-6)  # the WebUI's for SD 1.x
    assert found[-1].item() == pytest.approx(14.6146, abs=5e-5)
    assert (found.diff() > 0).all()


def test_zero_terminal_snr() -> None:
    from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr

    found = scaled_linear(zero_terminal_snr=True)
    assert found[-1].item() == pytest.approx(math.sqrt((1 - 4.8973451890853435e-08) / 4.8973451890853435e-08))
    assert found[0].item() == pytest.approx(scaled_linear()[0].item(), rel=1e-5)
    assert (found.diff() > 0).all()
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    kept = torch.cumprod(1 - rescale_zero_terminal_snr(betas), 0)[:-1]
    assert torch.allclose(found[:-1].double(), ((1 - kept) / kept).sqrt(), rtol=1e-5)


def test_given_betas_and_linear_ones() -> None:
    assert torch.allclose(from_betas([0.1, 0.2]), torch.tensor([0.1 / 0.9, 0.28 / 0.72]).sqrt())
    assert torch.equal(linear(0.1, 0.3, 3), from_betas([0.1, 0.2, 0.3]))
