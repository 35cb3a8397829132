"""Tiles: they cover, their weights sum to one, they agree with the whole where the whole is local."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from clearway.device import Device
from clearway.models import estimate, library, load
from clearway.models.build import classes, diffusers_module
from clearway.models.card import read_object
from clearway.models.tiles import OVERLAP, TILE, decode_tiled, is_tiled, starts
from live_bytes import measured


@given(st.integers(1, 700))
def test_tiles_cover_a_side_and_overlap_enough(length: int) -> None:
    found = starts(length)
    assert found[0] == 0 and found[-1] == max(length - TILE, 0)
    assert all(right - left <= TILE - OVERLAP for left, right in pairwise(found))
    assert found == sorted(set(found))
    fewer = len(found) - 1
    assert fewer == 0 or TILE + (fewer - 1) * (TILE - OVERLAP) < length
    assert is_tiled(length, 1) == is_tiled(1, length) == (len(found) > 1)


def upsampled(latents: Tensor) -> Tensor:
    """Local, with a receptive field of one latent: three channels of four, eight times larger."""
    return torch.nn.functional.interpolate(latents[:, :3], scale_factor=8.0, mode="nearest")


@pytest.mark.parametrize(("h", "w"), [(64, 64), (65, 64), (100, 64), (20, 130), (113, 177), (8, 8)])
def test_a_local_decoder_gives_just_the_whole_picture(h: int, w: int) -> None:
    latents = torch.randn(1, 4, h, w, generator=torch.Generator().manual_seed(h * w))
    assert torch.equal(decode_tiled(upsampled, latents, 8), upsampled(latents))


def test_a_small_receptive_field_is_right_inside_and_faded_at_the_edges() -> None:
    """A 3 x 3 mean pads each tile with zeros: only the faded edges may differ, and by their small weights."""

    def smoothed(x: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(upsampled(x), 3, 1, 1)

    latents = torch.rand(1, 4, 80, 80, generator=torch.Generator().manual_seed(0))
    off = (decode_tiled(smoothed, latents, 8) - smoothed(latents)).abs()
    assert off.max() <= 0.5 / (OVERLAP * 8)
    assert (off > 0).float().mean() < 0.02


def test_weights_sum_to_one_and_are_never_negative() -> None:
    """Decode one tile to ones and all others to zeros: its weights. All tiles together: one everywhere."""
    latents, tile, overlap = torch.zeros(1, 4, 37, 53), 16, 4
    count = len(starts(37, tile, overlap)) * len(starts(53, tile, overlap))
    total = torch.zeros(1, 3, 74, 106)
    for chosen in range(count):
        calls = iter(range(count))
        weights = decode_tiled(
            lambda x, chosen=chosen, calls=calls: torch.full((1, 3, 32, 32), float(next(calls) == chosen)),
            latents,
            2,
            tile,
            overlap,
        )
        assert weights.min() >= 0 and weights.max() <= 1
        total += weights
    torch.testing.assert_close(total, torch.ones_like(total))


def test_two_tiles_fade_into_one_another_linearly() -> None:
    calls = iter((0.0, 1.0))
    made = decode_tiled(lambda x: torch.full((1, 3, 8, 8), next(calls)), torch.zeros(1, 4, 8, 12), 1, 8, 4)
    expected = torch.tensor([0, 0, 0, 0, 0.125, 0.375, 0.625, 0.875, 1, 1, 1, 1])
    assert torch.equal(made, expected.expand(1, 3, 8, 12))


def test_all_tiles_have_one_shape_and_come_row_by_row() -> None:
    shapes = []

    def decode(x: Tensor) -> Tensor:
        assert x.is_contiguous()
        shapes.append(tuple(x.shape))
        return upsampled(x)

    latents = torch.randn(2, 4, 100, 150)
    one = decode_tiled(decode, latents, 8)
    assert set(shapes) == {(2, 4, TILE, TILE)} and len(shapes) == 2 * 3
    assert torch.equal(one, decode_tiled(upsampled, latents, 8))


@pytest.fixture(scope="module")
def vae() -> Any:
    return load("embedded", device=Device("cpu")).vae


@torch.inference_mode()
def test_the_embedded_vae_by_tiles_is_close_to_the_whole(vae: Any) -> None:
    """49.5 dB were measured against the whole decode (2 x 2 tiles, 2026-11-30); the VAE itself has 26 dB."""
    with Image.open(Path(__file__).parents[2] / "docs" / "pictures" / "embedded.jpg") as file:
        picture = torch.from_numpy(np.array(file.convert("RGB").crop((0, 0, 640, 640))))
    latents = vae.encode(picture.permute(2, 0, 1)[None] / 127.5 - 1).latent_dist.mean
    whole = vae.decode(latents, return_dict=False)[0]
    tiled = decode_tiled(lambda x: vae.decode(x, return_dict=False)[0], latents, 8)
    psnr = 10 * torch.log10(4 / (tiled - whole).square().mean())
    assert 45 < psnr < 100  # close, and not the same: never to be called exact


def test_tiles_hold_what_was_estimated() -> None:
    """On meta, where nothing is computed."""
    config = read_object(library.embedded_folder() / "vae" / "config.json")
    vae: Any = diffusers_module(classes().vae, config, "vae").eval()
    latents = torch.zeros(1, 4, 128, 160, device="meta")
    whole = measured(lambda: vae.decode(latents, return_dict=False))
    tiled = measured(lambda: decode_tiled(lambda x: vae.decode(x, return_dict=False)[0], latents, 8))
    most = estimate.vae_live_bytes(vae.config, 512, 512, 4) + 2 * 3 * 1024 * 1280 * 4
    assert tiled <= most <= 1.5 * tiled
    assert tiled < 0.5 * whole
