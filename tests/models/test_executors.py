"""Executors in a user's own Diffusers pipelines: the same picture, nothing stale, nothing left behind."""

import copy
import inspect
import itertools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clearway.errors import RequestError
from clearway.models import load
from clearway.models._bound import Bound
from clearway.models._report import Report
from clearway.models.accelerate import accelerate, restore
from fake_capture import Recorder, replaying
from pipelines import KINDS, draw, image_adapter, lora, pipeline

# numpy's, of how Diffusers' schedulers make an array of tensors
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
NETWORKS = ("unet", "vae", "text_encoder", "text_encoder_2", "controlnet")


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a stand-in for CUDA's."""
    monkeypatch.setattr(sys.modules["clearway.execution.executor"], "TorchCapture", Recorder)


@pytest.fixture(scope="module")
def sd1(folders: dict[str, Path]) -> tuple[Any, dict[str, Any]]:
    return pipeline(folders, "text2img")


@pytest.fixture
def pipe(sd1: tuple[Any, dict[str, Any]]) -> Any:
    """A pipeline of this test's own."""
    return copy.deepcopy(sd1[0])


@pytest.fixture
def given(sd1: tuple[Any, dict[str, Any]]) -> dict[str, Any]:
    return dict(sd1[1])


def close(found: np.ndarray, expected: np.ndarray) -> None:
    """Within what float32 leaves between two orders of the same sums, over a whole generation."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)


def attributes(pipe: Any) -> list[Any]:
    parts = [(name, pipe.components.get(name)) for name in NETWORKS]
    return [
        (name, module_name, sorted(key for key in vars(module) if not key.startswith("_output_capturing")))
        for name, part in parts
        if part is not None
        for module_name, module in part.named_modules()
    ]


def agrees_with_eager(pipe: Any, given: dict[str, Any], **how: Any) -> np.ndarray:
    """The accelerated pipeline draws what it draws restored; gives the picture."""
    found = draw(pipe, given, **how)
    twin = copy.deepcopy(pipe)
    restore(twin)
    close(found, draw(twin, given, **how))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_draws_the_same_and_is_as_it_was(folders: dict[str, Path], kind: str) -> None:
    pipe, given = pipeline(folders, kind)
    expected, before = draw(pipe, given), attributes(pipe)
    report = accelerate(pipe, executor="cuda_graph")
    for _ in range(2):
        close(draw(pipe, given), expected)
    parts = {"unet", "vae.decoder", "text_encoder"}
    parts |= {"text_encoder_2"} if kind == "sdxl" else set()
    parts |= {"controlnet"} if kind == "controlnet" else set()
    parts |= {"controlnet.0", "controlnet.1"} if kind == "two controlnets" else set()
    assert set(report.placed["cuda_graph"]) == set(report.ran) == parts
    assert not report.reasons() and not report.left
    for part, ran in report.ran.items():
        assert ran.calls.keys() == {f"{part}/cuda_graph"}
        assert f"{part} ran {ran.calls.total()} times by cuda_graph" in str(report)
    restore(pipe)
    assert (draw(pipe, given) == expected).all()
    assert attributes(pipe) == before


def test_nothing_is_stale_whatever_changes_between_generations(pipe: Any, given: dict[str, Any]) -> None:
    accelerate(pipe, executor="cuda_graph")
    pictures = [agrees_with_eager(pipe, given)]

    def changed(**other: Any) -> None:
        found = agrees_with_eager(pipe, {**given, **other})
        assert not any(found.shape == one.shape and np.allclose(found, one, atol=1e-3) for one in pictures)
        pictures.append(found)

    changed(prompt_embeds=torch.randn(1, 154, 32), negative_prompt_embeds=torch.randn(1, 154, 32))
    changed(height=128)
    changed(guidance_scale=1.0)
    changed(num_inference_steps=3)
    pipe.enable_freeu(0.9, 0.2, 1.2, 1.4)
    changed()
    pipe.disable_freeu()
    with torch.no_grad():
        pipe.unet.conv_in.weight.mul_(1.5)  # in place
    changed()
    pipe.unet.conv_in.weight.data = pipe.unet.conv_in.weight.data / 1.2  # elsewhere
    changed()
    pipe.vae.decoder.conv_in.weight.data.mul_(1.3)
    changed()
    for part in (pipe.unet, pipe.vae):
        for module in part.modules():
            if isinstance(module, nn.Conv2d):
                module.padding_mode = "circular"
        changed()
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 4, 32
    pipe.vae.enable_tiling()
    changed()


def test_another_processor_or_an_adapter_is_captured_anew(pipe: Any, given: dict[str, Any]) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    class Louder(AttnProcessor):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().__call__(*args, **kwargs)

    accelerate(pipe, executor="cuda_graph")
    first = draw(pipe, given)
    pipe.unet.set_attn_processor(Louder())
    second = agrees_with_eager(pipe, given)
    assert np.abs(second - first).max() > 1e-3
    report = accelerate(pipe, executor="cuda_graph")
    assert "its processor is Louder" in str(report)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", ["processor", "forward"])
def test_code_of_others_runs_at_every_call(pipe: Any, given: dict[str, Any], what: str, late: bool) -> None:
    """Some counts its calls: what edits attention for the first steps alone, or reuses steps."""
    from diffusers.models.attention_processor import AttnProcessor2_0

    calls: list[int] = []

    class Early(AttnProcessor2_0):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.extend([] if replaying() else [1])
            return super().__call__(*args, **kwargs) * (2 if len(calls) < 3 else 1)

    def put() -> None:
        if what == "processor":
            attention = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1
            attention.set_processor(Early())
            return
        resnet = pipe.unet.mid_block.resnets[0]
        theirs = resnet.forward

        def early(*args: Any) -> Any:
            calls.extend([] if replaying() else [1])
            return theirs(*args) * (2 if len(calls) < 3 else 1)

        resnet.forward = early

    given |= {"num_inference_steps": 4}
    if not late:
        put()
    report = accelerate(pipe, executor="cuda_graph")
    if late:
        draw(pipe, given)
        put()
    calls.clear()
    found = draw(pipe, given)
    assert len(calls) == 4 and "is somebody's own code" in str(report)
    calls.clear()
    restore(pipe)
    close(found, draw(pipe, given))


@pytest.mark.parametrize("late", [False, True])
def test_an_image_adapter_loaded_before_or_after(pipe: Any, given: dict[str, Any], late: bool) -> None:
    embeds = torch.randn(2, 1, 24)
    report = Report()
    if late:
        accelerate(pipe, executor="cuda_graph")
        draw(pipe, given)
    pipe.load_ip_adapter(
        image_adapter(pipe.unet, 24, 1),
        subfolder="",
        weight_name="",
        image_encoder_folder=None,
        low_cpu_mem_usage=False,
    )
    if not late:
        report = accelerate(pipe, executor="cuda_graph")
        assert "its processor is IPAdapterAttnProcessor2_0: 11 in unet" in str(report)
    given |= {"ip_adapter_image_embeds": [embeds]}
    drawn = [agrees_with_eager(pipe, given)]
    pipe.set_ip_adapter_scale(0.2)
    drawn.append(agrees_with_eager(pipe, given))
    given["ip_adapter_image_embeds"] = [-embeds]
    drawn.append(agrees_with_eager(pipe, given))
    pipe.unload_ip_adapter()
    del given["ip_adapter_image_embeds"]
    drawn.append(agrees_with_eager(pipe, given))
    assert all(np.abs(one - other).max() > 1e-3 for one, other in itertools.combinations(drawn, 2))
    assert not report.reasons()


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_adapters_come_and_go(pipe: Any, given: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    report = accelerate(pipe, executor="cuda_graph")
    plain = agrees_with_eager(pipe, given)
    drawn = [plain]

    def changed(**other: Any) -> None:
        drawn.append(agrees_with_eager(pipe, {**given, **other}))
        assert np.abs(drawn[-1] - drawn[-2]).max() > 1e-3

    for seed, name in enumerate(("one", "two")):
        pipe.load_lora_weights(lora(pipe.unet if not seed else bare(pipe), seed), adapter_name=name)
        changed()
    pipe.set_adapters(["one"], [0.5])
    changed()
    pipe.set_adapters(["one", "two"], [0.3, 0.7])
    changed()
    changed(cross_attention_kwargs={"scale": 0.6})
    changed(cross_attention_kwargs={"scale": 0.2})
    changed()
    pipe.disable_lora()
    changed()
    np.testing.assert_allclose(drawn[-1], plain, atol=5e-5)
    pipe.enable_lora()
    changed()
    pipe.fuse_lora()
    close(agrees_with_eager(pipe, given), drawn[-1])
    pipe.unfuse_lora()
    close(agrees_with_eager(pipe, given), drawn[-1])
    pipe.fuse_lora(adapter_names=["one"])
    pipe.unload_lora_weights()  # stays merged
    changed()
    assert not report.reasons()
    restore(pipe)
    draw(pipe, given)
    assert not any("_clearway" in key for module in pipe.unet.modules() for key in vars(module))


def bare(pipe: Any) -> Any:
    """A UNet without adapters, for its names."""
    return type(pipe.unet).from_config(pipe.unet.config)


def test_a_pickled_or_copied_pipeline_starts_without_graphs(
    pipe: Any, given: dict[str, Any], tmp_path: Path
) -> None:
    accelerate(pipe, executor="cuda_graph")
    expected = draw(pipe, given)
    for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert not vars(twin.unet)["_clearway_built"].held
        assert twin.unet.forward.args[0] is twin.unet and twin.vae.decoder.forward.args[1] is twin.vae
        close(draw(twin, given), expected)
        assert vars(twin.unet)["_clearway_built"].held
        restore(twin)
        close(draw(twin, given), expected)
    pipe.save_pretrained(tmp_path)
    again = type(pipe).from_pretrained(tmp_path, low_cpu_mem_usage=False)
    again.set_progress_bar_config(disable=True)
    close(draw(again, given), expected)


def test_a_pipeline_that_is_moved_is_captured_anew(pipe: Any, given: dict[str, Any]) -> None:
    """To another dtype and back, as to another device: no graph reads what was given back."""
    report = accelerate(pipe, executor="cuda_graph")
    expected = draw(pipe, given)
    pipe.to(torch.bfloat16)
    agrees = draw(pipe, given)
    assert np.isfinite(agrees).all()
    pipe.to(torch.float32)  # rounded now
    agrees_with_eager(pipe, given)
    assert np.abs(expected - draw(pipe, given)).max() < 0.2
    # called once each time: after the first a graph would be captured for nothing
    assert report.reasons().keys() == {"vae.decoder"} and len(report.reasons()["vae.decoder"]) == 1


def test_hooks_that_move_weights_are_left_to_run_eagerly(pipe: Any, given: dict[str, Any]) -> None:
    expected = draw(pipe, given)
    report = accelerate(pipe, executor="cuda_graph")
    draw(pipe, given)
    for part in (pipe.unet, pipe.vae, pipe.text_encoder.embeddings):  # Accelerate's, whole or layer by layer
        part._hf_hook = object()
    calls = {part: ran.calls[f"{part}/cuda_graph"] for part, ran in report.ran.items()}
    close(draw(pipe, given), expected)
    assert calls == {part: ran.calls[f"{part}/cuda_graph"] for part, ran in report.ran.items()}
    told = report.reasons()
    assert set(told) == {"unet", "vae.decoder", "text_encoder"}
    assert all("may move its weights" in reason for reasons in told.values() for reason in reasons)
    report = accelerate(pipe, executor="cuda_graph")
    assert "may move its weights" in str(report)


def test_accelerates_own_hooks_before_and_after(pipe: Any, given: dict[str, Any]) -> None:
    """The library by which Diffusers offloads, with the CPU for a device."""
    hooks = pytest.importorskip("accelerate.hooks")
    parts = (pipe.unet, pipe.vae, pipe.text_encoder)
    expected = draw(pipe, given)

    def hook() -> None:
        for part in parts:
            hooks.add_hook_to_module(part, hooks.CpuOffload(execution_device="cpu"))

    def unhook() -> None:
        for part in parts:
            hooks.remove_hook_from_module(part, recurse=True)

    report = accelerate(pipe, executor="cuda_graph")
    draw(pipe, given)
    hook()
    close(draw(pipe, given), expected)
    assert set(report.reasons()) == {"unet", "vae.decoder", "text_encoder"}
    unhook()
    graphs = report.ran["unet"].calls["unet/cuda_graph"]
    close(draw(pipe, given), expected)
    assert report.ran["unet"].calls["unet/cuda_graph"] == graphs + 2
    restore(pipe)
    assert (draw(pipe, given) == expected).all()
    hook()
    assert "may move its weights" in str(accelerate(pipe, executor="cuda_graph"))
    close(draw(pipe, given), expected)
    restore(pipe)
    unhook()
    assert (draw(pipe, given) == expected).all()


def test_a_callback_may_change_what_it_is_given_and_keep_it(pipe: Any, given: dict[str, Any]) -> None:
    """What the network gave is the caller's, and an embedding changed in place is seen."""

    def louder(_: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        values["prompt_embeds"].mul_(1.3)
        return values

    tensors = {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    given |= {"callback_on_step_end": louder, "num_inference_steps": 3} | tensors
    accelerate(pipe, executor="cuda_graph")
    draw(pipe, {**given, "callback_on_step_end": lambda p, s, t, values: values})
    agrees_with_eager(pipe, given)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("timestep", [7, 7.0, torch.tensor(7), torch.tensor([7.0]), np.float64(7)])
def test_any_timestep_is_an_input_of_one_graph(pipe: Any, mode: Any, timestep: Any) -> None:
    report = accelerate(unet := pipe.unet, executor="cuda_graph")
    twin = copy.deepcopy(unet)
    restore(twin)
    x, context = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 32)
    with mode():
        for step in range(4):
            for where in ({"timestep": timestep + step}, {}):
                args = () if where else (timestep + step,)
                found = unet(x, *args, encoder_hidden_states=context, **where)
                expected = twin(x, timestep + step, context)
                assert type(found) is type(expected)
                torch.testing.assert_close(found.sample, expected.sample, rtol=1e-4, atol=2e-5)
    assert report.ran["UNet2DConditionModel"].calls["UNet2DConditionModel/cuda_graph"] == 8
    (pool,) = vars(unet)["_clearway_built"].held.values()
    assert pool.made == 2  # by name, by place


def test_training_gradients_and_autocast_take_the_classes_way(pipe: Any) -> None:
    report = accelerate(unet := pipe.unet, executor="cuda_graph")
    x, context = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 32)
    unet(x, 3, context).sample.sum().backward()
    assert unet.conv_in.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu"):
        unet(x, 3, context)
    assert report.reasons()["UNet2DConditionModel"].keys() == {
        "a gradient is needed",
        "torch.autocast is at work",
    }
    assert "eagerly once: torch.autocast is at work" in str(report)


def test_the_automatic_choice_is_eager_on_a_cpu(pipe: Any, given: dict[str, Any]) -> None:
    report = accelerate(pipe)
    assert not report.ran and "forward" not in vars(pipe.unet)
    accelerate(pipe, executor="eager")
    assert "forward" not in vars(pipe.unet)


def test_with_a_device_to_move_to_it_waits_for_the_arguments(
    pipe: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    report = accelerate(pipe.unet)
    assert isinstance(vars(pipe.unet)["forward"], Bound)
    assert "cuda_graph once on a CUDA device: UNet2DConditionModel" in str(report)
    with torch.no_grad():
        pipe.unet(torch.randn(1, 4, 8, 8), 3, torch.randn(1, 5, 32))
    assert report.ran["UNet2DConditionModel"].calls == {"UNet2DConditionModel/eager": 1}
    assert not report.reasons()


def test_regions_are_compiled_where_that_is_named(pipe: Any) -> None:
    report = accelerate(pipe, executor="compiled")
    assert report.placed["compiled"] == ["vae.decoder", "unet"]
    assert "no block of it repeats" in str(report)


def test_others_compilers_see_the_classes_forward(pipe: Any) -> None:
    accelerate(pipe.unet, (), executor="cuda_graph", layout=None)
    x, context, timestep = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 32), torch.tensor(3)
    with torch.no_grad():
        expected = pipe.unet(x, timestep, context).sample
        compiled = torch.compile(pipe.unet, backend="eager")
        torch.testing.assert_close(compiled(x, timestep, context).sample, expected, rtol=1e-4, atol=2e-5)
    user = SimpleNamespace(components={"unet": compiled})
    assert "it is compiled: unet" in str(accelerate(user, executor="cuda_graph"))


def test_what_a_forward_takes_can_still_be_asked(pipe: Any) -> None:
    before = inspect.signature(pipe.unet.forward)
    accelerate(pipe, executor="cuda_graph")
    assert inspect.signature(pipe.unet.forward) == before


def test_mistakes_are_sentences(folders: dict[str, Path]) -> None:
    model = load(str(folders["sd1"]), device="cpu")
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: accelerate(nn.Linear(1, 1), executor="graphs"), "one of auto, eager"),
        (lambda: accelerate(model, executor="cuda_graph"), "as its choices say"),
    ]
    for call, words in calls:
        with pytest.raises(RequestError, match=words):
            call()
