"""The linear layers of a UNet's transformers by the op: which they are; modules stay what they were."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from clearway.models import _linear, _transformers
from clearway.models._bound import Bound, occupied, plain
from clearway.models._joined import ordinary
from clearway.models.accelerate import accelerate, restore
from clearway.ops import contract

IMAGE, CONTEXT = torch.randn(2, 16, 6, 5), torch.randn(2, 5, 12)


def transformer(**options: Any) -> Transformer2DModel:
    torch.manual_seed(0)
    usual = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "num_layers": 1}
    usual |= {"norm_num_groups": 4, "cross_attention_dim": 12}
    return Transformer2DModel(**(usual | options)).eval()


def count(part: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, int]:
    """What a call gives, and how often the op ran in it."""
    routes: dict[str, int] = {}
    with torch.no_grad(), contract.recording(routes):
        out = part(*args, return_dict=False, **kwargs)[0]
    return out, routes.get("linear/reference", 0)


def test_layers_are_those_that_many_rows_go_through() -> None:
    names = {name for name, _ in _linear.layers(transformer(use_linear_projection=True))}
    block = "transformer_blocks.0"
    assert names == {
        *("proj_in", "proj_out"),
        *(f"{block}.attn1.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"{block}.attn2.{name}" for name in ("to_q", "to_out.0")),
        *(f"{block}.ff.net.0.proj", f"{block}.ff.net.2"),
    }
    as_images = {name: type(layer) for name, layer in _linear.layers(transformer())}
    assert as_images["proj_in"] is as_images["proj_out"] is nn.Conv2d


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_linear_projection": True}], ids=str)
def test_each_goes_through_the_op(
    options: dict[str, Any], packed: bool, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`products`: 1x1 convolutions as on CUDA."""
    monkeypatch.setattr(_transformers, "_pointwise", lambda conv: products and isinstance(conv, nn.Conv2d))
    part = transformer(**options)
    expected, none = count(part, IMAGE, encoder_hidden_states=CONTEXT)
    before = {name: sorted(vars(module)) for name, module in part.named_modules()}
    report = accelerate(part, ("attention", "layer_norm", "linear"), packed_qkv=packed)
    assert len(report.placed["linear"]) == (10 if options else 8)
    found, times = count(part, IMAGE, encoder_hidden_states=CONTEXT)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert none == 0 and times == 8 - 2 * packed + 2 * (products or bool(options))
    restore(part)
    assert {name: sorted(vars(module)) for name, module in part.named_modules()} == before
    assert count(part, IMAGE, encoder_hidden_states=CONTEXT)[1] == 0


def test_without_its_name_nothing_goes_through_the_op() -> None:
    part = transformer()
    accelerate(part, ("attention", "layer_norm"), packed_qkv=True)
    assert count(part, IMAGE, encoder_hidden_states=CONTEXT)[1] == 0


def test_a_layer_stays_plain_and_its_hooks_are_heard() -> None:
    part = transformer(use_linear_projection=True)
    accelerate(part, ("linear",))
    assert isinstance(part.proj_in.forward, Bound)
    assert plain(part.proj_in, nn.Linear) and ordinary(part.proj_in) and occupied(part.proj_in) is None
    heard = []
    hook = part.proj_in.register_forward_hook(lambda layer, args, out: heard.append(out.shape))
    assert not plain(part.proj_in, nn.Linear)
    _, times = count(part, IMAGE, encoder_hidden_states=CONTEXT)
    assert heard == [(2, 30, 16)] and times == 10
    hook.remove()
    part.proj_in.forward = lambda x: 2 * x  # somebody's own
    assert not plain(part.proj_in, nn.Linear) and occupied(part.proj_in)


def test_a_gradient_takes_the_class_s_own_way() -> None:
    part = transformer(use_linear_projection=True)
    accelerate(part, ("linear",))
    routes: dict[str, int] = {}
    with contract.recording(routes):
        part(IMAGE, encoder_hidden_states=CONTEXT, return_dict=False)[0].sum().backward()
    assert routes == {} and part.proj_in.weight.grad is not None


def test_other_weights_and_classes_are_left() -> None:
    class Mine(nn.Linear):
        pass

    part = transformer(use_linear_projection=True)
    part.proj_in = Mine(16, 16)
    part.proj_out.weight = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
    report = accelerate(part, ("linear",))
    assert len(report.placed["linear"]) == 8 and "proj_in" not in str(report.placed)
    assert "quantised" in str(report.left)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))])
def test_a_copy_goes_through_the_op_by_itself(copied: Any) -> None:
    part = transformer()
    accelerate(part, ("attention", "linear"), packed_qkv=True)
    expected, times = count(part, IMAGE, encoder_hidden_states=CONTEXT)
    twin = copied(part)
    assert _linear.MARK in vars(twin.proj_in)
    found, again = count(twin, IMAGE, encoder_hidden_states=CONTEXT)
    assert torch.equal(found, expected) and again == times == 6
    for module in twin.modules():
        forward = vars(module).get("forward")
        assert not isinstance(forward, Bound) or forward.args[0] is module
    restore(twin)
    assert _linear.MARK not in vars(twin.proj_in) and _linear.MARK in vars(part.proj_in)


def test_an_attention_outside_of_a_transformer_is_left() -> None:
    """The VAE's: one head of many channels, where nothing was measured."""
    report = accelerate(Attention(query_dim=16, heads=1, dim_head=16), ("linear",))
    assert "linear" not in report.placed


def test_it_compiles_as_the_class_does() -> None:
    part = transformer(use_linear_projection=True)
    with torch.no_grad():
        expected = part(IMAGE, encoder_hidden_states=CONTEXT, return_dict=False)[0]
        accelerate(part, ("attention", "layer_norm", "geglu", "linear"))
        compiled = torch.compile(part, backend="eager", fullgraph=True)
        found = compiled(IMAGE, encoder_hidden_states=CONTEXT, return_dict=False)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
