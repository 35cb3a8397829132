"""Transformers by captured graphs: pictures as before, and what is set afterwards is captured anew.

The stand-in for CUDA's graphs keeps the call: it shows which arguments a graph would have baked in, and the
number of captures what it is taken to depend on.
"""

import copy
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from clearway.models.accelerate import accelerate, restore
from dit_builders import inputs, tiny_flux, tiny_sd3, tiny_sd35
from fake_capture import Recorder
from models.dit_pipelines import PIPELINES, draw


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Counts the captures of the models that the test accelerates."""
    made = Recorder()
    monkeypatch.setattr(sys.modules["clearway.execution.executor"], "TorchCapture", lambda: made)
    return made


@pytest.mark.parametrize("name", PIPELINES)
def test_the_same_pictures(recorder: Recorder, name: str) -> None:
    pipe = PIPELINES[name]()
    plain = draw(pipe)
    report = accelerate(pipe, executor="cuda_graph")
    assert "transformer" in report.placed["cuda_graph"]
    for _ in range(2):
        assert np.abs(draw(pipe) - plain).max() < 1e-3 < plain.std()
    calls = report.ran["transformer"].calls
    assert calls == {"transformer/cuda_graph": 2 * 3}
    assert not report.reasons()
    restore(pipe)
    assert (draw(pipe) == plain).all()


def agree(model: Any, given: dict[str, Any]) -> Tensor:
    """What the accelerated model gives, which a restored copy of it gives too."""
    twin = copy.deepcopy(model)
    restore(twin)
    with torch.no_grad():
        found, expected = model(**given)[0], twin(**given)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    return found


@pytest.mark.parametrize("maker", [tiny_flux, tiny_sd3, tiny_sd35])
def test_values_are_arguments_and_shapes_are_captured(recorder: Recorder, maker: Any) -> None:
    model = maker()
    accelerate(model, executor="cuda_graph")
    given = inputs(model, 1, 4, 6)
    first = agree(model, given)
    other = tree_map_only(Tensor, lambda x: x * 0.5, given)  # also times, guidance and positions
    assert (agree(model, other) - first).abs().max() > 1e-3
    assert recorder.captures == 1
    agree(model, inputs(model, 1, 3, 5))
    agree(model, inputs(model, 2, 4, 6))
    agree(model, inputs(model, 1, 4, 6, text=7))
    assert recorder.captures == 4


def test_what_is_set_afterwards_is_captured_anew() -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    before = registry.get_active_backend()[0]
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder()
        patch.setattr(sys.modules["clearway.execution.executor"], "TorchCapture", lambda: recorder)
        model = tiny_flux()
        given = inputs(model, 1, 4, 6)
        accelerate(model, executor="cuda_graph")
        agree(model, given)
        for number, change in enumerate(
            (
                lambda: model.transformer_blocks[0].attn.set_attention_backend("_native_math"),
                lambda: setattr(registry, "_active_backend", type(before)("_native_math")),
                lambda: model.fuse_qkv_projections(),
                lambda: model.single_transformer_blocks[0].attn.set_processor(other_processor()),
            ),
            start=2,
        ):
            try:
                change()
                agree(model, given)
                agree(model, given)
                assert recorder.captures == min(number, 4)  # a class of somebody's own is not captured
            finally:
                if number > 2:
                    registry._active_backend = before


def other_processor() -> Any:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    class Other(FluxAttnProcessor):
        pass

    return Other()
