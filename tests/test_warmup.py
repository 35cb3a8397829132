"""After a warm-up nothing is left to be made for a request like the one it was for."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import clearway
from builders import tiny_sd1, tiny_sdxl
from clearway import Cancelled, Request, RequestError, warmup
from clearway.execution import pools
from clearway.models import Model
from clearway.prompt import plan, windows
from clearway.types import Choices, Event, StepDone
from clearway.warmup import STEPS, _batch, _prompt, warm_up
from fake_capture import Recorder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd1(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    return clearway.load(str(folder), device="cpu")


def captured(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model run by graphs that a CPU can record."""
    monkeypatch.setattr(importlib.import_module("clearway.execution.executor"), "TorchCapture", Recorder)
    return replace(model, choices=Choices(executor="cuda_graph"))


def counts(model: Model) -> list[int]:
    return [pool.made for module in (model.unet, model.vae, *model.text_encoders) for pool in pools(module)]


def test_it_says_what_it_cost_and_what_ran(model: Model) -> None:
    made = clearway.warm_up(model, [(64, 64), (64, 72), (64, 64)], request=Request(batch_size=2))
    assert [(one.width, one.height, one.batch_sizes) for one in made.sizes] == [
        (64, 64, (2,)),
        (64, 72, (2,)),
    ]
    for one in made.sizes:
        assert one.seconds.keys() >= {"text", "sampling", "vae", "encode"}
        assert all(value >= 0 for value in one.seconds.values()) and one.total_s > 0
        assert one.routes["unet/flat"] == STEPS and one.routes["vae/flat"] == 2
    assert sum(one.total_s for one in made.sizes) <= made.total_s
    assert made.notes == () and made.as_dict()["sizes"][1]["height"] == 72


def test_where_nothing_is_named_the_models_defaults_hold(model: Model) -> None:
    (one,) = warm_up(replace(model, defaults=replace(model.defaults, width=72, height=64))).sizes
    assert (one.width, one.height, one.batch_sizes) == (72, 64, (1,))


@pytest.mark.parametrize(
    "request_like",
    [
        Request(),
        Request(count=3, batch_size=2),
        Request(ngms=3.0, ngms_all_steps=True),
        Request(cfg_scale=1.0),
        Request(sampler="DPM++ SDE", clip_skip=2),
    ],
    ids=["plain", "two group sizes", "NGMS", "no guidance", "clip skip"],
)
def test_a_request_like_it_finds_everything_made(
    model: Model, request_like: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = captured(model, monkeypatch)
    made = warm_up(fast, [(64, 64), (64, 72)], request=request_like)
    assert made.notes == () and not any(route.endswith("/eager") for route in made.sizes[0].routes)
    before = counts(fast)
    for height in (64, 72):
        wanted = replace(
            request_like, prompt="a red apple, (bright:1.2)", width=64, height=height, steps=6, seed=9
        )
        result = clearway.generate(wanted, fast)
        assert not any(route.endswith("/eager") for route in result.routes)
    assert counts(fast) == before


def test_longer_prompts_are_made_ready_on_request(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, size = captured(model, monkeypatch), {"width": 64, "height": 64, "steps": 2, "seed": 1}
    warm_up(fast, [(64, 64)], windows=2)
    before = counts(fast)
    long = "red apple " * 60
    for prompt, negative in ((long, ""), (long, long), ("x", "")):
        clearway.generate(Request(prompt=prompt, negative_prompt=negative, **size), fast)
    assert counts(fast) == before


@pytest.mark.parametrize("count", [1, 2, 3])
def test_its_prompts_need_as_many_windows_as_they_should(model: Model, count: int) -> None:
    tokenizer, (span,) = model.tokenizers[0], plan(_prompt(model, count), "").positive
    assert len(list(windows(span.pieces, tokenizer.encode, tokenizer.comma))) == count


def test_sdxl_with_both_text_encoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    loaded = clearway.load(str(tiny_sdxl(tmp_path / "sdxl")), device="cpu")
    fast = captured(loaded, monkeypatch)
    warm_up(fast, [(64, 64)])
    before = counts(fast)
    result = clearway.generate(Request(prompt="a red apple", width=64, height=64, steps=2, seed=1), fast)
    assert counts(fast) == before and result.routes["text_encoder_2/cuda_graph"] == 2


def test_what_does_not_stay_ready_is_said(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = captured(model, monkeypatch)
    sizes = [(64, height) for height in range(64, 64 + 8 * 8, 8)]
    made = warm_up(fast, sizes)
    assert any("graphs of the UNet were given up for others" in note for note in made.notes)


def test_why_a_part_ran_eagerly_is_said_once(model: Model) -> None:
    made = warm_up(replace(model, choices=Choices(executor="cuda_graph")), [(64, 64), (64, 72)])
    assert sum("the UNet ran eagerly: CUDA graphs are for CUDA" in note for note in made.notes) == 1


@pytest.mark.parametrize(
    ("like", "runs"),
    [
        ({}, (1, 1)),
        ({"batch_size": 4}, (4, 4)),
        ({"count": 4}, (4, 4)),
        ({"count": 6, "batch_size": 4}, (6, 4)),
        ({"count": 800, "batch_size": 3}, (5, 3)),
        ({"count": 5, "exact_batch": True}, (1, 1)),
        ({"batch_size": 4, "exact_batch": True}, (1, 1)),
    ],
)
def test_the_fewest_pictures_in_all_group_sizes(model: Model, like: dict, runs: tuple[int, int]) -> None:
    made = _batch(Request(**like), model)
    assert (made.count, made.batch_size) == runs


def test_mistakes_are_said_before_anything_runs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearway.warmup.generate", lambda *_: pytest.fail("it ran"))
    for mistake, words in (
        ({"sizes": [(64, 64), (65, 64)]}, "multiples of 8"),
        ({"request": Request(sampler="DPM++ 4M")}, "DPM\\+\\+ 4M"),
        ({"windows": 0}, "windows 0"),
    ):
        with pytest.raises(RequestError, match=words):
            warm_up(model, **mistake)


def test_it_can_be_stopped(model: Model) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, StepDone):
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        warm_up(model, [(64, 64)], on_event=stop)


@pytest.mark.cuda
def test_on_a_device_a_request_finds_everything_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    made = clearway.load(str(folder), device="cuda")
    like = Request(count=3, batch_size=2, ngms=3.0, ngms_all_steps=True)
    notes = warm_up(made, [(64, 64), (64, 72)], request=like).notes
    assert all(" s of it were " in note for note in notes), notes  # what its time went to
    before = counts(made)
    for height in (64, 72):
        clearway.generate(replace(like, prompt="a red apple", width=64, height=height, steps=6, seed=9), made)
    assert counts(made) == before


def test_what_self_tests_and_kernels_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = warmup._waited()
    assert warmup._told(before) == []
    monkeypatch.setattr(warmup, "_waited", lambda: (before[0] + 2.34, before[1] + 36, before[2] + 4.56))
    assert warmup._told(before) == [
        "2.3 s of it were waiting for self-tests of kernels",
        "4.6 s of it were building 36 kernels",
    ]
