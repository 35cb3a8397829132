"""Networks run before they are called: as they will be called, once, unheard, and nothing of it is kept."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from clearway import Request, generate, models
from clearway.device import Memory
from clearway.models import foreseen
from clearway.models.accelerate import accelerate
from pipelines import pipeline


class _Seen:
    """What reaches the first convolution of a UNet and of a decoder, and what kernels would be built for."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.begun = 0

    def listen(self, *convolutions: nn.Module) -> None:
        """Not by a hook, nor by a forward of its own: nothing is run beforehand where anybody listens."""
        for one in convolutions:
            inner = one._conv_forward

            def told(x: torch.Tensor, *args: Any, inner: Any = inner) -> torch.Tensor:
                self.shapes.append(tuple(x.shape))
                result: torch.Tensor = inner(x, *args)
                return result

            one._conv_forward = Heard(told)


class Heard:
    """A call that is no function."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> _Seen:
    """A machine where another process builds kernels, of a CPU that passes for a CUDA device."""
    made = _Seen()

    def begin(run: Any) -> int:
        made.begun += 1
        run()
        return 7

    monkeypatch.setattr(foreseen.elsewhere, "builder", object)
    monkeypatch.setattr(foreseen, "KIND", "cpu")
    monkeypatch.setattr(foreseen.ahead, "begin", begin)
    return made


@pytest.mark.parametrize("family", ["sd1", "sd2", "sdxl"])
def test_networks_are_run_as_a_generation_will(folders: dict[str, Path], seen: _Seen, family: str) -> None:
    model = models.load(folders[family], device="cpu")
    seen.listen(model.unet.conv_in, model.vae.decoder.conv_in)
    weights = copy.deepcopy({**model.unet.state_dict(), **model.vae.state_dict()})
    request = Request(prompt="a", width=64, height=128, steps=1, sampler="Euler", seed=1, count=2)
    first = generate(request, model)
    shapes = list(seen.shapes)
    assert seen.begun == 1 and {*shapes[:2]} == {*shapes[2:]} and len(shapes) == 4
    again = generate(request, model)
    assert seen.begun == 1 and (again.images == first.images).all()
    now = {**model.unet.state_dict(), **model.vae.state_dict()}
    assert all(torch.equal(now[name], weight) for name, weight in weights.items())


def test_without_guidance_it_is_half_the_rows(folders: dict[str, Path], seen: _Seen) -> None:
    model = models.load(folders["sd1"], device="cpu")
    seen.listen(model.unet.conv_in)
    generate(Request(prompt="a", width=64, height=64, steps=1, seed=1, cfg_scale=1.0), model)
    assert seen.shapes[0][0] == 1


def test_a_pipelines_own_size_is_foreseen_when_it_is_accelerated(
    folders: dict[str, Path], seen: _Seen
) -> None:
    pipe, _ = pipeline(folders, "text2img")
    seen.listen(pipe.unet.conv_in)
    accelerate(pipe)
    side = pipe.unet.config.sample_size
    assert seen.shapes == [(2, 4, side, side)]
    accelerate(pipe)
    assert seen.begun == 1


def test_nothing_is_run_where_it_is_of_no_use_or_somebody_would_hear(
    folders: dict[str, Path], seen: _Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.load(folders["sd1"], device="cpu")
    unet, vae = model.unet, model.vae
    with monkeypatch.context() as changed:
        changed.setattr(foreseen.elsewhere, "builder", lambda: None)
        assert not foreseen.begin(unet, vae, 8, 8)
    with monkeypatch.context() as changed:
        changed.setattr(foreseen, "KIND", "cuda")
        assert not foreseen.begin(unet, vae, 8, 8)
    for listen in (register_module_forward_hook, register_module_forward_pre_hook):
        hook = listen(lambda *_: None)  # of every module there is
        assert not foreseen.begin(unet, vae, 8, 8)
        hook.remove()
    block = unet.mid_block.attentions[0]
    block.forward = lambda *args, inner=block.forward, **kwargs: inner(*args, **kwargs)
    assert not foreseen.begin(unet, vae, 8, 8)
    del block.forward
    hook = unet.mid_block.register_forward_hook(lambda *_: None)
    assert not foreseen.begin(unet, vae, 8, 8)
    hook.remove()
    unet._hf_hook = object()
    assert not foreseen.begin(unet, vae, 8, 8)
    del unet._hf_hook
    assert not foreseen.begin(nn.Linear(2, 2), vae, 8, 8)
    for other in (nn.Linear(2, 2), None, SimpleNamespace(decoder=vae.decoder, config=vae.config)):
        assert not foreseen.begin(unet, other, 8, 8)
    with monkeypatch.context() as changed:
        changed.setattr(foreseen.machine, "memory", lambda device: Memory(2**30, 2**24))
        assert not foreseen.begin(unet, vae, 8, 8)
    assert unet not in foreseen._seen  # and may be met again
    unet.register_to_config(encoder_hid_dim_type="text_image_proj")
    assert not foreseen.begin(unet, vae, 8, 8)
    assert not seen.begun


def test_a_fault_or_want_of_memory_is_left_to_the_picture(
    folders: dict[str, Path], seen: _Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, released = models.load(folders["sd1"], device="cpu"), []
    monkeypatch.setattr(foreseen.machine, "release_memory", released.append)
    for error in (torch.OutOfMemoryError("out of memory"), RuntimeError("another kind")):

        def fails(run: Any, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr(foreseen.ahead, "begin", fails)
        foreseen._seen.discard(model.unet)
        assert foreseen.begin(model.unet, model.vae, 8, 8) == 0
    assert len(released) == 1
