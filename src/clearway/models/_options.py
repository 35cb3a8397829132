"""The ways in which a generation can be laid into memory, what each needs and costs: arithmetic alone.

Costs are seconds by which ways are ordered, no promises: a move at 12 GB/s, and what a call takes longer
without its graph. A way that changes the picture (tiles) costs more than any that does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from clearway.models.estimate import Parts

MOVE_BYTES_PER_S = 12e9  # pinned host memory over PCIe 4 x16, half of its nominal 32 GB/s and less
GRAPHLESS_S = 0.015  # a UNet call's launches, where it waits for the host: a guess, for the order alone
CAPTURE_S = 0.5  # capturing a UNet's graph anew, its warm-up calls included
HALVES_S = 0.005  # guidance's halves one after the other
SPARE_BYTES = 2**28  # what is held beside: latents, embeddings, kernels that are loaded late
SPARE_SHARE = 0.05  # what an allocator cannot use of its blocks
STAGES = ("text", "unet", "vae")
RESIDENT, VISITING, STREAMED = "resident", "visiting", "streamed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be drawn: sides in pixels, how many pictures, how many of them together, denoiser steps,
    whether there is guidance, whether the VAE decodes by tiles (None: as memory has it)."""

    width: int
    height: int
    steps: int
    count: int = 1
    batch: int = 1
    guided: bool = True
    tiling: bool | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """One way. `text`, `unet`, `vae`: where the part is; "visiting" is on the device only in its own stage,
    "streamed" is there block by block. `graphs` are the parts whose calls are captured; `batch` is how many
    pictures run together, `joined` whether both halves of guidance do."""

    text: str = RESIDENT
    unet: str = RESIDENT
    vae: str = RESIDENT
    graphs: tuple[str, ...] = ()
    batch: int = 1
    joined: bool = True
    tiled: bool = False

    @property
    def resident(self) -> bool:
        """Whether nothing visits and nothing is streamed."""
        return (self.text, self.unet, self.vae) == (RESIDENT,) * 3


@dataclass(frozen=True, slots=True)
class Blocks:
    """A UNet's bytes by what can be streamed: the blocks in order, and the buffers they take turns in."""

    sizes: tuple[int, ...] = ()
    buffers: int = 0

    @property
    def total(self) -> int:
        """Bytes of all blocks."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Fit:
    """A way with what each stage needs, the most of these, and its cost: (changes the picture, seconds).

    `keep_bytes` of a streamed UNet's blocks have room to stay.
    """

    way: Way
    stages: dict[str, int]
    cost: tuple[bool, float]
    keep_bytes: int = 0

    @property
    def need_bytes(self) -> int:
        """Bytes at the worst moment."""
        return max(self.stages.values())

    @property
    def stage(self) -> str:
        """The stage that has it."""
        return max(self.stages, key=lambda stage: self.stages[stage])


def fits(need_bytes: int, room_bytes: int) -> bool:
    """Whether so much can be held, with what is spared."""
    return need_bytes <= usable(room_bytes)


def usable(room_bytes: int) -> int:
    """What may be planned for of so much room."""
    return int((room_bytes - SPARE_BYTES) / (1 + SPARE_SHARE))


def fitted(
    way: Way,
    parts: Parts,
    blocks: Blocks,
    order: Order,
    graphs: tuple[str, ...] = (),
    keep_bytes: int = 0,
) -> Fit:
    """A way with its needs and cost; `graphs` are the parts that would be captured if there were room."""
    stages = need(way, parts, blocks)
    stages["unet"] += keep_bytes
    seconds = cost(way, parts, blocks, order, graphs, keep_bytes)
    return Fit(way, stages, (way.tiled and not order.tiling, seconds), keep_bytes)


def cheapest(
    first: Way,
    parts: Callable[[Way], Parts],
    blocks: Blocks,
    order: Order,
    room_bytes: int,
) -> Fit | None:
    """Of all ways that fit the cheapest, or None; `first` is how it would run if there were room enough."""
    best: Fit | None = None
    for way in ways(first, order):
        keep = 0
        if way.unet == STREAMED:
            keep = usable(room_bytes) - need(way, parts(way), blocks)["unet"]
        fit = fitted(way, parts(way), blocks, order, first.graphs, max(min(keep, blocks.total), 0))
        if fits(fit.need_bytes, room_bytes) and (best is None or fit.cost < best.cost):
            best = fit
    return best


def need(way: Way, parts: Parts, blocks: Blocks) -> dict[str, int]:
    """Bytes on the device by stage; of a streamed UNet with none of its blocks kept."""
    work = {
        "text": parts.text_work,
        "unet": parts.unet_work,
        "vae": parts.tile_work if way.tiled else parts.vae_work,
    }
    weights = {"text": parts.text_weights, "unet": parts.unet_weights, "vae": parts.vae_weights}
    needed = {}
    for stage in STAGES:
        total = work[stage]
        for part in STAGES:
            place = getattr(way, part)
            if place == STREAMED:
                if stage == part:
                    total += weights[part] - blocks.total + blocks.buffers
            elif place == RESIDENT or stage == part:
                total += weights[part]
            if part in way.graphs and part != stage and place == RESIDENT:
                total += work[part]  # graphs keep their memory between calls
        needed[stage] = total
    return needed


def cost(
    way: Way, parts: Parts, blocks: Blocks, order: Order, graphs: tuple[str, ...], keep_bytes: int = 0
) -> float:
    """Seconds that an order takes longer than at no cost for memory, groups of pictures being one such."""
    groups = math.ceil(order.count / way.batch)
    calls = groups * order.steps * (1 if way.joined or not order.guided else 2)
    seconds = groups * order.steps * GRAPHLESS_S  # the fewer groups the better
    if calls > groups * order.steps:
        seconds += groups * order.steps * HALVES_S
    if way.text == VISITING:
        seconds += parts.text_weights / MOVE_BYTES_PER_S
    if way.vae == VISITING:
        seconds += groups * parts.vae_weights / MOVE_BYTES_PER_S
    if way.unet == VISITING:
        seconds += groups * parts.unet_weights / MOVE_BYTES_PER_S
        seconds += groups * CAPTURE_S if "unet" in way.graphs else 0
    if way.unet == STREAMED:
        turns = blocks.total - keep_bytes
        seconds += (calls * turns + groups * (parts.unet_weights - turns)) / MOVE_BYTES_PER_S
    if "unet" in graphs and "unet" not in way.graphs:
        seconds += calls * GRAPHLESS_S
    if "vae" in graphs and "vae" not in way.graphs:
        seconds += groups * GRAPHLESS_S
    return seconds


def ways(first: Way, order: Order) -> Iterator[Way]:
    """All ways worth a look, how it would run if there were room being the first.

    What visits is captured anew each time, so only the UNet is, and then alone: graphs share their memory,
    which goes back when the last of them does.
    """
    sizes = sorted({math.ceil(first.batch / 2**power) for power in range(15)}, reverse=True)
    captured = dict.fromkeys((first.graphs, tuple(part for part in first.graphs if part == "unet"), ()))
    halves = (True, False) if order.guided and first.joined else (first.joined,)
    for text, unet, vae, graphs, batch, joined, tiled in itertools.product(
        (RESIDENT, VISITING),
        (RESIDENT, VISITING, STREAMED),
        (RESIDENT, VISITING),
        captured,
        sizes,
        halves,
        (False, True) if order.tiling is None else (order.tiling,),
    ):
        if unet == STREAMED and graphs:
            continue
        if VISITING in (text, unet, vae) and set(graphs) - {"unet"}:
            continue
        yield Way(text, unet, vae, graphs, batch, joined, tiled)
