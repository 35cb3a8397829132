"""A profile of a tiny model by a clock of its own: a planted slow layer is named, and nothing stays."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from torch import nn

import clearway
from builders import tiny_sd1
from clearway import Cancelled, Request, StepDone
from clearway.measure import profiling
from clearway.measure.advice import Machine, bottleneck, worst
from clearway.measure.ceilings import Ceilings
from clearway.measure.profiling import Profile, Profiler, compiler, graphs
from clearway.measure.stages import parts
from clearway.models import Model
from clearway.pipeline import generate
from fake_timer import FakeTimer

REQUEST = Request(prompt="a red apple", width=64, height=64, steps=4, sampler="Euler", seed=7, cfg_scale=4.0)
DEEP = (
    "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_out.0",
    "vae.decoder.up_blocks.0.resnets.0.conv2",
    "text_encoder.encoder.layers.0.mlp.fc1",
)


class Ticking(FakeTimer):
    """Reading it takes a microsecond."""

    def now(self) -> float:
        self.spend(1e-6)
        return super().now()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return clearway.load(str(tiny_sd1(tmp_path_factory.mktemp("sd1"))), device="cpu")


def limits(dtype: str) -> Ceilings:
    return Ceilings(dtype, 1e15, 1e14, 1e-6)


def profiler(model: Model, timer: FakeTimer | None = None) -> Profiler:
    return Profiler(model, generate, lambda result, keep: None, timer or Ticking(), limits)


def find(model: Model, path: str) -> nn.Module:
    part, _, name = path.partition(".")
    modules = dict(parts(model)[part].named_modules())
    return modules.get(name) or modules[f"text_model.{name}"]


def plant(
    path: str, model: Model, timer: FakeTimer, patch: pytest.MonkeyPatch, seconds: float = 0.05
) -> None:
    layer = find(model, path)
    inner = layer.forward

    def slow(*args: object, **kwargs: object) -> object:
        timer.spend(seconds)
        return inner(*args, **kwargs)

    patch.setitem(vars(layer), "forward", slow)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("path", DEEP)
def test_a_planted_slow_layer_is_named(
    model: Model, path: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = Ticking()
    plant(path, model, timer, monkeypatch)
    monkeypatch.setattr(profiling, "MOST_PAIRS", 1)
    if not quick:
        monkeypatch.setattr(profiling, "QUICK_S", 0.0)
    found = profiler(model, timer).profile(REQUEST)
    slow = worst(found)
    assert slow is not None and slow.path.replace("text_model.", "") == path
    assert slow.own_ms == pytest.approx(50, rel=0.1) and slow.own_share > 0.9
    assert bottleneck(found, Machine("cpu", 1, 1, limits)).startswith(slow.path)


def test_a_model_whose_layers_are_alike_has_no_slow_one(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = FakeTimer()
    for part, root in parts(model).items():
        for name, module in root.named_modules():
            if name and not list(module.children()):
                plant(f"{part}.{name}", model, timer, monkeypatch, seconds=0.001)
    found = profiler(model, timer).profile(REQUEST)
    assert [one.path for one in found.inside if one.slow] == []
    assert {one.part for one in found.inside} == {"unet", "vae", "text_encoder"}


def test_totals_are_of_unprofiled_runs_and_the_overhead_is_told(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "MOST_PAIRS", 3)
    timer, seen = FakeTimer(), []

    def draw(request: Request, model: Model, on_event: object) -> object:
        from clearway import clock

        profiled = vars(clock.Clock)["stage"].__module__ == "clearway.measure.stages"
        seen.append((request.steps, profiled))
        timer.spend(1.1 if profiled else 1.0)
        return generate(request, model, on_event)

    subject = profiler(model, timer)
    subject.draw = draw
    found = subject.profile(REQUEST)
    assert found.whole_ms == pytest.approx(1000) and found.overhead == pytest.approx(0.1)
    assert len(found.unprofiled_ms) == len(found.profiled_ms) == 3
    assert seen[:5] == [(1, False), (4, False), (4, True), (4, False), (4, True)]
    assert sum(row.ms for row in found.rows) == pytest.approx(1100)
    assert (found.result.seeds, found.request.steps) == ((7,), 4)


@pytest.mark.parametrize("plain", [True, False])
def test_what_is_made_ready_by_size_is_made_before_the_measured_runs(
    model: Model, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plain:
        monkeypatch.setenv("CLEARWAY_PLAIN", "1")
    else:
        monkeypatch.delenv("CLEARWAY_PLAIN", raising=False)
    sizes = []

    def draw(request: Request, model: Model, on_event: object) -> object:
        sizes.append((request.width, request.height))
        return generate(request, model, on_event)

    subject = profiler(model)
    subject.draw = draw
    subject.profile(dataclasses.replace(REQUEST, width=128, steps=2))
    assert sizes[0] == ((64, 64) if plain else (128, 64))
    assert set(sizes[1:]) == {(128, 64)}


def test_a_long_generation_is_shortened_and_scaled(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Ticking()
    plant("unet.conv_in", model, timer, monkeypatch, seconds=3.9)
    found = profiler(model, timer).profile(dataclasses.replace(REQUEST, steps=8, count=2, batch_size=1))
    (unet,) = (row for row in found.rows if row.name == "unet")
    assert unet.calls == 16 and unet.ms == pytest.approx(62400, rel=0.01)
    assert found.whole_ms == pytest.approx(62400, rel=0.01)
    assert found.overhead == pytest.approx(0, abs=0.01)
    assert any("2 of 8 steps and 1 of 2 pictures" in note for note in found.notes)
    assert len(found.calls_ms["unet"]) == 2
    assert timer.now() < 64 + 4 + 8 + 4 + 4 + 1  # whole, first, shortened, counted, and the suspect again


def test_a_last_step_that_calls_once_is_scaled_right(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Ticking()
    plant("unet.conv_in", model, timer, monkeypatch, seconds=1.9)
    found = profiler(model, timer).profile(dataclasses.replace(REQUEST, sampler="Heun", steps=8))
    (unet,) = (row for row in found.rows if row.name == "unet")
    assert len(found.calls_ms["unet"]) == 3 and unet.calls == 15
    assert unet.ms == pytest.approx(15 * 1900, rel=0.01)


def test_pictures_modules_and_saving_are_as_before(model: Model) -> None:
    before = generate(REQUEST, model)
    hooks = [len(module._forward_pre_hooks) for module in model.unet.modules()]
    kept = []
    subject = profiler(model)
    subject.save = lambda result, keep: kept.append(keep)
    found = subject.profile(REQUEST)
    after = generate(REQUEST, model)
    assert np.array_equal(before.images, found.result.images) and np.array_equal(before.images, after.images)
    assert [len(module._forward_pre_hooks) for module in model.unet.modules()] == hooks
    assert kept.count(True) == 1 and kept[0]
    assert found.result.routes == before.routes


def test_stopping_passes_through(model: Model) -> None:
    steps = []

    def stop(event: object) -> None:
        if isinstance(event, StepDone):
            steps.append(event.step)
            if len(steps) == 8:
                raise Cancelled("stopped")

    subject = profiler(model)
    subject.on_event = stop
    with pytest.raises(Cancelled):
        subject.profile(REQUEST)
    assert not any(module._forward_pre_hooks for module in model.unet.modules())


def test_a_seed_is_drawn_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MOST_PAIRS", 2)
    seeds, subject = [], profiler(model)

    def draw(request: Request, model: Model, on_event: object) -> object:
        result = generate(request, model, on_event)
        seeds.append(result.seeds[0])
        return result

    subject.draw = draw
    subject.profile(dataclasses.replace(REQUEST, seed=-1))
    assert len(set(seeds[1:])) == 1


def test_what_the_compiler_did_is_read_where_it_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert compiler() == {}
    utils = ModuleType("torch._dynamo.utils")
    empty: dict[str, int] = {}
    utils.counters = {
        "stats": {"unique_graphs": 3},
        "graph_break": {"why": 2},
        "recompiles": empty,
        "inductor": {"cudagraph_skips": 1},
    }
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    assert compiler() == {"graphs": 3, "graph breaks": 2, "recompilations": 0, "CUDA graphs skipped": 1}


def test_missed_graphs_are_told(model: Model) -> None:
    graphed = dataclasses.replace(model, choices=dataclasses.replace(model.choices, executor="cuda_graph"))
    model.unet.__dict__["_clearway_built"] = SimpleNamespace(
        held={"pool": SimpleNamespace(captured=2, evicted=0)}
    )
    try:
        found = graphs(graphed, {"unet/cuda_graph": 9, "unet/eager": 1})
    finally:
        del model.unet.__dict__["_clearway_built"]
    assert found == {"unet captured": 2, "unet calls without a graph": 1}
    assert graphs(model, {"unet/eager": 10}) == {}


def test_a_profile_says_its_medians() -> None:
    found = Profile(REQUEST, SimpleNamespace(), 1.0, [100.0, 300.0, 200.0], [210.0])
    assert found.whole_ms == 200.0 and found.overhead == pytest.approx(0.05)
