"""Contenders: modules of their own over shared weights, and proofs of what ran."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from clearway.device import Device
from clearway.errors import RequestError
from clearway.measure import contenders
from clearway.measure.contenders import changed_dtype, find, isolated, misrouted, parse_choices
from clearway.measure.random_model import random_model
from clearway.measure.scenario import Scenario
from clearway.types import Choices, Precision

TINY = Scenario(name="tiny", model="tiny-sd15-random", width=64, height=64, steps=2, count=3, batch_size=2)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("tiny-sd15", Device("cpu"), Precision())


def test_isolated_modules_share_memory_and_nothing_else(model: Any) -> None:
    own = isolated(model.unet)
    before = model.unet.conv_in.weight
    assert own.conv_in.weight is not before and own.conv_in.weight.data_ptr() == before.data_ptr()
    own.to(memory_format=torch.channels_last)
    own.conv_in.forward = lambda x: x
    assert before.is_contiguous() and "forward" not in vars(model.unet.conv_in)
    assert not own.conv_in.weight.is_contiguous() and torch.equal(own.conv_in.weight, before)
    assert own.config == model.unet.config


def test_clearway_draws_counts_and_keeps_the_last_latents(model: Any) -> None:
    arm = find("clearway-eager").prepare(TINY, model)
    found = arm.probe(0)
    assert found.images.shape == (3, 64, 64, 3) and found.latents.shape == (3, 4, 8, 8)
    assert found.calls == 4  # two groups of two steps
    assert np.array_equal(arm.call(0), found.images) and not np.array_equal(arm.call(1), found.images)
    assert arm.call(0, 64).shape == (3, 64, 128, 3)
    assert arm.proof() is None and arm.work == "same"
    assert {route.partition("/")[0] for route in arm.routes()} == {"text_encoder", "unet", "vae"}
    assert arm.intended()["choices"]["executor"] == "eager"


def test_latents_are_not_compared_where_a_schedule_ends_above_zero(model: Any) -> None:
    ddim = replace(TINY, sampler="DDIM", schedule="Automatic", count=1, batch_size=1)
    assert find("clearway").prepare(ddim, model).probe(0).latents is None


def test_ngms_is_less_work(model: Any) -> None:
    assert find("clearway").prepare(replace(TINY, ngms=3.0), model).work == "less work"


def test_choices_are_applied_to_the_arms_own_modules(model: Any) -> None:
    arm = find("clearway:layout=channels_last,ops=geglu").prepare(TINY, model)
    assert arm.intended()["choices"]["layout"] == "channels_last" and arm.probe(0).images is not None
    assert model.unet.conv_in.weight.is_contiguous()
    plain = find("clearway-eager").prepare(TINY, model).probe(0)
    assert np.abs(arm.probe(0).images.astype(int) - plain.images).max() <= 2


def test_without_accelerate_a_choice_is_refused_in_words(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    arm = find("clearway:executor=cuda_graph").prepare(TINY, model)
    assert "no accelerate" in (arm.proof() or "") and "no accelerate" in arm.intended()["note"]


@pytest.mark.parametrize(
    ("choices", "seen", "words"),
    [
        (Choices(), {"unet/eager": 4}, None),
        (Choices(executor="cuda_graph"), {"unet/cuda_graph": 4}, None),
        (Choices(executor="cuda_graph"), {"unet/cuda_graph": 3, "unet/eager": 1}, "1 calls ran eagerly"),
        (Choices(executor="cuda_graph"), {"unet/eager": 4}, "ran by eager"),
        (Choices(), {}, "ran by nothing"),
        (Choices(routes=(("attention", "sdpa"),)), {"unet/eager": 1}, "attention was to run by sdpa"),
        (Choices(routes=(("attention", "sdpa"),)), {"unet/eager": 1, "attention/sdpa": 2}, None),
    ],
)
def test_a_path_that_did_not_run_is_said(choices: Choices, seen: dict[str, int], words: str | None) -> None:
    found = misrouted(choices, seen, ("unet",))
    assert found is None if words is None else words in (found or "")


def test_a_part_that_ran_again_in_another_dtype_is_said() -> None:
    assert changed_dtype({"a word was read as text"}) is None
    note = "the VAE returned NaN in float16 and ran again in float32"
    assert changed_dtype({"other", note}) == note


def test_choices_are_parsed() -> None:
    text = "executor=compiled,rows=separate,ops=geglu+attention,packed_qkv=true"
    text += ",routes=attention/sdpa+softmax/metal"
    assert parse_choices(text) == Choices(
        executor="compiled",
        rows="separate",
        ops=("geglu", "attention"),
        routes=(("attention", "sdpa"), ("softmax", "metal")),
        packed_qkv=True,
    )
    wrongs = (
        "speed=high",
        "executor",
        "packed_qkv=yes",
        "executor=fast",
        "layout=x",
        "rows=x",
        "ops=geglu+x",
    )
    for wrong in (*wrongs, "routes=attention/x", "routes=x/sdpa", "routes=attention"):
        with pytest.raises(RequestError):
            parse_choices(wrong)


def test_names_are_found_and_compilers_stay_off_the_cpu() -> None:
    with pytest.raises(RequestError, match="nearest: 'diffusers'"):
        find("difusers")
    assert contenders.usual("cpu")[:3] == ["clearway", "clearway-eager", "diffusers"]
    assert not any("compile" in name for name in contenders.usual("cpu"))
    on_gpu = contenders.usual("cuda")
    assert {"diffusers-compile", "clearway-fused-graph"} <= set(on_gpu)
    assert "diffusers-compile-max-autotune" not in on_gpu and "clearway-compiled" not in on_gpu


def test_what_was_selected_is_used_by_clearway_alone(model: Any) -> None:
    from clearway.models import chosen

    content = {"choices": {"layout": "channels_last", "ops": ["geglu"]}}
    assert chosen.store(model, TINY.width, TINY.height, content)
    try:
        found = chosen.find(model, TINY.width, TINY.height)
        assert found is not None
        selected = find("clearway").prepare(TINY, model)
        assert selected.intended()["choices"]["layout"] == "channels_last"
        selected.call(0)
        plain = find("clearway-eager").prepare(TINY, model)
        plain.call(0)
        assert plain.intended()["choices"]["layout"] == "contiguous"
        assert any(route.startswith("geglu/") for route in selected.routes())
        assert not any(route.startswith("geglu/") for route in plain.routes())
        assert model.unet.conv_in.weight.is_contiguous()
    finally:
        chosen.forget(model, TINY.width, TINY.height)


def test_the_default_arm_has_the_choices_of_the_defaults(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearway.models import chosen

    graph, eager = (
        find(name).prepare(TINY, model).intended()["choices"]
        for name in ("clearway-fused-graph", "clearway-fused")
    )
    monkeypatch.setitem(chosen.DEFAULTS, "cpu", chosen.DEFAULTS["cuda"])
    usual = chosen.default("cpu")
    assert graph == asdict(usual) and eager == asdict(replace(usual, executor="eager"))
    assert find("clearway").prepare(TINY, model).intended()["choices"] == asdict(usual)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_png_files_are_timed_in_every_whole_arm(model: Any) -> None:
    writers = {}
    for name in ("clearway-eager", "diffusers"):
        arm = find(name).prepare(TINY, model)
        arm.call(0)
        arm.settle()
        arm.call(0)
        assert len(arm.png_s) == 1 and arm.png_s[0] > 0
        writers[name] = arm.intended()["png"]
    assert writers == {"clearway-eager": "Clearway's writer", "diffusers": "Pillow"}


def test_clearways_own_ops_draw_the_same_picture(model: Any) -> None:
    arm = find("clearway-fused").prepare(TINY, model)
    assert {"attention", "geglu"} <= set(arm.intended()["choices"]["ops"])
    plain = find("clearway-eager").prepare(TINY, model).probe(0)
    assert np.abs(arm.probe(0).images.astype(int) - plain.images).max() <= 2
    graph = find("clearway-graph").prepare(TINY, model)
    graph.call(0)
    assert "was to run by cuda_graph and ran by eager" in (graph.proof() or "")  # there is no CUDA here
