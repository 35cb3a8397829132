"""Each forward that is put in place against its class's own, at every branch of it."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from diffusers.models.activations import GEGLU
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from torch.nn import functional as F

from clearway.execution.kept import Kept
from clearway.models import _fused_blocks
from clearway.models._attention import listen
from clearway.models._bound import Bound
from clearway.ops import contract


def agree(module: nn.Module, run: Callable[..., Any], *args: Any, fused: bool = True, **kwargs: Any) -> None:
    """`run` gives what the class gives, by ops (or, where it hands over, by none)."""
    routes: dict[str, int] = {}
    with torch.no_grad():
        expected = module(*args, **kwargs)
        module.forward = Bound(run, module)
        with contract.recording(routes):
            found = module(*args, **kwargs)
        del module.forward
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert bool(routes) == fused


def resnet(**options: Any) -> ResnetBlock2D:
    torch.manual_seed(0)
    usual = {"in_channels": 8, "out_channels": 16, "temb_channels": 12, "groups": 4}
    return ResnetBlock2D(**(usual | options)).eval()


X, TEMB = torch.randn(2, 8, 6, 5), torch.randn(2, 12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"out_channels": 8, "output_scale_factor": 2.0},
        {"skip_time_act": True, "dropout": 0.5},
        {"up": True},
        {"down": True},
        {"up": True, "kernel": "sde_vp"},
        {"time_embedding_norm": "default", "groups_out": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_residual_block(options: dict[str, Any], layout: torch.memory_format) -> None:
    agree(resnet(**options), _fused_blocks.resnet, X[:, :, :, :4].to(memory_format=layout), TEMB)


def test_a_residual_block_without_time_and_with_one_embedding_for_all() -> None:
    agree(resnet(temb_channels=None), _fused_blocks.resnet, X, None)
    agree(resnet(), _fused_blocks.resnet, X, TEMB[:1])


def test_a_residual_block_that_is_handed_over() -> None:
    scaling = resnet(time_embedding_norm="scale_shift")
    agree(scaling, _fused_blocks.resnet, X, TEMB, fused=False)
    other = resnet(non_linearity="gelu")
    assert "GELU" in str(_fused_blocks.refuse_resnet(other))
    agree(other, _fused_blocks.resnet, X, TEMB, fused=False)
    hooked = resnet()
    hooked.norm2.register_forward_hook(lambda module, args, out: out * 2)
    agree(hooked, _fused_blocks.resnet, X, TEMB, fused=False)


@pytest.mark.parametrize(
    "options", [{}, {"out_channels": 8}, {"conv_shortcut": True, "out_channels": 8}], ids=str
)
def test_biases_of_a_residual_block_are_folded_away(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: every bias once, wherever it goes."""
    monkeypatch.setattr(_fused_blocks, "bias_is_a_pass", lambda x: True)
    for x in (X, X.to(memory_format=torch.channels_last)):
        block, routes = resnet(**options), dict[str, int]()
        agree(block, _fused_blocks.folded_resnet, x, TEMB)
        agree(resnet(temb_channels=None, **options), _fused_blocks.folded_resnet, x, None)
        with torch.no_grad(), contract.recording(routes):
            _fused_blocks.folded_resnet(block, x, TEMB)
        assert routes == {"group_norm_silu/reference": 2, "residual_add/reference": 1}


@pytest.mark.parametrize(("options", "times"), [({"out_channels": 8}, 2), ({}, 3)], ids=str)
def test_convolutions_of_a_residual_block_go_through_the_op(
    options: dict[str, Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortcut's too, where there is one."""
    monkeypatch.setattr(_fused_blocks, "bias_is_a_pass", lambda x: True)
    block, routes = resnet(**options), dict[str, int]()
    agree(block, _fused_blocks.routed_resnet, X.to(memory_format=torch.channels_last), TEMB)
    with torch.no_grad(), contract.recording(routes):
        _fused_blocks.routed_resnet(block, X, TEMB)
    expected = {"group_norm_silu/reference": 2, "residual_add/reference": 1}
    assert routes == {**expected, "convolution/reference": times}


@pytest.mark.parametrize(
    "change",
    [{"stride": 2}, {"dilation": 2, "padding": 2}, {"groups": 4}, {"padding": 0}, {"kernel_size": 5}],
    ids=str,
)
def test_other_convolutions_do_not(change: dict[str, int]) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 16, **({"kernel_size": 3, "padding": 1, "bias": False} | change))
    routes: dict[str, int] = {}
    with torch.no_grad(), contract.recording(routes):
        assert torch.equal(_fused_blocks._routed(conv, X), conv(X))
    assert routes == {}


@pytest.mark.parametrize("change", ["hook", "scale", "up", "gradient"])
def test_biases_stay_where_they_cannot_be_folded(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fused_blocks, "bias_is_a_pass", lambda x: True)
    block = resnet(up=change == "up", output_scale_factor=2.0 if change == "scale" else 1.0)
    if change == "hook":
        block.conv2.register_forward_hook(lambda module, args, out: out * 2)
    if change == "gradient":
        x = X.clone().requires_grad_()
        torch.testing.assert_close(_fused_blocks.folded_resnet(block, x, TEMB), block(x, TEMB))
        assert _fused_blocks.folded_resnet(block, x, TEMB).requires_grad
    else:
        agree(block, _fused_blocks.folded_resnet, X, TEMB)


def upsample(block: Any, *args: Any) -> Any:
    return _fused_blocks.upsample(block, Kept(), *args)


def upsampler(**options: Any) -> Upsample2D:
    torch.manual_seed(0)
    return Upsample2D(8, **({"use_conv": True, "out_channels": 6} | options)).eval()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [None, (12, 10)])
def test_an_upsampler(layout: torch.memory_format, size: tuple[int, int] | None) -> None:
    agree(upsampler(), upsample, X.to(memory_format=layout), size)


def test_an_upsampler_that_is_handed_over() -> None:
    agree(upsampler(), upsample, X, (13, 10), fused=False)
    agree(upsampler(use_conv=False, out_channels=8), upsample, X, fused=False)
    agree(upsampler(use_conv_transpose=True), upsample, X, fused=False)
    hooked = upsampler()
    hooked.conv.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    agree(hooked, upsample, X, fused=False)


def test_single_layers() -> None:
    agree(GEGLU(8, 12), _fused_blocks.gated, torch.randn(2, 5, 8))
    norm = nn.GroupNorm(4, 8)
    agree(norm, _fused_blocks.group_norm, X)
    agree(norm, _fused_blocks.group_norm, torch.randn(2, 8, 9))
    agree(norm, _fused_blocks.group_norm, torch.randn(3, 8), fused=False)


def test_torch_compile_sees_no_routing_of_geglu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where it is asked first whether its product can be done with it."""
    monkeypatch.setattr(_fused_blocks, "has_own_ways", lambda x: True)
    asked: list[Any] = []
    route = _fused_blocks.geglu_linear.route
    monkeypatch.setattr(
        _fused_blocks.geglu_linear, "route", lambda *given: asked.append(given) or route(*given)
    )
    layer, x = GEGLU(8, 12).requires_grad_(False), torch.randn(2, 5, 8)
    found = _fused_blocks.gated(layer, x)
    assert len(asked) == 1
    compiled = torch.compile(functools.partial(_fused_blocks.gated, layer), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), found)
    assert len(asked) == 1


class Ending(nn.Module):
    """The end of a UNet or a VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_norm_out, self.conv_act = nn.GroupNorm(4, 8), nn.SiLU()
        nn.init.normal_(self.conv_norm_out.weight)

    def forward(self, x: Tensor) -> Tensor:
        ended: Tensor = self.conv_act(self.conv_norm_out(x))
        return ended


def fused(owner: Ending) -> Ending:
    owner.conv_norm_out.forward = Bound(_fused_blocks.last_norm, owner.conv_norm_out, owner)
    owner.conv_act.forward = Bound(_fused_blocks.nothing, owner.conv_act, owner)
    return owner


@pytest.mark.parametrize("gradient", [False, True])
def test_the_last_norm_and_its_activation_are_one_or_both_their_own(gradient: bool) -> None:
    owner = Ending()
    x = X.clone().requires_grad_(gradient)
    expected = owner(x)
    fused(owner)
    routes: dict[str, int] = {}
    with torch.set_grad_enabled(gradient), contract.recording(routes):
        torch.testing.assert_close(owner(x), expected, rtol=1e-5, atol=1e-5)
    assert routes == ({} if gradient else {"group_norm_silu/reference": 1})


def _hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, out: out * 2 + 1)


def _before(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: (args[0] * 2 + 1,))


CHANGES: dict[str, Callable[[Ending], Any]] = {
    "a hook on the norm": lambda owner: _hooked(owner.conv_norm_out),
    "a hook before the norm": lambda owner: _before(owner.conv_norm_out),
    "a hook on the activation": lambda owner: _hooked(owner.conv_act),
    "a hook before the activation": lambda owner: _before(owner.conv_act),
    "another activation": lambda owner: setattr(owner, "conv_act", nn.Tanh()),
    "another norm": lambda owner: setattr(owner, "conv_norm_out", nn.Identity()),
    "no activation": lambda owner: setattr(owner, "conv_act", nn.Identity()),
    "a forward around the activation's": lambda owner: setattr(
        owner.conv_act, "forward", functools.partial(owner.conv_act.forward)
    ),
    "a forward around the norm's": lambda owner: setattr(
        owner.conv_norm_out, "forward", functools.partial(owner.conv_norm_out.forward)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_at_the_end_later_is_noticed(change: str) -> None:
    owner, twin = Ending(), Ending()
    twin.load_state_dict(owner.state_dict())
    fused(owner)
    for one in (owner, twin):
        CHANGES[change](one)
    with torch.no_grad():
        torch.testing.assert_close(owner(X), twin(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [resnet, lambda: Upsample2D(8, use_conv=True)])
@pytest.mark.parametrize("change", ["_conv_forward", "padding_mode"])
def test_pictures_that_tile(make: Callable[[], Any], change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another padding of every convolution, set at the instance as scripts do it."""

    def in_one_direction(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, columns = conv.padding
        x = F.pad(F.pad(x, (columns, columns, 0, 0), mode="circular"), (0, 0, rows, rows))
        return F.conv2d(x, weight, bias, conv.stride)

    monkeypatch.setattr(_fused_blocks, "bias_is_a_pass", lambda x: True)
    block = make().requires_grad_(False)
    for conv in block.modules():
        if isinstance(conv, nn.Conv2d):
            if change == "padding_mode":
                conv.padding_mode = "circular"
            else:
                conv._conv_forward = MethodType(in_one_direction, conv)
    is_resnet = isinstance(block, ResnetBlock2D)
    run = _fused_blocks.routed_resnet if is_resnet else upsample
    agree(block, run, X, *([TEMB] if is_resnet else []), fused=is_resnet)


def test_a_convolution_put_in_the_place_of_another_makes_its_upsampler_forget() -> None:
    """PEFT merges through `.data` and puts the same layer back."""
    listen()
    block, kept = upsampler(), Kept()
    block.forward = Bound(_fused_blocks.upsample, block, kept)
    inner = block.conv
    block.conv = nn.Sequential(inner)
    block.conv = inner
    assert kept.forgotten == 2
    block.other = nn.Identity()
    assert kept.forgotten == 2
