"""How many bytes a generation takes, by part, known before any of them is allocated.

Weights are counted. Activations follow from the configuration, since what is alive at the worst moment is
always the same handful of tensors:

    VAE decode   the widest residual block at the size of the picture: its input, that normed and that
                 activated, or its input and four of its outputs (shortcut, convolution, sum, scaled sum); for
                 SD and SDXL both are 768 channels * pixels * element size
    UNet         every skip connection, and either the feed-forward of the first attention (GEGLU: a
                 projection of 8 C, its activated half and their product of 4 C each, 7 C around them) or
                 three tensors of the widest concatenation

    convolutions besides, where weights are not channels last: cuDNN turns input and output round in a
                 workspace of their size; else half of that

Attention adds nothing: what materialises scores is bounded by `ops/budget.py`, and flash, efficient and
streaming attention hold none. Tests check this against the live bytes of the real networks: never below them,
at most half as much again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearway.models._mixed import lacking_bytes
from clearway.models.model import dtype_of

if TYPE_CHECKING:
    from torch import nn

    from clearway.models.model import Model

FEED_FORWARD, AROUND = 16, 7  # times C: GEGLU's tensors, and what a transformer block holds beside them
TEXT_BYTES = 2**26  # one window of 77 tokens: every text encoder here stays below it
LIBRARIES_BYTES = 2**27  # cuBLAS's and cuDNN's own workspaces, made at the first calls


def weight_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all parameters and buffers, each memory counted once."""
    held = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            storage = tensor.untyped_storage()
            held[id(tensor) if tensor.is_meta else storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def vae_decode_bytes(
    config: Any, height: int, width: int, element_size: int, *, channels_last: bool = False
) -> int:
    """Bytes that decoding one picture of `height` x `width` pixels holds at its worst moment."""
    live, workspace = _vae(config, height, width)
    return math.ceil(element_size * (live + workspace / (2 if channels_last else 1)))


def vae_live_bytes(config: Any, height: int, width: int, element_size: int) -> int:
    """Of `vae_decode_bytes` what tensors hold: without the convolutions' workspace."""
    return element_size * _vae(config, height, width)[0]


def unet_bytes(
    config: Any, rows: int, height: int, width: int, element_size: int, *, channels_last: bool = False
) -> int:
    """Bytes that one call with `rows` latents of `height` x `width` holds at its worst moment."""
    live, workspace = _unet(config, height, width)
    return math.ceil(rows * element_size * (live + workspace / (2 if channels_last else 1)))


def unet_live_bytes(config: Any, rows: int, height: int, width: int, element_size: int) -> int:
    """Of `unet_bytes` what tensors hold: without the convolutions' workspace."""
    return rows * element_size * _unet(config, height, width)[0]


def picture_bytes(count: int, height: int, width: int) -> int:
    """Bytes of decoded pixels while they become bytes: float32 (3, H, W), and three steps of scaling it."""
    return count * 3 * height * width * 4 * 4


def _vae(config: Any, height: int, width: int) -> tuple[int, int]:
    """(numbers alive, numbers of convolution workspace) at the worst moments of one decode."""
    widths = list(reversed(config.block_out_channels))
    pixels = height * width // 4 ** (len(widths) - 1)
    came, live, workspace = widths[0], 0, 0
    for level, own in enumerate(widths):
        live = max(live, pixels * max(3 * came, came + 4 * own))
        workspace = max(workspace, pixels * (came + own))
        if level < len(widths) - 1:  # its input, what is upsampled, the upsampled, the convolution's output
            live = max(live, pixels * (came + own + 8 * own))
            workspace = max(workspace, 8 * pixels * own)
            pixels *= 4
        came = own
    return live, workspace


def _unet(config: Any, height: int, width: int) -> tuple[int, int]:
    """(numbers alive, numbers of convolution workspace) a row, at the worst moments of one call."""
    widths, layers = list(config.block_out_channels), config.layers_per_block
    deepest, up = len(widths) - 1, list(reversed(config.up_block_types))
    areas = [height * width]
    for _ in widths[1:]:
        height, width = math.ceil(height / 2), math.ceil(width / 2)
        areas.append(height * width)
    skips = areas[0] * widths[0] + sum(
        areas[level] * own * _of(layers, level) + (areas[level + 1] * own if level < deepest else 0)
        for level, own in enumerate(widths)
    )
    working = workspace = 0
    for level, own in enumerate(widths):
        below, above = widths[min(level + 1, deepest)], widths[max(level - 1, 0)]
        widest = max(below, own) + max(own, above)  # what comes up, and the skip beside it
        working = max(working, areas[level] * (3 * widest + below))
        workspace = max(workspace, areas[level] * (widest + own))
        if "Attn" in up[level] or "Attn" in config.down_block_types[level]:
            working = max(working, areas[level] * own * (FEED_FORWARD + AROUND))
        if level:
            working = max(working, own * (areas[level] + 2 * areas[level - 1]))
            workspace = max(workspace, 2 * own * areas[level - 1])
    return skips + working, workspace


def _of(value: Any, level: int) -> int:
    return int(value[level] if isinstance(value, list | tuple) else value)


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of one generation: the weights of each part, and what each holds while it works."""

    text_weights: int
    unet_weights: int
    vae_weights: int
    text_work: int
    unet_work: int
    vae_work: int
    tile_work: int

    def as_record(self) -> dict[str, int]:
        """By name, for a record."""
        return {name: getattr(self, name) for name in self.__slots__}


def work(model: Model, rows: int, pictures: int, width: int, height: int, tile_px: int) -> tuple[int, ...]:
    """(text, UNet, VAE, VAE by tiles): bytes that each holds beyond weights, sides in pixels.

    `rows` are the UNet's, twice the pictures under guidance. The text encoders' counts for SDXL's two. A
    mixed VAE counts as the float32 one that it may have to become: its activations, and what its weights
    lack.
    """
    last = model.choices.layout == "channels_last"
    unet_size, vae_size = dtype_of(model.unet).itemsize, dtype_of(model.vae).itemsize
    factor = model.latent_factor
    unet = unet_bytes(
        model.unet.config, rows, height // factor, width // factor, unet_size, channels_last=last
    )
    done = picture_bytes(pictures, height, width) + lacking_bytes(model.vae)
    sides = min(height, tile_px), min(width, tile_px)
    return (
        TEXT_BYTES,
        unet + LIBRARIES_BYTES,
        vae_decode_bytes(model.vae.config, height, width, vae_size, channels_last=last)
        + done
        + LIBRARIES_BYTES,
        vae_decode_bytes(model.vae.config, *sides, vae_size, channels_last=last)
        + done
        + 3 * height * width * 4 * 2  # the picture that tiles are laid into, and its weights
        + LIBRARIES_BYTES,
    )
