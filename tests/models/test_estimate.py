"""The estimates against the live bytes of the real networks, which run on meta: nothing is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clearway.measure.random_model import _PLANS
from clearway.models import estimate, library
from clearway.models.build import classes, diffusers_module
from clearway.models.card import read_object
from live_bytes import Live, measured

SIZES = ((64, 64), (96, 168), (40, 56))


def configs(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if name == "embedded":
        folder = library.embedded_folder()
        return read_object(folder / "unet" / "config.json"), read_object(folder / "vae" / "config.json")
    return _PLANS[name].unet, _PLANS[name].vae


@pytest.fixture(scope="module", params=["sd15", "sdxl", "tiny-sd15", "tiny-sdxl", "embedded"])
def networks(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """(UNet, VAE) of the real configurations, without memory."""
    unet, vae = configs(request.param)
    made = classes()
    return (
        diffusers_module(made.unet, unet, "unet").half().eval(),
        diffusers_module(made.vae, vae, "vae").half().eval(),
    )


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("h", "w"), SIZES)
def test_a_vae_decode_holds_what_was_estimated(networks: tuple[Any, Any], h: int, w: int) -> None:
    vae = networks[1]
    peak = measured(lambda: vae.decode(empty(1, 4, h, w), return_dict=False))
    found = estimate.vae_live_bytes(vae.config, 8 * h, 8 * w, 2)
    assert peak <= found * 1.001 <= 1.5 * peak  # the latents themselves are left out
    assert found < estimate.vae_decode_bytes(vae.config, 8 * h, 8 * w, 2, channels_last=True)


@pytest.mark.parametrize(("h", "w"), SIZES)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_unet_call_holds_what_was_estimated(networks: tuple[Any, Any], rows: int, h: int, w: int) -> None:
    unet = networks[0]
    added = {}
    if unet.config.addition_embed_type:
        pooled = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        added = {"text_embeds": empty(rows, pooled), "time_ids": empty(rows, 6)}
    context = empty(rows, 77, unet.config.cross_attention_dim)

    def run() -> None:
        unet(
            empty(rows, 4, h, w),
            empty(rows, dtype=torch.float32),
            encoder_hidden_states=context,
            added_cond_kwargs=added,
            return_dict=False,
        )

    peak, found = measured(run), estimate.unet_live_bytes(unet.config, rows, h, w, 2)
    assert peak <= found * 1.001 <= 1.5 * peak


def test_bytes_follow_pixels_rows_and_element_size() -> None:
    unet, vae = (SimpleNamespace(**part) for part in configs("sdxl"))
    whole = estimate.vae_decode_bytes(vae, 1024, 1024, 2)
    assert estimate.vae_decode_bytes(vae, 512, 1024, 4) == whole
    assert estimate.vae_decode_bytes(vae, 2048, 1024, 2) == 2 * whole
    one = estimate.unet_bytes(unet, 1, 128, 128, 2)
    assert estimate.unet_bytes(unet, 6, 128, 128, 2) == 6 * one
    assert estimate.unet_bytes(unet, 1, 128, 128, 4) == 2 * one
    assert estimate.unet_bytes(unet, 1, 128, 128, 2, channels_last=True) < one


def test_a_half_precision_decode_of_sdxl_takes_two_and_a_half_gib() -> None:
    """768 channels alive, 512 of workspace, 1024 x 1024 pixels, 2 bytes: 2.5 GiB."""
    vae = SimpleNamespace(**configs("sdxl")[1])
    assert estimate.vae_decode_bytes(vae, 1024, 1024, 2) == (3 * 256 + 512) * 1024 * 1024 * 2


def test_weights_are_counted_once_each() -> None:
    one, other = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4, bias=False)
    assert estimate.weight_bytes([one]) == (8 * 4 + 4) * 4
    other.weight = one.weight
    assert estimate.weight_bytes([one, other]) == (8 * 4 + 4) * 4
    one.weight.data = torch.zeros(3, 4, 8)[1].detach()  # a view: the whole memory is held
    assert estimate.weight_bytes([other]) == 3 * 4 * 8 * 4
    meta = torch.nn.Linear(8, 4, device="meta")
    assert estimate.weight_bytes([meta, torch.nn.BatchNorm1d(4, device="meta")]) == (36 + 4 * 4) * 4 + 8


def test_live_bytes_are_those_of_tensors_at_once() -> None:
    x = torch.zeros(100)
    with Live() as live:
        one = x + 1  # 400
        two = one * 2  # 800
        del one
        view = two.view(10, 10)
        view = view + 1  # 800
        del two
        view.add_(1)
    assert live.peak_bytes == 800
