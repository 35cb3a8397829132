"""What of a model lies where, and when, decided before anything is allocated: `plan` -> `Placement`.

Where everything fits, everything stays on the device and nothing is done. Else the ways of `_options.py` are
compared by estimate (`estimate.py`) and the cheapest that fits is taken: text encoders, VAE and UNet on the
device only while they work, halves of guidance and pictures one after the other, the UNet block by block; the
VAE by tiles, which changes the picture, only where nothing else fits. A CPU or MPS has the machine's one
memory: nothing is moved there, and tiles are all that can help.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from clearway import device as machine
from clearway.errors import UnavailableError
from clearway.execution.release import release
from clearway.models import _options, _placement_text, estimate, tiles
from clearway.models._moved import Moved
from clearway.models._options import RESIDENT, STAGES, STREAMED, Blocks, Fit, Order, Way
from clearway.models._streamed import BUFFERS, block_bytes, streamed
from clearway.models.estimate import Parts
from clearway.models.model import dtype_of
from clearway.ops import verdicts

if TYPE_CHECKING:
    from clearway.models.model import Model
    from clearway.request import Request

_resting: WeakKeyDictionary[Any, Moved] = WeakKeyDictionary()
"""What rests on the host, by module; a module that is not in it stays where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What was decided for one generation, and what carries it out.

    `fit` holds the way and what it was estimated to need, `room_bytes` what there was, `parts` the estimates
    behind it, for a VAE in numbers of `vae_element` bytes. `notes` are sentences for a person: none where
    everything is resident. `moves` is whether anything has to be moved, `whole` whether it all runs as it
    would with any amount of memory. `claimed_bytes` are left to self-tests of kernels, beside `room_bytes`.
    """

    model: Model
    order: Order
    fit: Fit
    room_bytes: int
    parts: Parts
    vae_element: int
    moves: bool = False
    whole: bool = False
    claimed_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def spare_bytes(self) -> int | None:
        """What the plan leaves of a CUDA device to self-tests; None elsewhere, and on one that is not the
        first, where kernels are not tested."""
        if self.model.device.kind != "cuda" or self.model.device.index:
            return None
        return max(_options.usable(self.room_bytes) - self.fit.need_bytes, 0) + self.claimed_bytes

    @property
    def batch(self) -> int:
        """How many pictures run together."""
        return self.fit.way.batch

    def executor(self, part: str, name: str) -> str:
        """The executor for a part ("unet", "text_encoder_2") that would be run by the one called `name`."""
        group = part.partition("_")[0]
        if group == "unet" and self.fit.way.unet == STREAMED:
            return "eager"
        return "eager" if name == "cuda_graph" and group not in self.fit.way.graphs else name

    def rows(self, rows: str) -> str:
        """How guidance runs its halves that would run as `rows` says: "joined" or "separate"."""
        return rows if self.fit.way.joined else "separate"

    def tiled(self, element_size: int) -> bool:
        """Whether the VAE decodes by tiles when it computes in numbers of that many bytes."""
        raised = element_size / self.vae_element
        if self.order.tiling is not None or self.fit.way.tiled or raised <= 1:
            return self.fit.way.tiled
        more = (self.parts.vae_work + self.parts.vae_weights) * (raised - 1)
        return not _options.fits(self.fit.stages["vae"] + int(more), self.room_bytes)

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        """Within it the part of a stage ("text", "unet", "vae") is on the device, and others are not in its
        way."""
        if not self.moves:
            yield
            return
        own, place = _modules(self.model), getattr(self.fit.way, stage)
        for part in STAGES:
            if getattr(self.fit.way, part) != RESIDENT:
                self._leave(own[part])
            elif part not in self.fit.way.graphs:
                for module in own[part]:
                    release(module)
        machine.release_memory(self.model.device)
        for part in STAGES:
            if getattr(self.fit.way, part) == RESIDENT:
                for module in own[part]:
                    _stay(module, self.model)
        if place == RESIDENT:
            yield
            return
        try:
            resting = [_rested(module, self.model) for module in own[stage]]
            if place == STREAMED:
                with streamed(own[stage][0], resting[0], self.model.device, self.fit.keep_bytes):
                    yield
            else:
                for moved in resting:
                    moved.enter()
                yield
        finally:
            self._leave(own[stage])

    def _leave(self, modules: tuple[Any, ...]) -> None:
        for module in modules:
            release(module)
            _rested(module, self.model).leave()

    def record(self) -> dict[str, Any]:
        """The decision and its numbers, as JSON values."""
        way = self.fit.way
        return {
            **{part: getattr(way, part) for part in STAGES},
            "graphs": list(way.graphs),
            "batch": way.batch,
            "joined": way.joined,
            "tiled": way.tiled,
            "need_bytes": self.fit.need_bytes,
            "need_stage": self.fit.stage,
            "room_bytes": self.room_bytes,
            "kept_block_bytes": self.fit.keep_bytes,
            "parts": self.parts.as_record(),
        }


def plan(model: Model, request: Request) -> Placement:
    """The placement for a resolved request, by what the device has free now and the model's memory limit.

    Self-tests of kernels that are under way keep their memory where the plan is the same beside them; where
    it is not they are waited for, the model resting on the host meanwhile if they need its room. Raises
    UnavailableError, before anything is allocated, where no way fits: what is needed, what is free and which
    smaller size would fit.
    """
    assert request.width and request.height and request.steps  # resolved
    order = Order(
        width=request.width,
        height=request.height,
        count=request.count,
        batch=min(request.batch_size or 1, request.count),
        steps=request.steps,
        guided=request.cfg_scale != 1.0,
        tiling=request.vae_tiling,
    )
    with machine.capped(model.device, model.memory_limit_bytes):
        claimed = verdicts.claimed_bytes(model.device)
        if claimed:
            with suppress(UnavailableError):
                room = machine.room(model.device)
                beside = decide(model, order, room - claimed)
                if beside.whole or (not verdicts.held_back(model.device.kind) and _same(beside, room)):
                    return replace(beside, claimed_bytes=claimed)
            _settle(model)
        return decide(model, order, machine.room(model.device))


def _same(made: Placement, room_bytes: int) -> bool:
    """Whether more room would change nothing of a placement."""
    other = decide(made.model, made.order, room_bytes)
    return (made.fit.way, made.fit.keep_bytes) == (other.fit.way, other.fit.keep_bytes)


def _settle(model: Model) -> None:
    """Comes back when self-tests have given back what they had of the model's device, with room made for
    them."""
    machine.release_memory(model.device)
    if not verdicts.has_room(model.device.kind):
        rest(model)
    verdicts.settle(model.device.kind)


def decide(model: Model, order: Order, room_bytes: int) -> Placement:
    """`plan` for `room_bytes` that may be taken beyond what the model has on the device already."""
    if not _more_than_a_tile(model, order):
        order = replace(order, tiling=False)
    first = Way(
        graphs=STAGES if model.choices.executor == "cuda_graph" else (),
        batch=order.batch,
        joined=model.choices.rows == "joined",
        tiled=order.tiling is True,
    )
    bare = _parts(model, order, first, (0, 0, 0))
    if model.device.kind != "cuda":
        whole = order.tiling is not None or _options.fits(bare.vae_work, room_bytes)
        way = first if whole else replace(first, tiled=True)
        return _told(model, order, first, _options.fitted(way, bare, Blocks(), order), room_bytes, bare)
    modules = _modules(model)
    every = [module for part in STAGES for module in modules[part]]
    inside = [one for one in every if one not in _resting and _kind(one) == model.device.kind]
    fit = _options.fitted(first, bare, Blocks(), order)
    if len(inside) == len(every) and _options.fits(fit.need_bytes, room_bytes):
        return _told(model, order, first, fit, room_bytes, bare)  # with nothing counted or moved
    weights = tuple(estimate.weight_bytes(modules[part]) for part in STAGES)
    room_bytes += estimate.weight_bytes(inside)
    sizes = tuple(block_bytes(model.unet))
    blocks = Blocks(sizes, BUFFERS * max(sizes, default=0))

    def search(order: Order, room_bytes: int) -> Fit | None:
        @functools.cache
        def parts(batch: int, joined: bool) -> Parts:
            return _parts(model, order, replace(first, batch=batch, joined=joined), weights)

        return _options.cheapest(first, lambda way: parts(way.batch, way.joined), blocks, order, room_bytes)

    found = search(order, room_bytes)
    if found is None:
        raise _placement_text.refusal(order, str(model.device), room_bytes, search)
    parts = _parts(model, order, found.way, weights)
    moves = len(inside) < len(every) or not found.way.resident or found.way.graphs != first.graphs
    whole_bytes = _options.fitted(first, _parts(model, order, first, weights), blocks, order).need_bytes
    return _told(model, order, first, found, room_bytes, parts, moves, whole_bytes)


def resident(model: Model) -> None:
    """Brings every part of a model to its device for good, whatever an earlier placement did."""
    for modules in _modules(model).values():
        for module in modules:
            _stay(module, model)


def rest(model: Model) -> None:
    """Puts every part to rest on the host, as one is that did not fit when it was loaded."""
    for modules in _modules(model).values():
        for module in modules:
            release(module)
            _rested(module, model).leave()
    machine.release_memory(model.device)


def _told(
    model: Model,
    order: Order,
    first: Way,
    fit: Fit,
    room_bytes: int,
    parts: Parts,
    moves: bool = False,
    whole_bytes: int = 0,
) -> Placement:
    notes = _placement_text.notes(fit, first, parts, whole_bytes, room_bytes, str(model.device))
    if fit.way.tiled:
        whole = parts.vae_work + parts.vae_weights
        notes = (*notes, _placement_text.tiles_note(whole, room_bytes, bool(order.tiling)))
    return Placement(
        model=model,
        order=order,
        fit=fit,
        room_bytes=room_bytes,
        parts=parts,
        vae_element=dtype_of(model.vae).itemsize,
        moves=moves,
        whole=fit.way == first,
        notes=notes,
    )


def _parts(model: Model, order: Order, way: Way, weights: tuple[int, ...]) -> Parts:
    rows = way.batch * (2 if order.guided and way.joined else 1)
    tile_px = tiles.TILE * model.latent_factor
    return Parts(*weights, *estimate.work(model, rows, way.batch, order.width, order.height, tile_px))


def _modules(model: Model) -> dict[str, tuple[Any, ...]]:
    return {"text": tuple(model.text_encoders), "unet": (model.unet,), "vae": (model.vae,)}


def _more_than_a_tile(model: Model, order: Order) -> bool:
    return tiles.is_tiled(order.height // model.latent_factor, order.width // model.latent_factor)


def _kind(module: Any) -> str:
    return str(next(module.parameters()).device.type)


def _rested(module: Any, model: Model) -> Moved:
    """The module as something that rests, which it does from the first time on."""
    if module not in _resting:
        _resting[module] = Moved(module, model.device)
    return _resting[module]


def _stay(module: Any, model: Model) -> None:
    if module in _resting or _kind(module) != model.device.kind:
        _rested(module, model).stay()
        del _resting[module]
