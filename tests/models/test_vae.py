"""Decoding: one at a time, scaled, and again in float32 where half precision gives NaN."""

from types import SimpleNamespace

import pytest
import torch

from clearway import UnavailableError
from clearway.models import vae


class Vae(torch.nn.Module):
    """Decodes to the mean of a row; NaN below float32 if `fragile`, always if `broken`."""

    def __init__(self, dtype: torch.dtype, fragile: bool = False, broken: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=dtype), requires_grad=False)
        self.fragile, self.broken = fragile, broken
        self.rows: list[int] = []

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def decode(self, z, return_dict):
        self.rows.append(z.shape[0])
        assert z.dtype == self.dtype
        out = z.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1) * self.weight
        bad = self.broken or (self.fragile and self.dtype != torch.float32)
        return (out * float("nan") if bad else out,)


def model(vae_module: Vae):
    return SimpleNamespace(
        vae=vae_module,
        latent_scale=0.5,
        latent_shift=0.25,
        precision=SimpleNamespace(unet="float16", sampling="float32"),
    )


LATENTS = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(0)) * 0.1


def test_one_picture_at_a_time_scaled_and_shifted() -> None:
    module = Vae(torch.float32)
    pixels, note = vae.decode(model(module), LATENTS)
    torch.testing.assert_close(pixels[:, 0], (LATENTS / 0.5 + 0.25).mean(dim=1))
    assert module.rows == [1, 1, 1]
    assert note is None


def test_nan_in_half_precision_runs_again_in_float32_and_says_so() -> None:
    module = Vae(torch.float16, fragile=True)
    pixels, note = vae.decode(model(module), LATENTS)
    assert torch.isfinite(pixels).all()
    assert note is not None and "float16" in note and "float32" in note


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nan_in_float32_is_a_sentence(dtype: torch.dtype) -> None:
    with pytest.raises(UnavailableError, match="NaN"):
        vae.decode(model(Vae(dtype, broken=True)), LATENTS)


def test_nan_latents_name_the_dtype_that_may_be_at_fault() -> None:
    broken = model(Vae(torch.float32))
    with pytest.raises(UnavailableError, match=r"UNet in float16.*dtype float32"):
        vae.decode(broken, LATENTS * float("inf"))
    broken.precision.unet = "float32"
    with pytest.raises(UnavailableError, match="smaller eta"):
        vae.decode(broken, LATENTS * float("inf"))
