"""What was chosen is found again on the machine, source and size it was chosen with, and nowhere else."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from builders import tiny_sd1
from clearway import home
from clearway.errors import UnavailableError
from clearway.models import Model, chosen, load
from clearway.models.accelerate import OPS, accelerate, apply, restore
from clearway.ops import state
from clearway.pipeline import generate
from clearway.request import Request
from clearway.types import Choices, Precision

FAST = Choices(layout="channels_last", ops=("geglu",), rows="separate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd1(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    return load(str(folder), device="cpu")


def stored(model: Model, choices: Choices = FAST, **more: object) -> None:
    assert chosen.store(model, 64, 64, {"choices": asdict(choices), **more})


def test_a_selection_comes_back_for_its_size_class(model: Model) -> None:
    stored(model, batch_size=2, evidence=[{"name": "x"}])
    found = chosen.find(model, 64, 64)
    assert found is not None and found["evidence"] == [{"name": "x"}]
    assert chosen.choices_from(found["choices"]) == FAST
    assert chosen.find(model, 72, 64) == found
    assert chosen.find(model, 128, 64) is None


@pytest.mark.parametrize("change", ["torch", "driver", "device", "sources", "diffusers"])
def test_a_change_of_the_machine_or_a_source_ends_it(
    model: Model, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    now = "cuda, torch 2.13.0, NVIDIA H200, driver 580.1, triton 3.5"
    monkeypatch.setattr(state, "identity", lambda kind: now)
    stored(model)
    assert chosen.find(model, 64, 64)
    after = {
        "torch": now.replace("2.13.0", "2.14.0"),
        "driver": now.replace("580.1", "581.0"),
        "device": now.replace("H200", "L4"),
    }.get(change, now)
    monkeypatch.setattr(state, "identity", lambda kind: after)
    if change == "sources":
        monkeypatch.setattr(chosen, "sources", lambda: "a kernel was changed")
    if change == "diffusers":
        monkeypatch.setattr(chosen, "diffusers", lambda: "0.99")
    assert chosen.find(model, 64, 64) is None
    ((_, differs),) = chosen.outdated(model, 64, 64)
    assert len(differs) == 1 and " was " in differs[0]


def test_another_dtype_or_other_shapes_are_another_model(model: Model) -> None:
    stored(model)
    assert chosen.find(replace(model, precision=Precision(vae="bfloat16")), 64, 64) is None
    assert chosen.find(replace(model, unet=model.vae), 64, 64) is None


def test_the_sources_are_those_that_decide_how_networks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ops/softmax.metal", "execution/eager.py", "models/accelerate.py", "models/_attention.py"):
        assert (chosen.PACKAGE / name).is_file()
        assert any((chosen.PACKAGE / name).match(pattern) for pattern in chosen.SOURCES)
    (tmp_path / "ops").mkdir()
    kernel = tmp_path / "ops" / "softmax.metal"
    kernel.write_text("one")
    monkeypatch.setattr(chosen, "PACKAGE", tmp_path)
    before = chosen.sources.__wrapped__()
    kernel.write_text("two")
    assert chosen.sources.__wrapped__() != before


@pytest.mark.parametrize("choices", [None, 3, {"executor": "eager", "magic": 1}, {"routes": [1]}])
def test_a_file_that_holds_no_choices_is_ignored(model: Model, choices: object) -> None:
    chosen.store(model, 64, 64, {"choices": choices})
    assert chosen.find(model, 64, 64) is None
    assert chosen.applied(model, 64, 64) is model


def test_choices_are_applied_by_size_and_taken_away_again(model: Model) -> None:
    assert chosen.applied(model, 64, 64) is model
    stored(model)
    fast = chosen.applied(model, 64, 64)
    assert fast.choices == FAST
    weight = model.unet.conv_in.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert chosen.applied(fast, 64, 64) is fast
    assert chosen.applied(fast, 256, 256).choices == Choices()
    assert weight.is_contiguous()
    assert chosen.applied(model, 64, 64).choices == FAST  # the first object shares the modules


@pytest.fixture
def fast_device(monkeypatch: pytest.MonkeyPatch) -> Choices:
    """The CPU has CUDA's default."""
    monkeypatch.setitem(chosen.DEFAULTS, "cpu", chosen.DEFAULTS["cuda"])
    return chosen.default("cpu")


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, on which these models are, runs plainly where a test does not say otherwise."""
    monkeypatch.delitem(chosen.DEFAULTS, "cpu")


def laid_out(model: Model) -> bool:
    return model.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


def test_the_default_of_a_device_is_all_that_is_exact() -> None:
    found = chosen.default("cuda")
    assert (found.executor, found.layout) == ("cuda_graph", "channels_last") and set(found.ops) >= set(OPS)
    assert chosen.default("mps") == Choices()
    exactly = Choices("cuda_graph", "channels_last", ops=OPS, packed_qkv=True)
    assert chosen.described(exactly) == f"by cuda_graph, channels_last, {len(OPS)} ops in place, packed QKV"
    assert chosen.described(Choices()) == "plainly"


def test_on_a_cpu_calls_are_recorded(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert chosen.default("cpu") == Choices("flat") and chosen.described(Choices("flat")) == "by flat"
    assert chosen.applied(model, 64, 64).choices == Choices("flat")
    assert not laid_out(model)


def test_a_devices_default_holds_where_nothing_was_selected(model: Model, fast_device: Choices) -> None:
    fast = chosen.applied(model, 64, 64)
    assert fast.choices == fast_device and laid_out(model)
    stored(model, Choices(rows="separate"))
    assert chosen.applied(model, 64, 64).choices == Choices(rows="separate") and not laid_out(model)
    assert chosen.applied(model, 256, 256).choices == fast_device and laid_out(model)
    restore(model)
    assert not laid_out(model) and chosen.MARK not in vars(model.unet)


def test_a_selection_that_was_cut_short_does_not_take_the_default_away(
    model: Model, fast_device: Choices
) -> None:
    stored(model, Choices(), outcome={"complete": False})
    assert chosen.applied(model, 64, 64).choices == fast_device
    stored(model, Choices(), outcome={"complete": True})
    assert chosen.applied(model, 64, 64).choices == Choices()


@pytest.mark.parametrize("how", ["environment", "context", "aside", "named"])
def test_the_default_can_be_turned_off(
    model: Model, fast_device: Choices, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = replace(model, choices=Choices(rows="separate"))
    if how == "environment":
        monkeypatch.setenv(chosen.PLAIN, "1")
        assert chosen.applied(model, 64, 64) is model and chosen.default("cpu") == Choices()
        monkeypatch.setenv(chosen.PLAIN, "0")
        assert chosen.applied(model, 64, 64).choices == fast_device
        monkeypatch.setenv(chosen.PLAIN, "1")  # what is in place by now goes
        assert chosen.applied(model, 64, 64).choices == Choices() and not laid_out(model)
    elif how == "context":
        stored(model)
        with chosen.plainly():
            assert chosen.applied(model, 64, 64) is model
            assert chosen.tuned(model, 64, 64) is None
        with chosen.plainly(False):
            assert chosen.applied(model, 64, 64).choices == FAST
    elif how == "aside":
        with chosen.set_aside():
            assert chosen.applied(model, 64, 64) is model
    else:
        assert chosen.applied(named, 64, 64) is named
    if how in ("aside", "named"):
        assert not laid_out(model)


def test_ops_that_were_put_in_place_by_hand_stay(model: Model, fast_device: Choices) -> None:
    accelerate(model, ["geglu"], layout=None)
    held = chosen.applied(model, 64, 64)
    assert held.choices == Choices(executor="cuda_graph") and not laid_out(model)
    restore(model)
    assert chosen.applied(model, 64, 64).choices == fast_device


def test_pictures_by_the_default_are_the_plain_ones(model: Model, fast_device: Choices) -> None:
    request = Request(prompt="x", width=64, height=64, steps=2, seed=1, count=2)
    fast = generate(request, model)
    assert fast.choices == fast_device
    assert fast.routes["geglu/reference"] > 0 and fast.routes["unet/eager"] > 0
    assert any("ran eagerly: CUDA graphs are for CUDA devices" in note for note in fast.notes)
    with chosen.plainly():
        plain = generate(request, model)
    assert plain.choices == Choices() and "geglu/reference" not in plain.routes and plain.notes == ()
    assert abs(fast.images.astype(int) - plain.images.astype(int)).max() <= 1


@pytest.mark.cuda
def test_on_a_device_the_default_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    made = load(str(folder), device="cuda")
    request = Request(prompt="x", width=64, height=64, steps=4, seed=1)
    fast = generate(request, made)
    assert fast.routes["unet/cuda_graph"] == 4 and fast.routes["vae/cuda_graph"] == 1
    assert fast.routes["text_encoder/cuda_graph"] == 2 and fast.notes == ()
    with chosen.plainly():
        plain = generate(request, made)
    assert plain.routes["unet/eager"] == 4
    apart = fast.images.astype(float) - plain.images.astype(float)
    assert 10 * math.log10(255**2 / max((apart**2).mean(), 1e-9)) >= 40


def test_what_was_undone_by_hand_is_put_in_place_again(model: Model) -> None:
    stored(model)
    chosen.applied(model, 64, 64)
    restore(model)
    assert chosen.applied(model, 64, 64).choices == FAST
    assert model.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    apply(model, Choices())
    assert chosen.applied(model, 64, 64).choices == FAST
    assert model.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


def test_weights_are_laid_out_as_by_load_even_within_a_generation(model: Model) -> None:
    stored(model)
    with torch.inference_mode():
        chosen.applied(model, 64, 64)
    assert not any(weight.data.is_inference() for weight in model.unet.parameters())


def test_what_a_caller_named_and_what_is_measured_is_left_alone(model: Model) -> None:
    stored(model)
    named = replace(model, choices=Choices(rows="separate"))
    assert chosen.applied(named, 64, 64) is named
    with chosen.set_aside():
        assert chosen.applied(model, 64, 64) is model


def test_the_batch_size_fills_in_what_is_open(model: Model) -> None:
    stored(model, batch_size=2)
    request = Request(count=4, width=64, height=64)
    assert chosen.filled(request, model).batch_size == 2
    assert chosen.filled(replace(request, batch_size=3), model).batch_size == 3
    assert chosen.filled(replace(request, exact_batch=True), model).batch_size is None
    assert chosen.filled(replace(request, count=1), model).batch_size is None
    assert chosen.filled(replace(request, width=256, height=256), model).batch_size is None


def test_what_is_adopted_adds_up_and_ends_with_the_machine(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen.adopted(model.path, "cpu") == chosen.Adopted()
    chosen.adopt(model, "VAE in bfloat16", {"vae": "bfloat16"}, {})
    chosen.adopt(model, "NGMS 3", None, {"ngms": 3.0})
    found = chosen.adopted(model.path, "cpu")
    assert found.precision == Precision(vae="bfloat16") and found.request == {"ngms": 3.0}
    assert found.names == ("VAE in bfloat16", "NGMS 3")
    assert chosen.adopted(model.path, "cuda") == chosen.Adopted()
    with chosen.set_aside():
        assert chosen.adopted(model.path, "cpu") == chosen.Adopted()
    with monkeypatch.context() as patch:
        patch.setattr(chosen, "sources", lambda: "a kernel was changed")
        assert chosen.adopted(model.path, "cpu") == chosen.Adopted()
    assert chosen.abandon(model) == ("VAE in bfloat16", "NGMS 3")
    assert chosen.abandon(model) == ()
    assert chosen.adopted(model.path, "cpu") == chosen.Adopted()


def test_what_decides_the_same_replaces_what_was_adopted(model: Model) -> None:
    other = {"steps": 24, "sampler": "DPM++ 2M", "schedule": "Karras"}
    chosen.adopt(model, "VAE in bfloat16", {"vae": "bfloat16"}, {})
    chosen.adopt(model, "DPM++ 2M Karras, 24 steps", {}, other)
    chosen.adopt(model, "NGMS 3", {}, {"ngms": 3.0})
    chosen.adopt(model, "12 steps", {}, {"steps": 12})
    chosen.adopt(model, "VAE in float16", {"vae": "float16"}, {})
    found = chosen.adopted(model.path, "cpu")
    assert found.names == ("NGMS 3", "12 steps", "VAE in float16")
    assert found.request == {"ngms": 3.0, "steps": 12} and found.precision == Precision(vae="float16")


def test_ops_take_the_routes_that_the_selection_was_measured_with(model: Model) -> None:
    state.store_tuned("cpu", {"geglu": {"k": "another selection's"}})
    plain = Choices(ops=("geglu",))
    assert chosen.tuned(model, 64, 64) is None
    stored(model, plain, tuned={})
    assert chosen.tuned(model, 64, 64) is None  # it is not applied
    fast = chosen.applied(model, 64, 64)
    assert chosen.tuned(fast, 64, 64) == {}
    stored(model, plain, tuned={"geglu": {"k": "reference"}})
    assert chosen.tuned(fast, 64, 64) == {"geglu": {"k": "reference"}}
    with chosen.set_aside():
        assert chosen.tuned(fast, 64, 64) is None
    stored(model, plain, tuned=[1])
    assert chosen.find(model, 64, 64) is None


def test_a_generation_runs_within_them(model: Model) -> None:
    seen = []
    choices = Choices(ops=("geglu",))
    stored(model, choices, tuned={"geglu": {"k": "reference"}})
    request = Request(prompt="x", width=64, height=64, steps=1, seed=1)
    generate(request, model, lambda event: seen.append(state.tuned("geglu", "cpu")))
    assert seen and seen[-1] == {"k": "reference"}


def test_forgetting_deletes_the_file(model: Model) -> None:
    stored(model)
    assert chosen.forget(model, 64, 64) is True
    assert chosen.forget(model, 64, 64) is False
    assert not list(home.path(chosen.FOLDER).glob("*.json"))


def test_what_cannot_be_taken_back_is_said(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(model)
    chosen.adopt(model, "NGMS 3", None, {"ngms": 3.0})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError("read-only")))
        patch.setattr(home, "write_json", lambda *_: False)
        with pytest.raises(UnavailableError, match="could not be deleted"):
            chosen.forget(model, 64, 64)
        with pytest.raises(UnavailableError, match="stays in use"):
            chosen.abandon(model)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "file"))
    assert chosen.forget(model, 64, 64) is False and chosen.abandon(model) == ()


def test_choices_are_not_swapped_under_a_generation(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads draw with one model at sizes for which different things were chosen."""
    sizes = {64: Choices(ops=("geglu",)), 96: Choices(layout="channels_last", ops=("layer_norm",))}
    monkeypatch.setattr(
        chosen, "_selected", lambda model, width, height: {"choices": asdict(sizes[width]), "width": width}
    )
    inside, most, wrong = Counter[int](), Counter[int](), []
    barrier = threading.Barrier(4)

    def work(width: int) -> None:
        barrier.wait()
        for _ in range(5):
            with chosen.in_use(model, width, width) as run, chosen.in_use(model, width, width):
                inside[width] += 1
                most[width] = max(most[width], inside[width])
                for _ in range(20):
                    time.sleep(0.0005)
                    if vars(model.unet)[chosen.MARK] != sizes[width] or run.choices != sizes[width]:
                        wrong.append(width)
                inside[width] -= 1

    threads = [threading.Thread(target=work, args=(width,)) for width in (64, 96, 64, 96)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    with chosen.in_use(model, 64, 64), chosen.in_use(model, 96, 96) as nested:  # one's own are no hindrance
        assert nested.choices == sizes[96]


def test_what_needs_no_change_does_not_wait(model: Model) -> None:
    began = threading.Event()
    with chosen.in_use(model, 64, 64):

        def work() -> None:
            with chosen.in_use(model, 64, 64):
                began.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert began.wait(60)
    thread.join()
