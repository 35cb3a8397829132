"""VAE decoding by overlapping tiles, for pictures whose whole decode does not fit into memory.

Another picture, if barely: the VAE's norms and its one attention see a tile and not the whole, so each tile
may come out a little lighter or darker, and the overlap blends that away. Tiles are all of one shape, so that
one captured graph serves them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

TILE, OVERLAP = 64, 16
"""Sides in latents (of 8 pixels): 512 pixels a tile, 128 of them shared with the next."""
LABEL = f"{TILE}/{OVERLAP}"
"""What the parameters of a picture say that was decoded so."""


def starts(length: int, tile: int = TILE, overlap: int = OVERLAP) -> list[int]:
    """Where tiles begin along a side: as few as cover it with at least `overlap` shared, evenly spread."""
    if length <= tile:
        return [0]
    count = math.ceil((length - overlap) / (tile - overlap))
    return [round(index * (length - tile) / (count - 1)) for index in range(count)]


def is_tiled(height: int, width: int, tile: int = TILE) -> bool:
    """Whether latents of these sides are more than one tile."""
    return height > tile or width > tile


def decode_tiled(
    decode: Callable[[Tensor], Tensor],
    latents: Tensor,
    factor: int,
    tile: int = TILE,
    overlap: int = OVERLAP,
) -> Tensor:
    """Pixels (B, C, H, W), float32, of latents (B, c, h, w), decoded tile by tile; H = factor * h.

    Where two tiles overlap, the later one fades in linearly over `overlap` latents: weights sum to one, and
    tiles that agree give just what they agree on. Row by row, so a strip and the picture are held at once.
    """
    height, width = latents.shape[2:]
    rows, columns = starts(height, tile, overlap), starts(width, tile, overlap)
    ramp = _ramp(overlap * factor, latents.device)
    picture = None
    for top in rows:
        strip = None
        for left in columns:
            part = latents[:, :, top : top + tile, left : left + tile]
            pixels = decode(part.contiguous(memory_format=torch.contiguous_format)).float()
            if strip is None:
                strip = pixels.new_empty(*pixels.shape[:3], width * factor)
            _lay(strip, pixels, left * factor, ramp if left else None, 3)
        assert strip is not None
        if picture is None:
            picture = strip.new_empty(*strip.shape[:2], height * factor, width * factor)
        _lay(picture, strip, top * factor, ramp if top else None, 2)
    assert picture is not None
    return picture


def _ramp(length: int, device: torch.device) -> Tensor:
    """How far a tile has faded in, from near 0 to near 1 and the same backwards."""
    return (torch.arange(length, dtype=torch.float32, device=device) + 0.5) / length


def _lay(canvas: Tensor, piece: Tensor, begin: int, ramp: Tensor | None, axis: int) -> None:
    """Lays `piece` into `canvas` from `begin` along an axis, faded in over what lies there."""
    faded = 0
    if ramp is not None:
        faded = len(ramp)
        under = canvas.narrow(axis, begin, faded)
        under.lerp_(piece.narrow(axis, 0, faded), ramp.view(-1, *[1] * (3 - axis)))
    rest = piece.shape[axis] - faded
    canvas.narrow(axis, begin + faded, rest).copy_(piece.narrow(axis, faded, rest))
