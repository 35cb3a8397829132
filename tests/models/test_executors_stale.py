"""Whatever a user does to a network between two calls, a graph that has baked in what a real one does gives
what the network gives. What is known not to be seen (docs/accelerate.md) is here too, as such."""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from diffusers.models import embeddings
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from clearway.execution import forget
from clearway.models.accelerate import accelerate, restore
from fake_capture import Baked
from pipelines import pipeline

NAME = "UNet2DConditionModel"


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a stand-in for CUDA's that runs no Python of the network's."""
    monkeypatch.setattr(sys.modules["clearway.execution.executor"], "TorchCapture", Baked)


@pytest.fixture(scope="module")
def whole(folders: dict[str, Path]) -> Any:
    return pipeline(folders, "text2img")[0].unet


class Drawn:
    """A network by graphs beside the same one without any, with arguments of their own."""

    def __init__(self, unet: Any, ops: bool) -> None:
        torch.manual_seed(0)
        self.unet = copy.deepcopy(unet)
        self.x, self.context = torch.randn(2, 4, 8, 8), torch.randn(2, 77, 32)
        self.timestep = torch.tensor(7)
        more: dict[str, Any] = {} if ops else {"ops": (), "layout": None}
        self.report = accelerate(self.unet, executor="cuda_graph", **more)

    def run(self, unet: Any = None) -> Tensor:
        with torch.no_grad():
            found: Tensor = (unet or self.unet)(self.x, self.timestep, self.context).sample
            return found.clone()

    def eager(self) -> Tensor:
        twin = copy.deepcopy(self.unet)
        restore(twin)
        return self.run(twin)

    @property
    def resnet(self) -> Any:
        return self.unet.mid_block.resnets[0]

    @property
    def block(self) -> Any:
        return self.unet.mid_block.attentions[0].transformer_blocks[0]


@pytest.fixture(params=[False, True], ids=["without ops", "with ops"])
def drawn(request: pytest.FixtureRequest, whole: Any) -> Drawn:
    made = Drawn(whole, request.param)
    for _ in range(3):
        made.run()
    ran = made.report.ran[NAME]
    assert ran.calls == {f"{NAME}/cuda_graph": 3} and not ran.reasons
    return made


def follows(drawn: Drawn) -> Tensor:
    """Three calls give what the network gives; that."""
    expected = drawn.eager()
    for _ in range(3):
        torch.testing.assert_close(drawn.run(), expected, rtol=0, atol=5e-5)
    return expected


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def data(weight: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    weight.data = change(weight.data)


def louder(self: Any, sample: Tensor, timestep: Tensor) -> Tensor:
    return 2 * UNet2DConditionModel.get_time_embed(self, sample, timestep)


def twice(drawn: Drawn) -> None:
    """The second in the place of the first, which a graph was made of."""
    for factor in (1, 2):
        drawn.unet.get_time_embed = MethodType(
            lambda self, sample, timestep, factor=factor: (
                factor * UNet2DConditionModel.get_time_embed(self, sample, timestep)
            ),
            drawn.unet,
        )
        drawn.run()


@torch.no_grad()
def scaled(weight: Tensor) -> None:
    weight.mul_(1.5)


CHANGES: dict[str, Callable[[Drawn], Any]] = {
    "data transposed": lambda one: data(one.block.attn1.to_out[0].weight, Tensor.t),
    "data in another order": lambda one: data(
        one.block.attn2.to_k.weight, lambda weight: weight.as_strided(weight.shape, (1, len(weight)))
    ),
    "data elsewhere": lambda one: data(one.resnet.conv1.weight, lambda weight: weight * 1.5),
    "data in place": lambda one: one.resnet.conv1.weight.data.mul_(1.5),
    "keys in place": lambda one: scaled(one.block.attn2.to_k.weight),
    "a state dict": lambda one: one.unet.load_state_dict(
        {k: 1.1 * v for k, v in one.unet.state_dict().items()}
    ),
    "a state dict assigned": lambda one: one.unet.load_state_dict(
        {k: 1.1 * v for k, v in one.unet.state_dict().items()}, assign=True
    ),
    "another layer's attributes": lambda one: vars(one.resnet.conv1).update(
        vars(copy.deepcopy(one.resnet.conv2))
    ),
    "to bfloat16 and back": lambda one: one.unet.bfloat16().float(),
    "eps of a GroupNorm": lambda one: setattr(one.resnet.norm1, "eps", 10.0),
    "eps of a LayerNorm": lambda one: setattr(one.block.norm1, "eps", 10.0),
    "a factor of attention": lambda one: setattr(one.block.attn1, "rescale_output_factor", 3.0),
    "a factor of a block": lambda one: setattr(one.resnet, "output_scale_factor", 3.0),
    "the config registered": lambda one: one.unet.register_to_config(center_input_sample=True),
    "the config's attribute": lambda one: setattr(one.unet.config, "center_input_sample", True),
    "the timestep's embedding": lambda one: setattr(one.unet.time_proj, "flip_sin_to_cos", False),
    "another activation": lambda one: setattr(one.resnet, "nonlinearity", nn.ReLU()),
    "FreeU": lambda one: one.unet.enable_freeu(0.9, 0.2, 1.2, 1.4),
    "a method": lambda one: setattr(one.unet, "get_time_embed", MethodType(louder, one.unet)),
    "a method again": twice,
    "GEGLU's activation": lambda one: setattr(one.block.ff.net[0], "gelu", torch.relu),
    "a parametrisation": lambda one: nn.utils.parametrize.register_parametrization(
        one.resnet.conv1, "weight", Twice()
    ),
    "a hook": lambda one: one.resnet.register_forward_hook(lambda module, given, out: out * 2),
    "a hook before": lambda one: one.resnet.conv1.register_forward_pre_hook(
        lambda module, given: given[0] * 2
    ),
    "another block": lambda one: setattr(one.unet.mid_block, "resnets", one.unet.mid_block.resnets[::-1]),
    "the context in place": lambda one: one.context.mul_(1.1),
    "the context elsewhere": lambda one: data(one.context, lambda held: held * 1.1),
    "the image past PyTorch": lambda one: one.x.numpy().__imul__(1.1),
    "the timestep past PyTorch": lambda one: one.timestep.data.add_(100),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changes_the_picture_is_followed(drawn: Drawn, change: Callable[[Drawn], Any]) -> None:
    before = drawn.run()
    change(drawn)
    assert (follows(drawn) - before).abs().max() > 1e-4


class Louder(TorchDispatchMode):
    def __torch_dispatch__(self, run: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = run(*args, **(kwargs or {}))
        return made * 1.01 if run is torch.ops.aten.convolution.default else made


class LouderFunction(TorchFunctionMode):
    def __torch_function__(self, run: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = run(*args, **(kwargs or {}))
        return made * 1.01 if run is torch.conv2d else made


@contextlib.contextmanager
def replaced(holder: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, make(before))
    try:
        yield
    finally:
        setattr(holder, name, before)


def doubled(before: Any) -> Any:
    return lambda *args, **kwargs: 2 * before(*args, **kwargs)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "a class's forward": lambda: replaced(FeedForward, "forward", doubled),
    "a class of torch's": lambda: replaced(nn.Conv2d, "forward", doubled),
    "a class's method": lambda: replaced(UNet2DConditionModel, "get_time_embed", doubled),
    "a file's function": lambda: replaced(embeddings, "get_timestep_embedding", doubled),
    "a function of torch's": lambda: replaced(torch.nn.functional, "conv2d", doubled),
    "a mode of the dispatcher": Louder,
    "a mode of functions": LouderFunction,
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS.keys())
def test_what_changes_for_everybody_is_followed_and_left_again(
    drawn: Drawn, context: Callable[[], Any]
) -> None:
    before = follows(drawn)
    with context():
        assert (follows(drawn) - before).abs().max() > 1e-4
    torch.testing.assert_close(follows(drawn), before, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", [nn.Linear, nn.GroupNorm, BasicTransformerBlock])
def test_a_class_in_whose_place_an_op_stands_is_followed_from_the_next_time_on(whole: Any, kind: Any) -> None:
    """As docs/accelerate.md says: what is in place when the class is changed runs on."""
    drawn = Drawn(whole, True)
    before = drawn.run()
    with replaced(kind, "forward", doubled):
        drawn.report = accelerate(drawn.unet, executor="cuda_graph")
        assert "its forward was replaced" in str(drawn.report)
        assert (follows(drawn) - before).abs().max() > 1e-4


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: sdpa_kernel(SDPBackend.MATH)])
def test_modes_that_change_nothing_are_followed(drawn: Drawn, mode: Callable[[], Any]) -> None:
    with mode():
        follows(drawn)
    follows(drawn)


def test_a_processor_that_is_a_module_runs_at_every_call(drawn: Drawn) -> None:
    calls: list[int] = []

    class Registered(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return AttnProcessor2_0()(*args, **kwargs)

    drawn.block.attn1.set_processor(Registered())
    for _ in range(3):
        drawn.run()
    assert len(calls) == 3 and "(Registered) is somebody's own code" in str(drawn.report)


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.context.data.mul_(1.5),
        lambda one: one.block.attn2.to_k.weight.data.mul_(1.5),
    ],
    ids=["the context", "weights of keys"],
)
def test_what_is_kept_of_a_context_is_not_followed_past_pytorch(whole: Any, change: Any) -> None:
    """As docs/accelerate.md says, with what helps."""
    drawn = Drawn(whole, True)
    before = drawn.run()
    change(drawn)
    assert (drawn.run() - before).abs().max() < 5e-5
    drawn.context = drawn.context.clone()
    assert (follows(drawn) - before).abs().max() > 1e-4
    change(drawn)
    forget(drawn.unet)
    follows(drawn)
