"""Listening to a generation: all of it is accounted for, and nothing of the listening stays."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import clearway
from builders import tiny_sd1, tiny_sdxl
from clearway import Cancelled, Request, StepDone, clock, execution, guidance, models
from clearway.measure.stages import (
    ARITHMETIC,
    CALL,
    MODULE,
    RUN,
    STAGE,
    Recorder,
    listening,
    parts,
    patched,
)
from clearway.models import Model, chosen
from fake_timer import FakeTimer

SMALL = Request(prompt="a red apple", width=64, height=72, steps=3, sampler="Heun", seed=7, cfg_scale=4.0)


@pytest.fixture(scope="module")
def sd1(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return clearway.load(str(tiny_sd1(tmp_path_factory.mktemp("sd1"))), device="cpu")


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return clearway.load(str(tiny_sdxl(tmp_path_factory.mktemp("sdxl"))), device="cpu")


class Ticking(FakeTimer):
    """Reading it takes a microsecond, and two on the device."""

    def now(self) -> float:
        self.spend(1e-6, 2e-6)
        return super().now()


def hooks(model: Model) -> list[tuple[str, object]]:
    """Every hook of every module (transformers has some of its own)."""
    return [
        (path, hook)
        for root in parts(model).values()
        for path, module in root.named_modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
        for hook in getattr(module, name).items()
    ]


def touched() -> list[object]:
    return [
        vars(clock.Clock)["stage"],
        vars(clock)["synchronize"],
        vars(guidance.Guided)["__call__"],
        vars(models.UNetDenoiser)["__call__"],
        vars(execution.Eager)["__call__"],
    ]


def listened(
    model: Model, inside: bool, request: Request = SMALL, timer: FakeTimer | None = None
) -> Recorder:
    recorder = Recorder(timer or Ticking())
    with listening(recorder, model if inside else None), recorder.span("generation", RUN):
        clearway.generate(request, model)
    return recorder


def names(recorder: Recorder, kind: str) -> list[str]:
    return [span.name for span in recorder.spans if span.kind == kind]


def test_every_stage_call_and_arithmetic_is_heard(sd1: Model) -> None:
    recorder = listened(sd1, inside=False)
    assert names(recorder, STAGE) == ["prompt", "text", "schedule", "noise", "sampling", "vae"]
    assert names(recorder, CALL) == ["text_encoder"] * 2 + ["unet"] * 5 + ["vae"]
    assert names(recorder, ARITHMETIC) == ["denoiser", "guidance"] * 5
    assert names(recorder, MODULE) == []
    unet = next(span for span in recorder.spans if span.name == "unet")
    assert unet.shapes[0] == (2, 4, 9, 8)
    above = []
    while unet.parent:
        unet = unet.parent
        above.append(unet.name)
    assert above == ["denoiser", "guidance", "sampling", "generation"]


def test_each_text_encoder_is_its_own(sdxl: Model) -> None:
    assert set(names(listened(sdxl, inside=False), CALL)) == {"text_encoder", "text_encoder_2", "unet", "vae"}


@pytest.mark.parametrize("inside", [False, True])
def test_own_times_add_up_to_the_run(sd1: Model, inside: bool) -> None:
    recorder = listened(sd1, inside, timer=Ticking(events=True))
    run = recorder.spans[-1]
    own = list(recorder.own())
    assert run.kind == RUN
    assert sum(one.host_s for one in own) == pytest.approx(run.seconds)
    assert sum(one.device_s for one in own) == pytest.approx(recorder.device_seconds(run))


def test_modules_are_heard_by_their_paths(sd1: Model) -> None:
    heard = names(listened(sd1, inside=True), MODULE)
    assert "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q" in heard
    assert "vae.decoder.conv_out" in heard
    assert any(name.startswith("text_encoder.") and name.endswith("q_proj") for name in heard)
    assert "unet" not in heard and "vae" not in heard


@pytest.mark.parametrize("inside", [False, True])
def test_nothing_stays_and_the_picture_is_the_same(sd1: Model, inside: bool) -> None:
    """Hooks inside are heard by no recorded call, so there the networks run plainly throughout."""
    with chosen.plainly(inside):
        first = clearway.generate(SMALL, sd1)
        before, hooked = touched(), hooks(sd1)
        recorder = Recorder(FakeTimer())
        with listening(recorder, sd1 if inside else None):
            assert touched() != before
            during = clearway.generate(SMALL, sd1)
        assert all(a is b for a, b in zip(touched(), before, strict=True)) and hooks(sd1) == hooked
        after = clearway.generate(SMALL, sd1)
    assert np.array_equal(first.images, during.images) and np.array_equal(first.images, after.images)
    assert first.routes == during.routes == after.routes and first.infotexts == during.infotexts


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("where", ["step", "module"])
def test_nothing_stays_when_the_run_raises(
    sd1: Model, inside: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clearway.generate(SMALL, sd1)
    before, hooked = touched(), hooks(sd1)

    def stop(event: object) -> None:
        if isinstance(event, StepDone) and where == "step":
            raise Cancelled("stopped")

    def broken(*_: object) -> None:
        raise Cancelled("broken")

    if where == "module":
        monkeypatch.setattr(sd1.unet.mid_block.resnets[0], "forward", broken)
    recorder = Recorder(Ticking())
    with (
        pytest.raises(Cancelled),
        listening(recorder, sd1 if inside else None),
        recorder.span("generation", RUN),
    ):
        clearway.generate(SMALL, sd1, stop)
    assert all(a is b for a, b in zip(touched(), before, strict=True)) and hooks(sd1) == hooked
    assert recorder.stack == [] and recorder.spans[-1].kind == RUN
    assert all(span.end > span.begin >= 0 for span in recorder.spans)


def test_hooks_of_others_stay_and_run_inside(sd1: Model) -> None:
    timer, layer, before = Ticking(), sd1.unet.conv_in, hooks(sd1)
    mine = layer.register_forward_pre_hook(lambda *_: timer.spend(1.0))
    try:
        spans = listened(sd1, inside=True, timer=timer).spans
        assert all(span.seconds >= 1 for span in spans if span.name == "unet.conv_in")
        assert list(layer._forward_pre_hooks) == [mine.id] and len(hooks(sd1)) == len(before) + 1
    finally:
        mine.remove()


def test_an_executor_within_an_executor_is_one_call() -> None:
    inner = execution.Eager(lambda: 3, "unet")
    outer = execution.Eager(inner, "unet")
    recorder = Recorder(FakeTimer())
    with listening(recorder):
        assert outer() == 3
    assert names(recorder, CALL) == ["unet"]


def test_memory_is_read_around_stages_not_in_them() -> None:
    timer, order = Ticking(), []

    class Meter:
        driver_peak_bytes = 5

        def __enter__(self) -> None:
            order.append(("in", timer.seconds))

        def __exit__(self, *_: object) -> None:
            order.append(("out", timer.seconds))

    recorder = Recorder(timer, meter=Meter)
    with recorder.span("generation", RUN), recorder.stage("vae") as span:
        pass
    assert span.memory == {"driver_peak_bytes": 5, "allocator_peak_bytes": None, "live_peak_bytes": None}
    assert order[0][1] < span.begin < span.end <= order[1][1]


def test_patched_puts_back_the_very_object() -> None:
    owner = SimpleNamespace(run=torch.relu)
    with (
        pytest.raises(ValueError, match="x"),
        patched(owner, "run", lambda inner: lambda value: -inner(value)),
    ):
        assert owner.run(torch.tensor(2.0)) == -2
        raise ValueError("x")
    assert owner.run is torch.relu


def test_spans_end_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearway.measure.stages.OVERFLOW", 2)
    recorder = Recorder(FakeTimer())
    for _ in range(4):
        with recorder.span("x", CALL):
            pass
    assert len(recorder.spans) == 2
