"""A user's Diffusers pipelines by real CUDA graphs: run where there is a device."""

import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clearway import Request, generate, sampling
from clearway.execution import executor
from clearway.models import load
from clearway.models.accelerate import accelerate, restore
from clearway.ops import ahead
from never_waits import never_waits
from pipelines import draw, image_adapter, lora, pipeline

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """float32 means float32: kernels of two layouts may then be compared."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


def agrees(pipe: Any, given: dict[str, Any]) -> np.ndarray:
    """What the accelerated pipeline draws, which is what it draws restored."""
    found = draw(pipe, given)
    twin = copy.deepcopy(pipe)
    restore(twin)
    close(found, draw(twin, given))
    return found


@pytest.mark.parametrize("kind", ["text2img", "img2img", "sdxl", "two controlnets"])
def test_graphs_draw_what_eager_draws(folders: dict[str, Path], kind: str) -> None:
    pipe, given = pipeline(folders, kind)
    pipe.to("cuda")
    expected = draw(pipe, given)
    report = accelerate(pipe)
    for _ in range(2):
        close(draw(pipe, given), expected)
    assert not report.reasons(), str(report)
    for part, ran in report.ran.items():
        assert ran.calls.keys() == {f"{part}/cuda_graph"}
    for prompt in ("a blue cube", "a red cube"):
        assert np.isfinite(draw(pipe, given, prompt)).all()
    restore(pipe)
    close(draw(pipe, given), expected)


def test_nothing_is_stale(folders: dict[str, Path]) -> None:
    pipe, given = pipeline(folders, "text2img")
    pipe.to("cuda")
    report = accelerate(pipe)
    drawn = [agrees(pipe, given)]

    def changed(**other: Any) -> None:
        found = agrees(pipe, {**given, **other})
        assert not any(found.shape == one.shape and np.allclose(found, one, atol=2e-3) for one in drawn)
        drawn.append(found)

    changed(height=128)
    changed(guidance_scale=1.0)
    pipe.enable_freeu(0.9, 0.2, 1.2, 1.4)
    changed()
    pipe.disable_freeu()
    to_v = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_v
    wrapped = nn.Sequential(to_v, nn.Linear(to_v.out_features, to_v.out_features).cuda())
    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_v = wrapped  # as an adapter is
    changed()
    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_v = to_v
    close(agrees(pipe, given), drawn[0])
    pipe.load_ip_adapter(
        image_adapter(pipe.unet, 24, 1),
        subfolder="",
        weight_name="",
        image_encoder_folder=None,
        low_cpu_mem_usage=False,
    )
    embeds = torch.randn(2, 1, 24, device="cuda")
    changed(ip_adapter_image_embeds=[embeds])
    pipe.set_ip_adapter_scale(0.2)
    changed(ip_adapter_image_embeds=[embeds])
    pipe.unload_ip_adapter()
    close(agrees(pipe, given), drawn[0])
    pipe.to("cpu")
    draw(pipe, given)
    assert "_clearway_built" not in vars(pipe.unet)  # its graphs are gone
    pipe.to("cuda")
    close(agrees(pipe, given), drawn[0])
    assert not report.reasons(), str(report)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_adapters_come_and_go(folders: dict[str, Path]) -> None:
    pytest.importorskip("peft")
    pipe, given = pipeline(folders, "text2img")
    pipe.to("cuda")
    adapters = [lora(pipe.unet, seed) for seed in (0, 1)]
    report = accelerate(pipe)
    drawn = [agrees(pipe, given)]

    def changed(**other: Any) -> None:
        drawn.append(agrees(pipe, {**given, **other}))
        assert np.abs(drawn[-1] - drawn[-2]).max() > 2e-3

    for name, weights in zip(("one", "two"), adapters, strict=True):
        pipe.load_lora_weights(weights, adapter_name=name)
        changed()
    pipe.set_adapters(["one", "two"], [0.3, 0.7])
    changed()
    changed(cross_attention_kwargs={"scale": 0.2})
    pipe.disable_lora()
    changed()
    close(drawn[-1], drawn[0])
    pipe.enable_lora()
    changed()
    pipe.fuse_lora()
    close(agrees(pipe, given), drawn[-1])
    pipe.unfuse_lora()
    close(agrees(pipe, given), drawn[-1])
    pipe.unload_lora_weights()
    close(agrees(pipe, given), drawn[0])
    assert not report.reasons(), str(report)


def test_pickled_moved_and_restored(folders: dict[str, Path]) -> None:
    """A pipeline before its first picture: after it transformers 5 has hooks in SDXL's text encoders, whose
    hidden states were asked for, that do not pickle, accelerated or not. The UNet pickles then too."""
    pipe, given = pipeline(folders, "sdxl")
    pipe.to("cuda")
    expected = draw(copy.deepcopy(pipe), given)
    accelerate(pipe)
    twin = pickle.loads(pickle.dumps(pipe))
    for one in (pipe, twin):
        close(draw(one, given), expected)
    assert vars(pipe.unet)["_clearway_built"].held
    twin.unet = pickle.loads(pickle.dumps(pipe.unet))
    assert not vars(twin.unet)["_clearway_built"].held
    close(draw(twin, given), expected)
    twin.to("cpu")
    twin.to("cuda")
    close(draw(twin, given), expected)
    assert vars(twin.unet)["_clearway_built"].held
    restore(twin)
    close(draw(twin, given), expected)
    assert not any("_clearway" in key for module in twin.unet.modules() for key in vars(module))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_replays_never_wait_for_the_device(folders: dict[str, Path], mode: Any) -> None:
    pipe, _ = pipeline(folders, "text2img")
    pipe.to("cuda")
    accelerate(unet := pipe.unet)
    with mode():
        x, context = torch.randn(2, 4, 8, 8, device="cuda"), torch.randn(2, 77, 32, device="cuda")
        timesteps = [7, 7.0, torch.tensor(7, device="cuda"), torch.tensor(7.0)]
        for timestep in timesteps:
            unet(x, timestep, encoder_hidden_states=context)
        with never_waits():
            for timestep in timesteps:
                for _ in range(3):
                    unet(x, timestep, encoder_hidden_states=context)


@pytest.mark.parametrize("sampler", ["Euler", "DPM++ SDE"])
def test_the_loop_of_clearways_own_pipeline_never_waits(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    model = load(str(folders["sd1"]), device="cuda")
    request = Request(prompt="a red cube", width=64, height=64, steps=6, seed=1, sampler=sampler)
    expected = generate(request, model)
    whole = sampling.sample

    def watched(*args: Any, **kwargs: Any) -> Any:
        with never_waits():
            return whole(*args, **kwargs)

    monkeypatch.setattr(sampling, "sample", watched)
    drawn = generate(request, model)
    assert (drawn.images == expected.images).all()
    assert drawn.routes["unet/cuda_graph"] >= 6 and "unet/eager" not in drawn.routes


class Reading(nn.Module):
    """Reads the device, where nobody looks for what cannot be captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.01 if float(x.sum()) else x


def test_what_cannot_be_captured_leaves_no_trace(folders: dict[str, Path]) -> None:
    """Eager, said so; random numbers and streams as before, and later captures go on."""
    pipe, given = pipeline(folders, "text2img")
    pipe.to("cuda")
    report = accelerate(pipe)
    before = agrees(pipe, given)
    attn = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1
    to_v, attn.to_v = attn.to_v, nn.Sequential(attn.to_v, Reading())
    stream = torch.cuda.current_stream()
    assert np.abs(agrees(pipe, given) - before).max() > 0
    (why,) = report.reasons()["unet"]
    assert "cannot be captured" in why
    assert report.ran["unet"].calls["unet/eager"] == 2
    assert torch.cuda.current_stream() == stream
    torch.cuda.manual_seed(1)
    first = torch.randn(4, device="cuda")
    torch.cuda.manual_seed(1)
    assert torch.equal(first, torch.randn(4, device="cuda"))
    changed = {**given, "height": 128}  # the VAE's and the text encoders' graphs live, and more are made
    agrees(pipe, changed)
    attn.to_v = to_v
    close(agrees(pipe, given), before)
    agrees(pipe, changed)
    calls = {part: dict(ran.calls) for part, ran in report.ran.items()}
    # of the first two calls after it was mended the first is eager: it might change at each call
    assert calls.pop("unet") == {"unet/cuda_graph": 5, "unet/eager": 5}
    assert all(counted.keys() == {f"{part}/cuda_graph"} for part, counted in calls.items())


def test_an_eager_call_has_its_kernels_built_first(folders: dict[str, Path]) -> None:
    pipe, _ = pipeline(folders, "text2img")
    pipe.to("cuda")
    unet = pipe.unet
    accelerate(unet, executor="eager")
    given = torch.randn(2, 4, 16, 16, device="cuda"), 431, torch.randn(2, 77, 32, device="cuda")
    before = ahead.times()["variants"]
    with torch.no_grad():
        got = executor("eager", unet, "unet")(*given).sample
        assert ahead.times()["variants"] > before
        assert torch.equal(got, unet(*given).sample)


def test_restore_gives_the_memory_back(folders: dict[str, Path]) -> None:
    pipe, given = pipeline(folders, "text2img")
    pipe.to("cuda")

    def held() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    after = []
    for _ in range(2):  # the first time workspaces of the libraries' are made, which stay
        report = accelerate(pipe)
        for height in (64, 128):
            draw(pipe, {**given, "height": height})
        full = held()
        restore(pipe)
        after.append(held())
        assert full > after[-1]
        assert report.ran["unet"].calls["unet/cuda_graph"] == 4  # kept, though the graphs are gone
    assert after[1] <= after[0] + 2**20


def test_threads_with_streams_of_their_own(folders: dict[str, Path]) -> None:
    pipe, _ = pipeline(folders, "text2img")
    pipe.to("cuda")
    twin = copy.deepcopy(pipe.unet)
    accelerate(unet := pipe.unet)
    wrong: list[int] = []

    def work(seed: int) -> None:
        drawn = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for step in range(20):
                x = torch.randn(2, 4, 8, 8, device="cuda", generator=drawn)
                context = torch.randn(2, 77, 32, device="cuda", generator=drawn)
                found = unet(x, step, context).sample
                if not torch.allclose(found, twin(x, step, context).sample, atol=1e-3):
                    wrong.append(step)

    with torch.no_grad():
        unet(torch.randn(2, 4, 8, 8).cuda(), 1, torch.randn(2, 77, 32).cuda())
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
