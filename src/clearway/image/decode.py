"""Pixels -> bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clearway.device import to_host

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def to_uint8(pixels: Tensor) -> np.ndarray:
    """uint8 (B, H, W, 3) of pixels (B, 3, H, W) in -1..1; values outside are clamped.

    The fraction is cut off, not rounded, as the WebUI does, so that the same latents give the same bytes.
    Bytes are made on the device, so that a quarter is copied.
    """
    import torch

    scaled = ((pixels.float() + 1) / 2).clamp(0, 1) * 255
    return to_host(scaled.to(torch.uint8).permute(0, 2, 3, 1).contiguous()).numpy()
