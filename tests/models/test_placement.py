"""What is decided for the real networks (on meta, nothing computed); that carrying it out changes nothing.

The CPU stands for the device where parts move: what matters there is that memory is another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import clearway
from clearway import UnavailableError
from clearway.device import CONTEXT_BYTES, Device
from clearway.measure.random_model import _PLANS, random_model
from clearway.models import _options, _streamed, chosen, placement
from clearway.models._options import RESIDENT, STREAMED, VISITING, Blocks, Order, Way
from clearway.models.accelerate import OPS, apply
from clearway.models.build import classes, diffusers_module, text_module
from clearway.models.estimate import Parts
from clearway.models.placement import Placement, decide
from clearway.ops import verdicts
from clearway.ops._allowance import WORKER_BYTES
from clearway.request import Request
from clearway.types import Choices, Precision

GIB = 2**30
CUDA = Device("cuda", 0)


def on_meta(name: str, vae_dtype: torch.dtype, executor: str = "cuda_graph") -> Any:
    """The real networks of a family in half precision, as a model on a CUDA device."""
    plan, made = _PLANS[name], classes()
    texts = [text_module(config, bool(index), "text").half() for index, config in enumerate(plan.texts)]
    vae = diffusers_module(made.vae, plan.vae, "vae")
    return SimpleNamespace(
        text_encoders=tuple(texts),
        unet=diffusers_module(made.unet, plan.unet, "unet").half(),
        vae=vae.half() if vae_dtype == torch.float16 else vae.float(),
        device=CUDA,
        choices=Choices(executor=executor, layout="channels_last"),
        latent_factor=8,
    )


@pytest.fixture(scope="module", params=[torch.float16, torch.float32], ids=["half", "float32"])
def sdxl(request: pytest.FixtureRequest) -> Any:
    return on_meta("sdxl", request.param)


@pytest.fixture(scope="module", params=[torch.float16, torch.float32], ids=["half", "float32"])
def sd15(request: pytest.FixtureRequest) -> Any:
    return on_meta("sd15", request.param)


def order(side: int, **given: Any) -> Order:
    return Order(**({"width": side, "height": side, "steps": 20} | given))


def card(size: float) -> int:
    """What tensors may take of a card of so many GiB."""
    return int(size * GIB) - CONTEXT_BYTES


def test_sdxl_fits_into_8_gib_and_sd15_into_4(sdxl: Any, sd15: Any) -> None:
    for model, size, side in ((sdxl, 8, 1024), (sd15, 4, 512)):
        made = decide(model, order(side), card(size))
        assert made.fit.need_bytes < card(size) and not made.fit.way.tiled
        assert made.fit.way.unet != STREAMED  # that would be slow, and is not needed


def test_everything_stays_where_there_is_room(monkeypatch: pytest.MonkeyPatch, sdxl: Any) -> None:
    monkeypatch.setattr(placement, "_kind", lambda module: "cuda")
    made = decide(sdxl, order(1024), 24 * GIB)
    assert not made.moves and not made.notes
    assert (made.fit.way.text, made.fit.way.unet, made.fit.way.vae) == (RESIDENT,) * 3
    assert made.executor("unet", "cuda_graph") == made.executor("vae", "cuda_graph") == "cuda_graph"
    assert made.executor("text_encoder_2", "eager") == "eager" and made.rows("joined") == "joined"


def test_less_room_costs_more_and_needs_no_more_than_there_is(sdxl: Any) -> None:
    costs = []
    for size in (24, 16, 12, 10, 8, 7, 6, 5, 4, 3, 2.5):
        made = decide(sdxl, order(1024, count=4, batch=4), int(size * GIB))
        assert _options.fits(made.fit.need_bytes, int(size * GIB))
        costs.append(made.fit.cost)
    assert costs == sorted(costs) and costs[0] < costs[-1]
    assert made.fit.way.unet == STREAMED  # the last of them


def test_tiles_only_where_nothing_else_fits(sdxl: Any) -> None:
    whole = _options.need(Way(text=VISITING, unet=VISITING, vae=VISITING), _parts(sdxl), Blocks())["vae"]
    above, below = (int((whole + extra) * 1.05) + 2**28 for extra in (2**20, -(2**20)))
    assert not decide(sdxl, order(1024, steps=1), above).fit.way.tiled
    made = decide(sdxl, order(1024, steps=1), below)
    assert made.fit.way.tiled and any("by tiles (64/16), decoding it whole" in note for note in made.notes)


def _parts(model: Any) -> Parts:
    return decide(model, order(1024), 100 * GIB).parts


def test_tiles_as_asked(sdxl: Any) -> None:
    made = decide(sdxl, order(1024, tiling=True), 24 * GIB)
    assert made.fit.way.tiled and "as was asked" in made.notes[-1] and made.fit.cost[0] is False
    assert not decide(sdxl, order(512, tiling=True), 24 * GIB).fit.way.tiled  # one tile is the whole
    with pytest.raises(UnavailableError, match="2048 x 2048 needs about"):
        decide(sdxl, order(2048, tiling=False), 8 * GIB)


def test_a_vae_that_is_raised_to_float32_is_asked_again() -> None:
    model = on_meta("sdxl", torch.float16)
    made = decide(model, order(1024), card(8))
    assert not made.tiled(2)
    room = made.room_bytes
    stages = made.fit.stages
    assert made.tiled(4) == (
        not _options.fits(stages["vae"] + made.parts.vae_work + made.parts.vae_weights, room)
    )
    assert decide(model, order(1024), card(80)).tiled(4) is False
    assert decide(model, order(1024, tiling=False), card(12)).tiled(4) is False


def test_the_refusal_says_what_is_needed_what_is_free_and_what_would_fit(sdxl: Any) -> None:
    with pytest.raises(UnavailableError) as caught:
        decide(sdxl, order(4096), 2 * GIB)
    found = re.fullmatch(
        r"4096 x 4096 needs about ([\d.]+) GiB of cuda:0 at the least, with its parts moved in one by one, "
        r"and 2.0 GiB is free; (\d+) x (\d+) would need ([\d.]+) GiB",
        str(caught.value),
    )
    assert found and float(found[1]) > 2 >= float(found[4])
    smaller = Order(width=int(found[2]), height=int(found[3]), steps=20)
    assert _options.fits(decide(sdxl, smaller, 2 * GIB).fit.need_bytes, 2 * GIB)
    with pytest.raises(UnavailableError, match="a smaller model or a device with more memory"):
        decide(sdxl, order(512), GIB // 4)


def test_notes_give_every_decision_with_its_size(sdxl: Any) -> None:
    made = decide(sdxl, order(1024, count=8, batch=8), card(8))
    text = " ".join(made.notes)
    assert (
        f"{card(8) / GIB:.1f} GiB is free" in text
        and f"about {made.fit.need_bytes / GIB:.1f} GiB at most" in text
    )
    way = made.fit.way
    assert ("the text encoders (1.5 GiB)" in text) == (way.text == VISITING)
    assert (f"{way.batch} at a time are drawn and not 8" in text) == (way.batch < 8)
    streamed = decide(sdxl, order(1024), 3 * GIB)
    assert "the UNet (4.8 GiB) comes block by block" in streamed.notes[0]


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_one_memory_for_all_moves_nothing_and_may_tile(kind: str) -> None:
    model = on_meta("sdxl", torch.float32, "eager")
    model.device = Device(kind)
    made = decide(model, order(1024), 100 * GIB)
    assert not made.moves and not made.notes and not made.fit.way.tiled
    made = decide(model, order(1024), 2 * GIB)
    assert made.fit.way.tiled and not made.moves and made.fit.way.resident


# What is carried out.


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    yield
    placement._resting.clear()


def placed(model: Any, way: Way, keep_bytes: int = 0) -> Placement:
    """That way, whatever it costs, with the CPU as the device."""
    parts = Parts(1, 1, 1, 1, 1, 1, 1)
    fit = replace(_options.fitted(way, parts, Blocks(), order(64)), keep_bytes=keep_bytes)
    return Placement(
        model=model, order=order(64), fit=fit, room_bytes=GIB, parts=parts, vae_element=4, moves=True
    )


WAYS = [
    Way(),
    Way(text=VISITING),
    Way(vae=VISITING, text=VISITING),
    Way(unet=VISITING),
    Way(text=VISITING, unet=VISITING, vae=VISITING),
    Way(text=VISITING, unet=STREAMED, vae=VISITING),
    Way(unet=STREAMED, joined=False),
]


@pytest.mark.parametrize(
    "choices", [Choices(), Choices(layout="channels_last", ops=OPS)], ids=["plain", "ops"]
)
@pytest.mark.parametrize("way", WAYS, ids=str)
@chosen.plainly()  # recorded calls, a CPU's default, have last bits of their own
def test_pictures_are_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, way: Way, choices: Choices
) -> None:
    """Two groups of pictures, twice, and then with everything resident again."""
    monkeypatch.setattr(_streamed, "SMALL_BYTES", 2**10)
    model = apply(random_model("tiny-sdxl", Device("cpu"), Precision()), choices)
    asked = Request(prompt="a", seed=1, steps=2, width=64, height=64, count=2, batch_size=1)
    if not way.joined:
        model = replace(model, choices=replace(choices, rows="separate"))
    plain = clearway.generate(asked, model)
    monkeypatch.setattr("clearway.pipeline.place", lambda model, request: placed(model, way))
    for _ in range(2):
        assert (clearway.generate(asked, model).images == plain.images).all()
    for part in ("text", "unet", "vae"):
        for module in placement._modules(model)[part]:
            assert (module in placement._resting) == (getattr(way, part) != RESIDENT)
            assert module not in placement._resting or not placement._resting[module].inside
    placement.rest(model)
    assert (clearway.generate(asked, model).images == plain.images).all()
    placement.resident(model)
    assert not placement._resting
    monkeypatch.undo()
    assert (clearway.generate(asked, model).images == plain.images).all()


def test_each_stage_has_its_part_and_no_visitor_else() -> None:
    model = random_model("tiny-sdxl", Device("cpu"), Precision())
    made = placed(model, Way(text=VISITING, unet=VISITING, vae=VISITING))

    def inside() -> set[str]:
        return {
            part
            for part, modules in placement._modules(model).items()
            if any(placement._resting[module].inside for module in modules)
        }

    for stage in ("text", "unet", "vae", "unet", "vae"):
        with made.at(stage):
            assert inside() == {stage}
        assert inside() == set()
    with ExitStack() as stack, pytest.raises(ZeroDivisionError):
        stack.enter_context(made.at("unet"))
        raise ZeroDivisionError
    assert inside() == set()


def test_where_nothing_has_to_move_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    made = replace(placed(None, Way()), moves=False)
    for stage in ("text", "unet", "vae"):
        with made.at(stage):
            pass


def test_a_model_that_was_loaded_on_the_host_comes_in_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("tiny-sdxl", Device("cpu"), Precision())
    before = [tensor.data_ptr() for tensor in model.unet.parameters()]
    monkeypatch.setattr(placement, "_kind", lambda module: "elsewhere")
    with placed(model, Way()).at("text"):
        assert before != [tensor.data_ptr() for tensor in model.unet.parameters()]
    assert not placement._resting


def test_plan_reads_the_room_under_the_models_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta("sdxl", torch.float16)
    model.memory_limit_bytes, limits = 8 * GIB, []
    monkeypatch.setattr("clearway.device.room", lambda device: card(8))

    def capped(device: Device, limit: int) -> ExitStack:
        limits.append((device, limit))
        return ExitStack()

    monkeypatch.setattr("clearway.device.capped", capped)
    asked = Request(width=1024, height=1024, steps=20, cfg_scale=5, seed=1, count=3, batch_size=3)
    made = placement.plan(model, asked)
    assert limits == [(CUDA, 8 * GIB)] and made.room_bytes == card(8)
    assert made.order == Order(width=1024, height=1024, steps=20, count=3, batch=3, guided=True)
    assert set(made.record()) >= {"text", "unet", "vae", "need_bytes", "room_bytes", "parts"}


class SelfTests:
    """Self-tests that claim memory of a card until they are settled; what is done for them, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: float, claim: int, held: bool) -> None:
        self.size, self.claim, self.held, self.done = size, claim, held, list[str]()
        self.resting = False
        monkeypatch.setattr("clearway.device.capped", lambda device, limit: ExitStack())
        monkeypatch.setattr("clearway.device.release_memory", lambda device: self.done.append("release"))
        monkeypatch.setattr("clearway.device.room", lambda device: card(self.size))
        monkeypatch.setattr(placement, "rest", self.rest)
        monkeypatch.setattr(verdicts, "claimed_bytes", lambda device: self.claim)
        monkeypatch.setattr(verdicts, "held_back", lambda kind: self.held)
        monkeypatch.setattr(verdicts, "has_room", lambda kind: self.resting or not self.held)
        monkeypatch.setattr(verdicts, "settle", self.settle)

    def rest(self, model: Any) -> None:
        self.done.append("rest")
        self.resting = True

    def settle(self, kind: str) -> None:
        self.done.append(f"settle {kind}")
        self.claim, self.held = 0, False


def asked_for(side: int) -> Request:
    return Request(width=side, height=side, steps=20, cfg_scale=5, seed=1, count=1, batch_size=1)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("claim", [0, WORKER_BYTES, 3 * WORKER_BYTES])
@pytest.mark.parametrize("size", [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 24, 80])
def test_a_first_plan_is_that_of_later_ones_and_leaves_self_tests_their_room(
    monkeypatch: pytest.MonkeyPatch, sdxl: Any, size: float, claim: int, held: bool
) -> None:
    """Whatever self-tests take when it is made: they are waited for where it would be another beside them."""
    sdxl.memory_limit_bytes = None
    testing = SelfTests(monkeypatch, size, claim, held)
    made = placement.plan(sdxl, asked_for(1024))
    later = decide(sdxl, order(1024), card(size))
    assert (made.fit.way, made.fit.keep_bytes) == (later.fit.way, later.fit.keep_bytes)
    assert made.spare_bytes is not None
    if testing.done:  # waited for: nothing is claimed any more
        assert made.notes == later.notes and made.claimed_bytes == 0
        assert testing.done == ["release", *(["rest"] if held else []), "settle cuda"]
    else:
        assert made.claimed_bytes == claim <= made.spare_bytes
        assert _options.fits(made.fit.need_bytes, card(size) - claim)
        assert claim == 0 or made.whole or not held
    assert size < 80 or (made.whole and not testing.done)  # on a large card nobody waits


def test_what_fits_only_without_self_tests_is_planned_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta("sdxl", torch.float16)
    model.memory_limit_bytes = None
    least = next(size / 10 for size in range(10, 80) if _drawable(model, size / 10))
    testing = SelfTests(monkeypatch, least, WORKER_BYTES, False)
    assert not placement.plan(model, asked_for(1024)).whole and testing.done[-1] == "settle cuda"
    testing = SelfTests(monkeypatch, 1, WORKER_BYTES, False)
    with pytest.raises(UnavailableError, match=f"{card(1) / GIB:.1f} GiB is free"):  # all that there is
        placement.plan(model, asked_for(1024))
    assert testing.done[-1] == "settle cuda"


def _drawable(model: Any, size: float) -> bool:
    try:
        return bool(decide(model, order(1024), card(size)))
    except UnavailableError:
        return False


def test_what_a_plan_leaves_is_of_the_device_that_kernels_are_tested_on() -> None:
    model = on_meta("sd15", torch.float16)
    made = decide(model, order(512), card(24))
    assert made.spare_bytes == _options.usable(card(24)) - made.fit.need_bytes
    model.device = Device("cuda", 1)
    assert decide(model, order(512), card(24)).spare_bytes is None
    model.device = Device("cpu")
    assert decide(model, order(512), card(24)).spare_bytes is None
    model.device = CUDA
    assert decide(model, order(512), int(made.fit.need_bytes * 1.05) + 2**28 + 2**21).spare_bytes < 2**22


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_on_a_device_parts_move_and_the_picture_stays(monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = random_model("tiny-sdxl", CUDA, Precision(unet="float16", text_encoder="float16", vae="float16"))
    asked = Request(prompt="a", seed=1, steps=2, width=256, height=256, count=2, batch_size=1)
    plain = clearway.generate(asked, model).images.astype(int)
    torch.ones(64, 64, device="cuda", dtype=torch.float16).mm(torch.ones(64, 64, device="cuda").half())
    held = torch.cuda.memory_allocated()  # with the workspace of products outside of graphs, which stays
    monkeypatch.setattr("clearway.pipeline.place", lambda model, request: placed(model, way))
    for _ in range(2):
        found = clearway.generate(asked, model).images.astype(int)
        assert abs(found - plain).mean() < 1  # with other graphs or none: the same up to rounding
    if way.unet != RESIDENT:
        weights = sum(tensor.nbytes for tensor in model.unet.parameters())
        assert next(model.unet.parameters()).device.type == "cpu"
        assert torch.cuda.memory_allocated() <= held - weights + 2**20
    monkeypatch.undo()
    placement.resident(model)
    assert abs(clearway.generate(asked, model).images.astype(int) - plain).mean() < 1


@pytest.mark.cuda
def test_on_a_device_a_limit_is_planned_for_and_kept() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = random_model("tiny-sdxl", CUDA, Precision(unet="float16", text_encoder="float16", vae="float16"))
    asked = Request(prompt="a", seed=1, steps=2, width=512, height=512)
    torch.cuda.empty_cache()
    limit = CONTEXT_BYTES + torch.cuda.memory_allocated() + 2**29 + 2**28
    small = replace(model, memory_limit_bytes=limit)
    torch.cuda.reset_peak_memory_stats()
    result = clearway.generate(asked, small)
    assert torch.cuda.max_memory_reserved() <= limit - CONTEXT_BYTES
    assert result.images.shape == (1, 512, 512, 3)
    with pytest.raises(UnavailableError, match="is free"):
        clearway.generate(replace(asked, width=4096, height=4096, vae_tiling=False), small)
