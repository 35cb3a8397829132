"""One call of one network: every contender gets the same inputs, and every call is counted."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from clearway import UnavailableError
from clearway.device import Device
from clearway.measure import diffusers_arms, networks
from clearway.measure.compiled import Compiled
from clearway.measure.contenders import clearway_arm, find
from clearway.measure.random_model import random_model
from clearway.measure.scenario import Scenario
from clearway.measure.verify import reference
from clearway.models import _mixed, _mixed_choice
from clearway.types import Choices, Precision
from fake_capture import Recorder

SHAPES = {
    ("unet", "tiny-sd15"): (2, 4, 8, 8),
    ("vae", "tiny-sd15"): (1, 3, 64, 64),
    ("text", "tiny-sd15"): (1, 77, 32),
    ("unet", "tiny-sdxl"): (2, 4, 8, 8),
    ("vae", "tiny-sdxl"): (1, 3, 64, 64),
    ("text", "tiny-sdxl"): (1, 77, 64),
}


@pytest.fixture(scope="module", params=["tiny-sd15", "tiny-sdxl"])
def model(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param, Device("cpu"), Precision())


def scenario(what: str, **more: Any) -> Scenario:
    return Scenario(name=what, what=what, width=64, height=64, **more)


@pytest.mark.parametrize("what", ["unet", "vae", "text"])
def test_contenders_give_the_same(model: Any, what: str) -> None:
    one, name = scenario(what), model.name.removesuffix("-random")
    ours, theirs = (find(who).prepare(one, model) for who in ("clearway-eager", "diffusers"))
    first = ours.probe(0)
    assert first.images is None and first.latents.shape == SHAPES[what, name]
    assert torch.equal(first.latents, theirs.probe(0).latents)
    assert torch.equal(first.latents, networks.output(one, model, 0, "float32", "cpu"))
    assert what == "text" or not torch.equal(first.latents, ours.probe(1).latents)
    assert ours.proof() is None and theirs.proof() is None
    theirs.call(0)
    assert theirs.routes() == {f"{what}/diffusers eager": 1} and sum(ours.routes().values()) >= 1
    if what != "text":
        assert ours.call(0, 64).shape[-1] == 2 * first.latents.shape[-1]


@pytest.mark.parametrize("name", ["clearway-eager", "diffusers"])
def test_a_round_is_several_calls_of_fresh_inputs(
    model: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scenario("unet", calls=3)
    arm = find(name).prepare(one, model)
    seen: list[Any] = []
    run = networks.Networks.run

    def watched(self: Any, what: str, given: Any) -> Any:
        seen.append(given["encoder_hidden_states"])
        return run(self, what, given)

    monkeypatch.setattr(networks.Networks, "run", watched)
    arm.call(0)
    arm.call(0)
    first, second = seen[:3], seen[3:]
    assert len(second) == 3 and all(value is first[0] for value in first)
    assert second[0] is second[2] is not first[0] and torch.equal(second[0], first[0])
    seen.clear()
    found = arm.probe(0)
    assert len(seen) == 1 and torch.equal(found.latents, networks.output(one, model, 0, "float32", "cpu"))


def test_without_guidance_half_the_rows_run(model: Any) -> None:
    assert networks.inputs(scenario("unet", cfg_scale=1.0), model, 0)["sample"].shape[0] == 1


def test_flops_grow_with_the_picture_and_bytes_are_those_of_weights_and_tensors() -> None:
    tiny = random_model("tiny-sd15", Device("cpu"), Precision())
    one = scenario("vae")
    found, wide = networks.cost(one, tiny), networks.cost(replace(one, width=128), tiny)
    assert wide["flops"] / found["flops"] == pytest.approx(2, rel=0.1)
    weights = sum(value.numel() for value in tiny.vae.decoder.parameters()) * 4
    assert found["bytes_moved"] == weights + 4 * (4 * 8 * 8 + 3 * 64 * 64)


def test_text_encoders_run_by_the_executor_that_is_chosen(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("clearway.execution.executor"), "TorchCapture", Recorder)
    graphs = replace(model, choices=Choices(executor="cuda_graph"))
    arm = networks.clearway_network(scenario("text"), graphs, {}, None)
    assert torch.equal(arm.probe(0).latents, networks.output(scenario("text"), model, 0, "float32", "cpu"))
    assert set(arm.routes()) == {"text_encoder/cuda_graph"} and arm.proof() is None


def test_a_choice_that_text_encoders_do_not_take_is_refused(model: Any) -> None:
    arm = find("clearway:executor=compiled").prepare(scenario("text"), model)
    arm.call(0)
    assert "text_encoder was to run by compiled" in (arm.proof() or "")


def test_a_mixed_vae_is_measured_as_mixed_and_against_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_mixed_choice.HALF, "cpu", "float16")
    made = scenario("vae", precision={"vae": "mixed"})
    mixed = random_model("tiny-sd15", Device("cpu"), made.precision_on(Device("cpu")))
    arm = clearway_arm(made, mixed, Choices(executor="flat"))
    found = arm.probe(0)
    assert arm.proof() is None and _mixed.precision_of(mixed.vae) == "float32"  # the arm's copy is mixed
    refer = reference(made, mixed)
    assert "float32" in refer.label and refer.stock_label == "eager, mixed" and refer.budget
    judged = refer.judge(found)
    assert judged["verified"] is True and judged["psnr_db"] > 40 and not judged["identical"]
    with pytest.raises(UnavailableError, match="no VAE of mixed precision"):
        diffusers_arms.arm(made, mixed)
    whole = diffusers_arms.Pipeline(made, mixed, Compiled(), dtype="float32")
    assert torch.equal(whole.parts.vae.decoder.conv_in.weight, mixed.vae.decoder.conv_in.weight)
