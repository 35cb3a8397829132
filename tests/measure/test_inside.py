"""Modules by path: times of their own, the way down to the heaviest, and which is slower than its like."""

from __future__ import annotations

import pytest

from clearway.measure.ceilings import Ceilings
from clearway.measure.inside import Inner, descend, inner
from clearway.measure.stages import CALL, MODULE, RUN, Recorder
from fake_timer import FakeTimer

LIMITS = Ceilings("float32", 1e12, 1e10, 1e-6)
LAYERS = {f"unet.blocks.{block}.layer_{layer}": 0.010 for block in range(3) for layer in range(4)}
SHAPE = ((2, 4, 8, 8),)


def run(times: dict[str, float], calls: int = 2, noise: dict[int, str] | None = None) -> Recorder:
    """`calls` of a network of three blocks of equal layers; `noise` makes one layer slow in one call."""
    recorder, timer = Recorder(timer := FakeTimer()), timer
    with recorder.span("generation", RUN):
        for call in range(calls):
            network = recorder.begin("unet", CALL, SHAPE)
            for block in range(3):
                outer = recorder.begin(f"unet.blocks.{block}", MODULE, SHAPE)
                timer.spend(0.001)
                for name, seconds in times.items():
                    if name.startswith(f"{outer.name}."):
                        layer = recorder.begin(name, MODULE, SHAPE)
                        timer.spend(seconds * (20 if noise and noise.get(call) == name else 1))
                        layer.flops, layer.bytes_moved, layer.ops = 10**9, 10**6, 2
                        recorder.finish(layer)
                recorder.finish(outer)
            recorder.finish(network)
    return recorder


def modules(*timed: Recorder, whole_ms: float = 123.0, share: float = 0.9) -> dict[str, Inner]:
    types = {name: "Linear" for name in LAYERS}
    found = inner(timed, timed[0], types, {"unet": (whole_ms, share)}, lambda part: LIMITS)
    return {one.path: one for one in found}


def test_times_shares_and_work_are_for_one_call_of_the_network() -> None:
    found = modules(run(LAYERS))
    layer, block = found["unet.blocks.1.layer_2"], found["unet.blocks.1"]
    assert (layer.ms, layer.own_ms) == (pytest.approx(10), pytest.approx(10))
    assert (block.ms, block.own_ms) == (pytest.approx(41), pytest.approx(1))
    assert block.share == pytest.approx(0.9 * 41 / 123) and block.own_share == pytest.approx(0.9 / 123)
    assert (layer.flops, layer.bytes_moved, layer.calls, layer.type) == (10**9, 10**6, 1, "Linear")
    assert set(block.children) == {f"unet.blocks.1.layer_{index}" for index in range(4)}
    assert not any(one.slow for one in found.values())


def test_a_slow_layer_is_found_among_its_like() -> None:
    found = modules(run(LAYERS | {"unet.blocks.2.layer_0": 0.100}), whole_ms=213)
    assert [path for path, one in found.items() if one.slow] == ["unet.blocks.2.layer_0"]
    assert found["unet.blocks.2.layer_0"].usual_ms == pytest.approx(10)


def test_a_block_that_is_slow_itself_is_found_too() -> None:
    recorder = run(LAYERS)
    for span in recorder.spans:
        if span.name == "unet.blocks.1" or (span.kind in (CALL, RUN)):
            span.end += 1.0
    assert [path for path, one in modules(recorder, whole_ms=1123).items() if one.slow] == ["unet.blocks.1"]


def test_a_layer_without_like_is_measured_by_the_pace_of_the_others() -> None:
    recorder = run(LAYERS | {"unet.blocks.0.layer_1": 0.500})
    for span in recorder.spans:
        if span.name == "unet.blocks.0.layer_1":
            span.flops += 10**8
    found = modules(recorder, whole_ms=613)
    assert [path for path, one in found.items() if one.slow] == ["unet.blocks.0.layer_1"]


def test_what_cost_little_is_not_named() -> None:
    found = modules(run(LAYERS | {"unet.blocks.2.layer_0": 0.100}), whole_ms=213, share=0.05)
    assert not any(one.slow for one in found.values())


def test_a_machine_that_was_busy_once_names_nothing() -> None:
    noise = {0: "unet.blocks.0.layer_0", 1: "unet.blocks.2.layer_3"}
    assert not any(one.slow for one in modules(run(LAYERS, noise=noise)).values())
    once = run(LAYERS, calls=1, noise={0: "unet.blocks.0.layer_0"})
    assert any(one.slow for one in modules(once).values())
    assert not any(one.slow for one in modules(once, run(LAYERS, calls=1)).values())


def test_the_way_down_follows_the_heaviest() -> None:
    found = modules(run(LAYERS | {"unet.blocks.2.layer_0": 0.100}))
    shown = [(depth, one.path) for depth, one in descend(found.values(), "unet")]
    assert shown[:2] == [(0, "unet.blocks.2"), (1, "unet.blocks.2.layer_0")]
    assert {path for depth, path in shown if depth == 0} == {f"unet.blocks.{index}" for index in range(3)}
    assert all(path.startswith("unet.blocks.2") for depth, path in shown if depth)
    assert descend(found.values(), "vae") == []
