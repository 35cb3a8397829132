"""Decoding: one at a time, scaled, and again in float32 where half precision gives NaN."""

from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch

from clearway import UnavailableError
from clearway.device import Device
from clearway.execution.cuda_graph import CudaGraph
from clearway.execution.pool import Pool
from clearway.models import vae
from clearway.models._moved import Moved
from fake_capture import Recorder


class Vae(torch.nn.Module):
    """Decodes to the mean of a row, eight times as large; below float32 NaN where the mean is below `limit`,
    in any precision if `broken`."""

    def __init__(self, dtype: torch.dtype, limit: float = -1e9, broken: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=dtype), requires_grad=False)
        self.limit, self.broken = limit, broken
        self.shapes: list[tuple[int, ...]] = []

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def decode(self, z, return_dict):
        self.shapes.append((*z.shape, z.element_size()))
        assert z.dtype == self.dtype
        out = z.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1) * self.weight
        out = torch.nn.functional.interpolate(out, scale_factor=8.0)
        bad = self.broken or (self.dtype != torch.float32 and bool(z.float().mean() < self.limit))
        return (out * float("nan") if bad else out,)


def model(vae_module: Vae):
    return SimpleNamespace(
        vae=vae_module,
        latent_scale=0.5,
        latent_shift=0.25,
        latent_factor=8,
        precision=SimpleNamespace(unet="float16", vae="float16", sampling="float32"),
    )


LATENTS = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(0)) * 0.1
DARK = torch.tensor([1.0, -1.0, 1.0]).view(3, 1, 1, 1).expand(3, 4, 2, 2)


def test_the_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, inner = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: waits.append(tensor) or inner(tensor))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: pytest.fail("read by itself"))
    vae.decode(model(Vae(torch.float32)), LATENTS)
    assert len(waits) == 1


def test_one_picture_at_a_time_scaled_and_shifted() -> None:
    module = Vae(torch.float32)
    made = vae.decode(model(module), LATENTS)
    assert made.pixels.shape == (3, 3, 16, 16)
    torch.testing.assert_close(made.pixels[:, 0, ::8, ::8], (LATENTS / 0.5 + 0.25).mean(dim=1))
    assert module.shapes == [(1, 4, 2, 2, 4)] * 3
    assert (made.notes, made.dtypes, made.tiles) == ((), ("float32",) * 3, (None,) * 3)


def test_nan_in_half_precision_runs_again_in_float32_and_says_so() -> None:
    made = vae.decode(model(Vae(torch.float16, limit=1e9)), LATENTS[:1])
    assert torch.isfinite(made.pixels).all() and made.dtypes == ("float32",)
    assert made.notes == ("the VAE returned NaN in float16: it ran again in float32, where it stays",)


def test_only_the_failing_picture_runs_again() -> None:
    module = Vae(torch.float16, limit=-0.5)
    made = vae.decode(model(module), DARK)
    assert [shape[-1] for shape in module.shapes] == [2, 2, 2, 4]
    assert made.dtypes == ("float16", "float32", "float16")
    assert "in 1 of 3 pictures: that one ran again in float32" in made.notes[0]
    expected = (DARK / 0.5 + 0.25).mean(dim=1)[:, 0, 0]
    torch.testing.assert_close(made.pixels[:, 0, 0, 0], expected)
    assert vae.decode(model(module), DARK).dtypes == ("float32",) * 3  # it stayed there
    assert "in 3 of 3 pictures: these ran" in vae.decode(model(Vae(torch.float16, 1e9)), DARK).notes[0]


def test_tiles_are_decided_by_the_precision_at_work() -> None:
    """Whole in half precision fits, in float32 it does not: only what runs again is tiled."""
    latents = torch.cat([torch.ones(1, 4, 8, 100), -torch.ones(1, 4, 8, 100)])
    module = Vae(torch.float16, limit=-0.5)
    made = vae.decode(model(module), latents, tiled=lambda size: size == 4)
    assert made.tiles == (None, vae.LABEL) and made.dtypes == ("float16", "float32")
    assert "again in float32, by tiles (64/16)" in made.notes[0]
    assert [shape[3] for shape in module.shapes] == [100, 100, 64, 64]
    torch.testing.assert_close(made.pixels[1], torch.full((3, 64, 800), -1.75))


def test_one_nan_tile_makes_the_whole_picture_run_again() -> None:
    latents = torch.ones(1, 4, 8, 112)
    latents[..., 64:] = -3
    module = Vae(torch.float16, limit=-1)
    made = vae.decode(model(module), latents, tiled=lambda size: True)
    assert [shape[-1] for shape in module.shapes] == [2, 2, 4, 4]
    assert torch.isfinite(made.pixels).all() and made.tiles == (vae.LABEL,)


def test_what_is_no_more_than_a_tile_is_decoded_whole() -> None:
    module = Vae(torch.float32)
    assert vae.decode(model(module), torch.ones(1, 4, 64, 64), tiled=lambda size: True).tiles == (None,)


def test_captured_graphs_follow_a_change_of_precision() -> None:
    """Those of half precision are not replayed after it."""
    module = Vae(torch.float16, limit=-0.5)
    module.shapes = deque()  # a list that grows would be a setting that changes
    run = CudaGraph(module.decode, "vae", counts := Counter[str](), Pool(Recorder()))
    made = vae.decode(model(module), DARK, run)
    assert made.dtypes == ("float16", "float32", "float16") and torch.isfinite(made.pixels).all()
    again = vae.decode(model(module), DARK, run)
    torch.testing.assert_close(again.pixels, made.pixels, atol=2e-3, rtol=2e-3)
    assert counts == {"vae/cuda_graph": 7}


def test_a_visiting_vae_that_was_raised_rests_as_it_is() -> None:
    module = Vae(torch.float16, limit=-0.5)
    moved = Moved(module, Device("cpu"))
    moved.enter()
    vae.decode(model(module), DARK)
    moved.leave()
    assert module.dtype == torch.float32 and not moved.inside
    moved.enter()
    assert vae.decode(model(module), DARK).dtypes == ("float32",) * 3


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
