"""Diffusers' pipelines on our noise levels draw what Clearway draws: two programs that share no flow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from clearway.device import Device
from clearway.errors import UnavailableError
from clearway.measure import diffusers_arms
from clearway.measure.compiled import Compiled, keeping
from clearway.measure.contenders import find
from clearway.measure.diffusers_arms import Pipeline, reference
from clearway.measure.quality import compare_tensors
from clearway.measure.random_model import random_model
from clearway.measure.scenario import Scenario
from clearway.models import _asked
from clearway.models._report import Ran
from clearway.types import Precision

# Diffusers' schedulers hand torch's tensors to NumPy in a way that NumPy 2 warns of
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
CPU = Device("cpu")
TINY = Scenario(name="tiny", width=64, height=64, steps=3, cfg_scale=3.0)


@pytest.fixture(scope="module", params=["tiny-sd15", "tiny-sdxl"])
def model(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param, CPU, Precision())


@pytest.mark.parametrize(
    ("sampler", "schedule", "calls"),
    [("Euler", "Automatic", 3), ("DPM++ 2M", "Karras", 3), ("DPM++ SDE", "Karras", 5)],
)
def test_it_draws_what_clearway_draws(model: Any, sampler: str, schedule: str, calls: int) -> None:
    one = replace(TINY, sampler=sampler, schedule=schedule)
    theirs = find("diffusers").prepare(one, model)
    ours, found = find("clearway-eager").prepare(one, model).probe(0), theirs.probe(0)
    assert found.calls == ours.calls == calls
    assert compare_tensors(found.latents, ours.latents)["rel_l2"] < 1e-3
    assert np.abs(found.images.astype(int) - ours.images).max() <= 2  # one is rounded, the other cut off
    assert theirs.proof() is None and theirs.routes() == {"unet/diffusers eager": calls}
    assert type(theirs.intended()["scheduler"]) is str


def test_groups_a_negative_prompt_and_no_guidance(model: Any) -> None:
    for one in (
        replace(TINY, negative="ugly", count=3, batch_size=2),
        replace(TINY, cfg_scale=1.0, steps=1, sampler="Euler", schedule="Automatic"),
    ):
        ours, theirs = (find(name).prepare(one, model).probe(0) for name in ("clearway-eager", "diffusers"))
        assert theirs.calls == ours.calls and theirs.latents.shape == ours.latents.shape
        assert compare_tensors(theirs.latents, ours.latents)["rel_l2"] < 5e-3


@pytest.mark.parametrize(("recorded", "placed"), [(True, "flat"), (False, "group_norm_silu")])
def test_after_accelerate_the_pipeline_draws_the_same_picture(
    model: Any, monkeypatch: pytest.MonkeyPatch, recorded: bool, placed: str
) -> None:
    monkeypatch.setattr(_asked, "recorded_here", lambda target, parts: recorded)
    arm, plain = (find(name).prepare(TINY, model) for name in ("diffusers-clearway", "diffusers"))
    found, expected = arm.probe(0), plain.probe(0)
    assert compare_tensors(found.latents, expected.latents)["rel_l2"] < 1e-3
    assert np.abs(found.images.astype(int) - expected.images).max() <= 2
    intended = arm.intended()
    assert intended["accelerated"][placed] > 0 and intended["png"] == "Pillow"
    assert "accelerated" not in plain.intended()
    assert arm.proof() is None and model.unet.conv_in.weight.is_contiguous()
    with pytest.raises(UnavailableError, match="whole pipelines"):
        find("diffusers-clearway").prepare(replace(TINY, what="unet"), model)


def test_graphs_that_did_not_run_in_the_users_pipeline_are_said(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_asked, "recorded_here", lambda target, parts: False)
    setup = Pipeline(TINY, model, Compiled(), accelerated=True)
    arm = setup.arm()
    monkeypatch.setattr(diffusers_arms, "automatic", lambda kind: "cuda_graph")
    assert arm.proof() == "unet was to run by cuda_graph, and no executor is in place at it"
    setup.report.ran = {
        "unet": Ran(Counter({"unet/eager": 9}), Counter({"warming": 9})),
        "vae.decoder": Ran(),
    }
    assert arm.proof() == "unet was to run by cuda_graph and ran 9 times by something else: warming"
    arm.settle()
    setup.report.ran["unet"].calls["unet/cuda_graph"] = 3
    assert "vae.decoder was to run by cuda_graph and ran 0 times" in (arm.proof() or "")
    setup.report.ran["vae.decoder"].calls["vae.decoder/cuda_graph"] = 1
    assert arm.proof() is None and arm.routes() == {"unet/cuda_graph": 3, "vae.decoder/cuda_graph": 1}
    setup.report.placed.clear()
    assert "found nothing" in (arm.proof() or "")


def test_compiled_networks_serve_the_next_scenario_of_their_size(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda run, **how: lambda *given, **more: run(*given, **more))

    def made(one: Scenario) -> Any:
        return Pipeline(one, model, Compiled(scope="full", layout="channels_last")).parts

    assert made(TINY) is not made(TINY)
    with keeping():
        first = made(TINY)
        assert made(replace(TINY, what="unet", steps=9)) is first
        assert made(replace(TINY, width=128)) is not first and made(replace(TINY, cfg_scale=1.0)) is not first
        eager = Pipeline(TINY, model, Compiled()).parts
        assert eager is not first and eager is not Pipeline(TINY, model, Compiled()).parts


def test_channels_last_leaves_the_models_own_weights_alone(model: Any) -> None:
    arm = find("diffusers-channels-last").prepare(TINY, model)
    assert (
        compare_tensors(arm.probe(0).latents, find("diffusers").prepare(TINY, model).probe(0).latents)[
            "rel_l2"
        ]
        < 1e-3
    )
    assert model.unet.conv_in.weight.is_contiguous() and arm.intended()["layout"] == "channels_last"


def test_a_float32_vae_beside_a_bfloat16_unet_runs() -> None:
    mixed = random_model("tiny-sd15", CPU, Precision(unet="bfloat16", text_encoder="bfloat16"))
    arm = find("diffusers").prepare(TINY, mixed)
    assert arm.call(0).shape == (1, 64, 64, 3) and arm.proof() is None
    exact = reference(TINY, mixed, "cpu").probe(0)
    assert exact.latents.dtype == torch.float32
    assert 1e-4 < compare_tensors(arm.probe(0).latents, exact.latents)["rel_l2"] < 0.5


def test_another_dtype_than_was_asked_for_is_said(model: Any) -> None:
    setup = Pipeline(TINY, model, Compiled())
    setup.parts.vae.to(torch.float16)
    assert setup.proof() == "the vae was to run in float32 and is in float16"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampler": "Heun", "schedule": "Automatic"}, "no Diffusers scheduler"),
        ({"ngms": 2.0}, "no NGMS"),
        ({"prompt": "a (red:1.3) apple"}, "neither stress nor timing"),
        ({"prompt": "a [red:blue:1] apple"}, "neither stress nor timing"),
        ({"prompt": "apple " * 80}, "neither stress nor timing"),
    ],
)
def test_other_work_is_refused_in_words(model: Any, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnavailableError, match=words):
        find("diffusers").prepare(replace(TINY, **change), model)


def test_the_sde_scheduler_needs_torchsde(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.utils.is_torchsde_available", lambda: False)
    with pytest.raises(UnavailableError, match=r"DPMSolverSDEScheduler needs torchsde.*pip install"):
        find("diffusers").prepare(replace(TINY, sampler="DPM++ SDE", schedule="Karras", steps=5), model)
