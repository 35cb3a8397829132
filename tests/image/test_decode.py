"""Pixels to bytes."""

import numpy as np
import torch

from clearway.image.decode import to_uint8


def test_ends_and_clamping() -> None:
    pixels = torch.tensor([-5.0, -1.0, 0.0, 1.0, 5.0]).reshape(1, 1, 1, 5).expand(1, 3, 1, 5)
    assert to_uint8(pixels)[0, 0, :, 0].tolist() == [0, 0, 127, 255, 255]


def test_shape_and_order() -> None:
    pixels = torch.rand(2, 3, 4, 6, generator=torch.Generator().manual_seed(0)) * 2 - 1
    made = to_uint8(pixels)
    assert made.dtype == np.uint8 and made.shape == (2, 4, 6, 3)
    assert abs(made[1, 2, 3, 1] - (pixels[1, 1, 2, 3].item() + 1) * 127.5) < 1


def test_the_fraction_is_cut_off() -> None:
    value = 100.9 / 127.5 - 1
    assert to_uint8(torch.full((1, 3, 1, 1), value)).max() == 100


def test_half_precision_is_taken() -> None:
    assert to_uint8(torch.ones(1, 3, 2, 2, dtype=torch.bfloat16)).min() == 255
