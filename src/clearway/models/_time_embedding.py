"""The projections of one time embedding by all residual blocks of a UNet, as one product.

Each block reads silu(temb) through a small linear layer of its own: 22 in SD 1.x, 17 in SDXL, each of which
costs more to launch than to compute. The first block that is asked computes them all; the others take theirs
while it is the same embedding. Biases of the blocks' first convolutions, where those are folded into the
second norm (`_fused_blocks.folded_resnet`), are added for all at once too.
Source: diffusers 0.36 to 0.42.1, models/resnet.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearway.execution.kept import version
from clearway.models._bound import plain, plain_weight
from clearway.models._joined import alike, joined, ordinary, unpack

MARK = "_clearway_time_embedding"
"""Where a residual block holds (Projections, its number)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What was computed last: of which embedding, how, and with which weights of each block."""

    of: weakref.ref[Tensor]
    how: tuple[Any, ...]
    signs: list[tuple[Any, ...] | None]
    made: tuple[Tensor, ...]


class Projections:
    """What `blocks` (ResnetBlock2D) add of a time embedding; copied with them, without what it holds."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.blocks = list(blocks)
        self._kept: _Kept | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}

    def get(self, number: int, temb: Tensor, folded: bool) -> Tensor | None:
        """(B, C) for block `number`, with its convolution's bias where `folded`.

        None where a layer may not be computed without being called (an adapter, a hook).
        """
        kept = self._kept  # read once: another thread may be at another step
        how = (version(temb), folded, torch.is_inference_mode_enabled())
        if (
            kept is None
            or kept.of() is not temb
            or kept.how != how
            or kept.signs[number] != _sign(self.blocks[number], folded)
        ):
            layers = [block.time_emb_proj for block in self.blocks]
            if not self._ready(layers, folded):
                self._kept = None
                return None
            made = self._computed(layers, temb, folded)
            signs = [_sign(block, folded) for block in self.blocks]  # after, since joining moves weights
            self._kept = kept = _Kept(weakref.ref(temb), how, signs, made)
        return kept.made[number]

    def _ready(self, layers: list[Any], folded: bool) -> bool:
        whole = all(map(ordinary, layers)) and alike(layers)
        if not folded or not whole:
            return whole
        return all(
            plain(block.conv1, nn.Conv2d)
            and block.conv1.bias is not None
            and plain_weight(block.conv1.bias)
            and len(block.conv1.bias) == layer.out_features
            for block, layer in zip(self.blocks, layers, strict=True)
        )

    def _computed(self, layers: list[Any], temb: Tensor, folded: bool) -> tuple[Tensor, ...]:
        weight = joined([layer.weight for layer in layers])
        bias = None if layers[0].bias is None else joined([layer.bias for layer in layers])
        if folded:
            convolutions = torch.cat([block.conv1.bias for block in self.blocks])
            bias = convolutions if bias is None else bias + convolutions
        whole = F.linear(F.silu(temb), weight, bias)
        made: tuple[Tensor, ...] = torch.split(whole, [layer.out_features for layer in layers], -1)
        return made


def _sign(block: Any, folded: bool) -> tuple[Any, ...] | None:
    """What tells whether a block's own projection is what it was; None where it must be called."""
    layer = block.time_emb_proj
    if not ordinary(layer):
        return None
    read = (layer.weight, layer.bias, block.conv1.bias if folded else None)
    return tuple((id(one), version(one), one.data_ptr()) for one in read if one is not None)


def refuse(block: Any) -> str | None:
    """Why a block's projection is not taken together with the others'."""
    if block.time_emb_proj is None or block.time_embedding_norm != "default":
        return "it adds no time embedding, or scales by it"
    if block.skip_time_act or not plain(block.nonlinearity, nn.SiLU):
        return "its time embedding goes through another activation"
    return None if ordinary(block.time_emb_proj) else "its projection is wrapped, quantised or hooked"


def place(blocks: Sequence[Any]) -> None:
    """Takes the projections of these blocks together, where they go together."""
    layers = [block.time_emb_proj for block in blocks]
    if len(blocks) > 1 and alike(layers):
        together = Projections(blocks)
        for number, block in enumerate(blocks):
            block.__dict__[MARK] = (together, number)


def take_away(block: Any) -> None:
    """Undoes `place` for one block."""
    if block.__dict__.pop(MARK, None) is not None and block.time_emb_proj is not None:
        unpack([block.time_emb_proj])


def projected(block: Any, temb: Tensor, folded: bool) -> Tensor | None:
    """What the block adds to its image (B, C): of all blocks together, where that is in place and goes."""
    held = block.__dict__.get(MARK)
    if held is not None and not torch.compiler.is_compiling():  # which cannot see who holds a tensor
        projections, number = held
        if projections.blocks[number] is block:
            found: Tensor | None = projections.get(number, temb, folded)
            if found is not None:
                return found
    shift: Tensor = block.time_emb_proj(temb if block.skip_time_act else F.silu(temb))
    if folded and block.conv1.bias is not None:
        shift = shift + block.conv1.bias
    return shift
