"""The whole flow on tiny models of the real classes with random weights."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearway
from builders import tiny_sd1, tiny_sdxl
from clearway import (
    Cancelled,
    PicturesDone,
    Request,
    RequestError,
    StageDone,
    StepDone,
    UnavailableError,
    pipeline,
)
from clearway.execution import Eager
from clearway.models import Model, chosen
from clearway.models.accelerate import accelerate, restore
from clearway.ops import state
from clearway.types import Choices
from never_waits import never_waits

SMALL = Request(prompt="a red apple", width=64, height=72, steps=3, sampler="Euler a", seed=7, cfg_scale=4.0)


@pytest.fixture(scope="module")
def sd1(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return clearway.load(str(tiny_sd1(tmp_path_factory.mktemp("sd1"))), device="cpu")


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return clearway.load(str(tiny_sdxl(tmp_path_factory.mktemp("sdxl"))), device="cpu")


def change(**fields: object) -> Request:
    return dataclasses.replace(SMALL, **fields)


class Rows:
    """Counts the rows that reach a UNet."""

    def __init__(self, model: Model) -> None:
        self.rows: list[int] = []
        self.hook = model.unet.register_forward_pre_hook(lambda _, args: self.rows.append(args[0].shape[0]))

    def __enter__(self) -> list[int]:
        return self.rows

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def test_a_result_says_everything(sd1: Model) -> None:
    result = clearway.generate(change(count=2), sd1)
    assert result.images.shape == (2, 72, 64, 3) and result.images.dtype == np.uint8
    assert result.seeds == (7, 8)
    parts = {name: count for name, count in result.routes.items() if name.endswith("/flat")}
    assert parts == {"text_encoder/flat": 2, "unet/flat": 3, "vae/flat": 2}
    assert result.routes.keys() - parts.keys() <= {"attention/native"}  # where this CPU prefers it
    assert set(result.timings_ms) == {"prompt", "text", "schedule", "noise", "sampling", "vae"}
    assert result.images.std() > 1
    assert "Seed: 8" in result.infotexts[1] and "Steps: 3, Sampler: Euler a" in result.infotexts[0]
    assert f"Version: Clearway {clearway.__version__}" in result.infotexts[0]
    assert [image.size for image in result.pillow()] == [(64, 72), (64, 72)]


@pytest.mark.parametrize("sampler", ["Euler", "Euler a", "Heun", "DPM++ 2M", "DPM++ SDE", "DDIM"])
def test_the_same_request_gives_the_same_bytes(sd1: Model, sampler: str) -> None:
    first, second = (clearway.generate(change(sampler=sampler), sd1) for _ in range(2))
    assert np.array_equal(first.images, second.images)
    assert first.infotexts == second.infotexts
    assert not np.array_equal(first.images, clearway.generate(change(sampler=sampler, seed=8), sd1).images)


@pytest.mark.parametrize("sampler", ["Euler a", "DPM++ SDE"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_pictures_of_a_batch_are_their_singles(sd1: Model, sampler: str, size: int) -> None:
    together = clearway.generate(change(sampler=sampler, count=3, batch_size=size), sd1)
    singles = [clearway.generate(change(sampler=sampler, seed=seed), sd1).images[0] for seed in (7, 8, 9)]
    apart = np.abs(together.images.astype(int) - np.stack(singles).astype(int))
    assert apart.max() <= 1
    if size == 1:
        assert apart.max() == 0


def test_exact_batch_is_singles_to_the_bit(sd1: Model) -> None:
    together = clearway.generate(change(count=3, exact_batch=True), sd1)
    single = clearway.generate(change(seed=9), sd1)
    assert np.array_equal(together.images[2], single.images[0])


def test_infotext_repeats_a_picture(sd1: Model) -> None:
    request = change(
        prompt='a (red:1.3) apple, "quoted"\nsecond line', negative_prompt="blur, noise", count=2, ngms=2.0,
        ngms_all_steps=True, clip_skip=2, eta=0.7, sigma_max=9.0, schedule="Karras",
    )  # fmt: skip
    first = clearway.generate(dataclasses.replace(request, batch_size=1), sd1)
    again = clearway.generate(Request.from_infotext(first.infotexts[1]), sd1)
    assert np.array_equal(first.images[1], again.images[0])
    assert again.infotexts[0] == first.infotexts[1]


def test_guidance_runs_two_rows_and_ngms_one(sd1: Model) -> None:
    with Rows(sd1) as rows:
        plain = clearway.generate(change(steps=4), sd1)
        assert rows == [2, 2, 2, 2]
    assert "NGMS" not in plain.infotexts[0]
    with Rows(sd1) as rows:
        every_other = clearway.generate(change(steps=4, ngms=100.0), sd1)
        assert rows == [2, 1, 2, 1]
    assert "NGMS: 100" in every_other.infotexts[0] and "NGMS all steps" not in every_other.infotexts[0]
    with Rows(sd1) as rows:
        all_steps = clearway.generate(change(steps=4, ngms=100.0, ngms_all_steps=True), sd1)
        assert rows == [1, 1, 1, 1]
    assert "NGMS all steps: True" in all_steps.infotexts[0]
    with Rows(sd1) as rows:
        unused = clearway.generate(change(steps=4, ngms=1e-9), sd1)
        assert rows == [2, 2, 2, 2]
    assert "NGMS" not in unused.infotexts[0]
    assert np.array_equal(unused.images, plain.images)


@pytest.mark.parametrize(
    ("asked", "label", "eta"),
    [
        ("k_euler_a", "Euler a", "Eta: 0.5"),
        ("EULER A", "Euler a", "Eta: 0.5"),
        ("ddim", "DDIM", "Eta DDIM: 0.5"),
    ],
)
def test_pictures_carry_the_samplers_own_name(sd1: Model, asked: str, label: str, eta: str) -> None:
    result = clearway.generate(change(sampler=asked, eta=0.5, steps=2), sd1)
    assert f"Sampler: {label}, " in result.infotexts[0] and f"{eta}, " in result.infotexts[0]
    assert result.request.sampler == label


def test_a_schedule_behind_the_samplers_name_is_the_schedule(sd1: Model) -> None:
    result = clearway.generate(change(sampler="dpm++ 2m karras"), sd1)
    assert "Sampler: DPM++ 2M, Schedule type: Karras" in result.infotexts[0]


def test_a_card_that_names_what_does_not_exist_is_named(sd1: Model) -> None:
    odd = dataclasses.replace(sd1, defaults=dataclasses.replace(sd1.defaults, sampler="DPM++ 4M"))
    with pytest.raises(RequestError, match=r"the defaults of model '.*' do not fit: sampler 'DPM\+\+ 4M'"):
        clearway.generate(Request(prompt="x", width=32, height=32), odd)
    with pytest.raises(RequestError, match=r"^sampler 'DPM"):
        clearway.generate(Request(prompt="x", sampler="DPM++ 5M"), sd1)


def test_cfg_zero_is_the_negative_prompt_alone(sd1: Model) -> None:
    """denoised = uncond + 0 * (cond - uncond), so the prompt has no say."""
    first = clearway.generate(change(cfg_scale=0.0), sd1)
    other = clearway.generate(change(cfg_scale=0.0, prompt="something else"), sd1)
    assert np.array_equal(first.images, other.images)
    assert not np.array_equal(first.images, clearway.generate(change(cfg_scale=1.0), sd1).images)


def test_second_order_samplers_call_twice_a_step_but_the_last(sd1: Model) -> None:
    with Rows(sd1) as rows:
        clearway.generate(change(sampler="Heun", cfg_scale=1.0, steps=4), sd1)
    assert len(rows) == 7


def test_texts_of_different_lengths_run_one_after_the_other(sd1: Model) -> None:
    with Rows(sd1) as rows:
        clearway.generate(change(prompt="apple " * 80), sd1)
    assert rows == [1] * 6


def test_emphasis_and_negative_words_change_the_picture(sd1: Model) -> None:
    plain = clearway.generate(SMALL, sd1).images
    assert not np.array_equal(plain, clearway.generate(change(prompt="a (red:1.4) apple"), sd1).images)
    assert not np.array_equal(plain, clearway.generate(change(negative_prompt="green"), sd1).images)
    assert np.array_equal(plain, clearway.generate(change(prompt="a (red:1.0) apple"), sd1).images)


def test_events_arrive_in_order_and_pictures_as_they_are_done(sd1: Model) -> None:
    events: list[object] = []
    result = clearway.generate(change(count=3, batch_size=2), sd1, events.append)
    steps = [(event.group, event.step) for event in events if isinstance(event, StepDone)]
    assert steps == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]
    done = [event.result for event in events if isinstance(event, PicturesDone)]
    assert [part.seeds for part in done] == [(7, 8), (9,)]
    assert np.array_equal(np.concatenate([part.images for part in done]), result.images)
    names = [event.name for event in events if isinstance(event, StageDone)]
    assert names == ["prompt", "text", "schedule", *["noise", "sampling", "vae"] * 2]


def test_pictures_that_an_event_brought_are_not_the_results(sd1: Model) -> None:
    """One group too: changing either leaves the other as it was."""
    brought: list[np.ndarray] = []

    def keep(event: object) -> None:
        if isinstance(event, PicturesDone):
            brought.append(event.result.images)

    result = clearway.generate(change(steps=1), sd1, keep)
    assert len(brought) == 1 and np.array_equal(brought[0], result.images)
    assert not np.shares_memory(brought[0], result.images)


def test_cancelling_stops_after_the_step(sd1: Model) -> None:
    def stop(event: object) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            raise Cancelled("stopped")

    with Rows(sd1) as rows, pytest.raises(Cancelled):
        clearway.generate(change(steps=9), sd1, stop)
    assert len(rows) == 2


def test_want_of_memory_is_a_sentence(sd1: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore\nlines")

    monkeypatch.setattr(sd1.unet, "forward", full)
    with pytest.raises(
        UnavailableError, match="64 x 72 in a batch of 1 needs more memory than cpu has"
    ) as error:
        clearway.generate(SMALL, sd1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampler": "DPM++ 4M"},
        {"schedule": "Carras"},
        {"sampler": "DPM++ 2M", "eta": 1.0},
        {"rho": 3.0, "schedule": "Exponential"},
        {"sigma_min": 5.0, "sigma_max": 1.0},
    ],
)
def test_what_does_not_exist_is_refused_before_anything_runs(sd1: Model, fields: dict[str, object]) -> None:
    with Rows(sd1) as rows, pytest.raises(RequestError) as error:
        clearway.generate(change(**fields), sd1)
    assert rows == []
    assert "\n" not in str(error.value)


def test_sdxl_draws_and_an_empty_negative_prompt_is_zero(sdxl: Model) -> None:
    seen: list[dict] = []
    hook = sdxl.unet.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    try:
        result = clearway.generate(SMALL, sdxl)
    finally:
        hook.remove()
    assert result.images.shape == (1, 72, 64, 3)
    context, added = seen[0]["encoder_hidden_states"], seen[0]["added_cond_kwargs"]
    assert context[0].abs().sum() > 0 and context[1].abs().sum() == 0
    assert added["text_embeds"][1].abs().sum() == 0
    assert added["time_ids"].tolist() == [[72, 64, 0, 0, 72, 64]] * 2
    assert result.routes["text_encoder/flat"] == result.routes["text_encoder_2/flat"] == 2


def test_notes_say_once_what_ran_otherwise_than_chosen(sdxl: Model) -> None:
    """CUDA graphs asked for by name on a CPU: every part runs eagerly and says why."""
    model = dataclasses.replace(sdxl, choices=Choices(executor="cuda_graph"))
    result = clearway.generate(change(count=2, batch_size=1, steps=2), model)
    assert {route for route in result.routes if route.endswith("cuda_graph")} == set()
    parts = ("the UNet", "the VAE", "the text encoder", "the second text encoder")
    assert sorted(result.notes) == sorted(
        f"{part} ran eagerly: CUDA graphs are for CUDA devices, this is cpu" for part in parts
    )
    with chosen.plainly():
        plain = clearway.generate(change(count=2, batch_size=1, steps=2), sdxl)
    assert np.array_equal(result.images, plain.images) and plain.notes == ()


def test_notes_say_what_this_machine_lost_where_it_concerns_the_picture(sd1: Model) -> None:
    """Not what other work in the process lost: of ops that did not run, or in a dtype that is not used.

    geglu_linear never runs where it lost its only way: geglu does, which comes with it.
    """
    accelerate(sd1, ["geglu"], layout=None)
    state.forget()
    try:
        for op, name, dtype in (
            ("geglu", "one", torch.float64),
            ("geglu", "two", torch.float32),
            ("geglu", "three", None),
            ("geglu_linear", "four", None),
            ("rope", "five", torch.float32),
        ):
            state.disable(op, name, "the compiler says no", dtype)
        result = clearway.generate(change(steps=1), sd1)
    finally:
        state.forget()
        restore(sd1)
    assert any(route.startswith("geglu/") for route in result.routes)
    assert result.notes == (
        "geglu/two is not used in float32: the compiler says no",
        "geglu/three is not used: the compiler says no",
        "geglu_linear/four is not used: the compiler says no",
    )


def test_text_encoders_are_not_compiled(sd1: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, str] = {}

    def executor(name: str, module: Callable[..., Any], part: str, routes: Counter[str], **_: Any) -> Eager:
        made[part] = name
        return Eager(module, part, routes, name)

    monkeypatch.setattr(pipeline, "executor", executor)
    clearway.generate(change(steps=1), dataclasses.replace(sd1, choices=Choices(executor="compiled")))
    assert made == {"unet": "compiled", "vae": "compiled", "text_encoder": "eager"}


def test_the_models_hash_is_computed_beside_the_drawing(sd1: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is read through while the networks run; a failure is raised where the hash is needed."""
    from clearway.models import model as module

    drawing, threads = threading.Event(), list[threading.Thread]()

    def slow(files: Any) -> str:
        threads.append(threading.current_thread())
        assert drawing.wait(60)
        return "0123456789"

    def listen(event: Any) -> None:
        if isinstance(event, StepDone):
            drawing.set()

    monkeypatch.setattr(module, "short_hash", slow)
    fresh = dataclasses.replace(sd1)
    result = clearway.generate(change(), fresh, listen)
    assert "Model hash: 0123456789" in result.infotexts[0]
    assert threads != [threading.main_thread()] and len(threads) == 1
    monkeypatch.setattr("clearway.pipeline.Thread", None)  # once known, it needs none
    assert clearway.generate(change(), fresh).infotexts == result.infotexts and len(threads) == 1
    monkeypatch.undo()
    monkeypatch.setattr(module, "short_hash", lambda _: (_ for _ in ()).throw(FileNotFoundError("gone")))
    with pytest.raises(FileNotFoundError, match="gone"):
        clearway.generate(change(), dataclasses.replace(sd1))


def test_a_model_can_be_named(tmp_path: Path) -> None:
    folder = tiny_sd1(tmp_path)
    assert clearway.generate(change(width=32, height=32, steps=1), str(folder)).images.shape == (1, 32, 32, 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of their own, about numpy
def test_pictures_agree_with_diffusers(sd1: Model) -> None:
    """The same noise, sigmas and conditionings through Diffusers' own pipeline and its Euler."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline
    from transformers import CLIPTokenizer

    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", use_karras_sigmas=True,
        timestep_spacing="linspace",
        steps_offset=1,
    )  # fmt: skip
    pipe = StableDiffusionPipeline(
        vae=sd1.vae,
        text_encoder=sd1.text_encoders[0],
        tokenizer=CLIPTokenizer.from_pretrained(Path(sd1.path) / "tokenizer"),
        unet=sd1.unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    request = change(sampler="Euler", schedule="Karras", steps=6, negative_prompt="green")
    noise = torch.randn(1, 4, 9, 8, generator=torch.Generator().manual_seed(request.seed))
    theirs = pipe(
        request.prompt, negative_prompt="green", height=72, width=64, num_inference_steps=6,
        guidance_scale=4.0, latents=noise, output_type="np",
    ).images[0]  # fmt: skip
    ours = clearway.generate(request, sd1).images[0]
    assert np.abs(ours.astype(float) - np.floor(theirs * 255)).max() <= 1


class Waits(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what would make the host wait for a device: scalar reads, and copies to the host."""

    watches = True  # changes nothing: networks run as they would without it

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampler", ["Euler", "Euler a", "Heun", "DPM++ 2M", "DPM++ SDE", "DDIM"])
def test_the_loop_never_waits_for_the_device(
    sd1: Model, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    waits = Waits()
    calls: list[str] = []

    def forbidden(name: str):
        original = getattr(torch.Tensor, name)

        def method(tensor, *args, **kwargs):
            calls.append(name)
            return original(tensor, *args, **kwargs)

        return method

    inner = pipeline.sampling.sample

    def sample(name, denoise, x, sigmas, **options):
        sigmas = sigmas.tolist()  # reading the schedule itself, once and on the CPU, is allowed
        with monkeypatch.context() as patch, waits:
            for method in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
                patch.setattr(torch.Tensor, method, forbidden(method))
            patch.setattr(pipeline.machine, "synchronize", lambda _: calls.append("synchronize"))
            return inner(name, denoise, x, torch.tensor(sigmas), **options)

    monkeypatch.setattr(pipeline.sampling, "sample", sample)
    monkeypatch.setenv("CLEARWAY_PLAIN", "1")  # a recorded call is compared once, on the CPU
    clearway.generate(change(sampler=sampler, steps=2, ngms=2.0), sd1)
    before_the_loop = len(calls)
    clearway.generate(change(sampler=sampler, steps=7, count=2, ngms=2.0), sd1)
    # the schedule on the CPU is read before the first step, however many steps there are; nothing else is
    assert set(calls) <= {"tolist"} and len(calls) == 2 * before_the_loop
    assert waits.found == []


@pytest.mark.cuda
@pytest.mark.parametrize("sampler", ["Euler", "Euler a", "Heun", "DPM++ 2M", "DPM++ SDE", "DDIM"])
def test_on_a_device_nothing_waits_from_the_words_to_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = clearway.load(str(tiny_sd1(tmp_path)), device="cuda")
    wanted = change(sampler=sampler, ngms=2.0, prompt="a (red:1.2) apple", steps=5)
    clearway.generate(wanted, model)  # captures, tests and tunes what there is
    encode, sample = pipeline.encode, pipeline.sampling.sample

    def watched(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with never_waits():
                return inner(*args, **kwargs)

        return call

    monkeypatch.setattr(pipeline, "encode", watched(encode))
    monkeypatch.setattr(pipeline.sampling, "sample", watched(sample))
    result = clearway.generate(dataclasses.replace(wanted, seed=8), model)
    assert set(result.timings_ms) == {"prompt", "text", "schedule", "noise", "sampling", "vae"}


@chosen.plainly()  # a recording samples the memory for itself
def test_a_memory_budget_that_decided_is_written_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the budget refused an implementation the picture carries it; elsewhere it does not."""
    from clearway.ops import budget

    request = clearway.Request(prompt="a red apple", steps=2, width=64, height=64, seed=1)
    assert "Memory budget" not in clearway.generate(request, "embedded").infotexts[0]
    seen: list[budget.Sample] = []

    def watched(*args: object, **kwargs: object) -> budget.Sample:
        seen.append(sample(*args, **kwargs))
        seen[-1].admits(1e15)
        return seen[-1]

    sample = budget.sample
    monkeypatch.setattr(budget, "sample", watched)
    result = clearway.generate(request, "embedded")
    assert len(seen) == 1  # once a generation
    assert f"Memory budget: {int(seen[0].limit_bytes)}" in result.infotexts[0]
    again = clearway.Request.from_infotext(result.infotexts[0])
    clearway.generate(again, "embedded")
    assert seen[1].pinned and seen[1].limit_bytes == int(seen[0].limit_bytes)


@pytest.mark.parametrize(
    ("request_", "model", "message"),
    [
        ("a red apple", "embedded", r"a Request was to be drawn and str was given"),
        (Request(prompt="x"), object(), r"object was given; clearway.accelerate takes a Diffusers"),
        (Request(prompt="x"), None, r"a model is a path, a name or a hub id"),
    ],
)
def test_arguments_of_another_kind_are_one_sentence(request_: Any, model: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        clearway.generate(request_, model)
