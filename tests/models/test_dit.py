"""Transformers under accelerate: the same result, taken back exactly, others' things left alone."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearway.models import _dit
from clearway.models._bound import Bound
from clearway.models.accelerate import EVERY, OPS, accelerate, restore
from clearway.ops import contract
from dit_builders import inputs, seeded, tiny_flux, tiny_sd3, tiny_sd35
from marks import bits, marks

MAKERS = {"flux": tiny_flux, "sd3": tiny_sd3, "sd35": tiny_sd35}
ROUTES = {
    "flux": {"adaln_modulate", "attention", "rms_norm", "rope"},
    "sd3": {"adaln_modulate", "attention"},
    "sd35": {"adaln_modulate", "attention", "rms_norm"},
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """By name; whoever changes one takes a copy."""
    return {name: maker() for name, maker in MAKERS.items()}


def close(actual: Tensor, expected: Tensor) -> None:
    """Within two orders of the same sums in float32, within bfloat16's steps else."""
    wide = expected.dtype in (torch.float32, torch.float64)
    within = {"rtol": 1e-4, "atol": 2e-5} if wide else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(actual, expected, **within)


def run(model: Any, given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**given)[0]
    return out


def counted(model: Any, given: dict[str, Any]) -> tuple[Tensor, dict[str, int]]:
    routes: dict[str, int] = {}
    with contract.recording(routes):
        out = run(model, given)
    by_op: dict[str, int] = {}
    for route, times in routes.items():
        op = route.partition("/")[0]
        by_op[op] = by_op.get(op, 0) + times
    return out, by_op


@pytest.mark.parametrize("size", [(1, 4, 6), (2, 3, 5), (3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_gives_the_same(
    models: dict[str, Any], name: str, dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    model = copy.deepcopy(models[name]).to(dtype)
    given = inputs(model, *size)
    expected, before, values = run(model, given), marks(model), bits(model)
    report = accelerate(model)
    assert not report.left and set(report.placed) == ROUTES[name]
    found, routes = counted(model, given)
    close(found, expected)
    assert set(routes) == ROUTES[name]
    restore(model)
    assert torch.equal(run(model, given), expected)
    assert marks(model) == before
    assert bits(model) == values


def test_every_norm_with_modulation_is_one_op(models: dict[str, Any]) -> None:
    """Flux: two streams twice in each of two blocks, once in each single one and once at the end; queries
    and keys of both streams, then of one. SD 3.5: a third norm of x in two of its three blocks."""
    model = copy.deepcopy(models["flux"])
    accelerate(model)
    _, routes = counted(model, inputs(model, 1, 4, 6))
    assert routes == {"adaln_modulate": 2 * 4 + 2 + 1, "attention": 4, "rms_norm": 2 * 4 + 2 * 2, "rope": 8}
    model = copy.deepcopy(models["sd35"])
    accelerate(model)
    _, routes = counted(model, inputs(model, 1, 4, 6))
    assert routes == {"adaln_modulate": (5 + 5 + 3) + 1, "attention": 3 + 2, "rms_norm": 3 * 4 + 2 * 2}


@pytest.mark.parametrize("op", ["adaln_modulate", "rms_norm", "attention"])
@pytest.mark.parametrize("name", ["flux", "sd35"])
def test_each_op_alone(models: dict[str, Any], name: str, op: str) -> None:
    model = copy.deepcopy(models[name])
    given = inputs(model, 2, 4, 6)
    expected = run(model, given)
    report = accelerate(model, (op,))
    assert set(report.placed) == {op}
    found, routes = counted(model, given)
    close(found, expected)
    assert set(routes) == {op}


def test_a_unet_s_ops_leave_norms_of_transformers_alone(models: dict[str, Any]) -> None:
    assert {*EVERY} == {*OPS, *_dit.OPS} and not {*OPS} & {*_dit.OPS}
    model = copy.deepcopy(models["flux"])
    assert set(accelerate(model, OPS).placed) == {"attention"}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_a_gradient_takes_the_classes_own_way(models: dict[str, Any], name: str, trained: bool) -> None:
    """With frozen weights that is the way of what comes from the input: its text is no part of that yet."""
    model = copy.deepcopy(models[name]).requires_grad_(trained)
    given = inputs(model, 2, 3, 4)
    given["hidden_states"].requires_grad_()
    accelerate(model)
    routes: dict[str, int] = {}
    with contract.recording(routes):
        model(**given)[0].square().sum().backward()
    assert not trained or routes == {}
    found, given["hidden_states"].grad = given["hidden_states"].grad, None
    restore(model)
    model(**given)[0].square().sum().backward()
    torch.testing.assert_close(found, given["hidden_states"].grad, rtol=1e-4, atol=1e-4)
    assert not trained or torch.equal(found, given["hidden_states"].grad)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["flux", "sd35"])
def test_a_copy_works_and_is_restored_by_itself(
    models: dict[str, Any], name: str, copied: Callable[[Any], Any]
) -> None:
    model = copy.deepcopy(models[name])
    given = inputs(model, 2, 4, 6)
    expected = run(model, given)
    accelerate(model)
    twin = copied(model)
    for module in twin.modules():
        forward = vars(module).get("forward")
        assert not isinstance(forward, Bound) or forward.args[0] is module
    for weight in model.parameters():
        weight.zero_()
    close(run(twin, given), expected)
    restore(twin)
    assert torch.equal(run(twin, given), expected)


@pytest.mark.parametrize("name", ["flux", "sd35"])
def test_compiled_as_one_graph_it_gives_the_same(models: dict[str, Any], name: str) -> None:
    model = copy.deepcopy(models[name])
    given = inputs(model, 1, 4, 6)
    expected = run(model, given)
    accelerate(model)
    close(run(torch.compile(model, backend="eager", fullgraph=True), given), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["flux", "sd35"])
@pytest.mark.parametrize("where", ["norm2_context", "norm1.norm", "norm_out.norm"])
def test_a_hooked_norm_is_called(models: dict[str, Any], name: str, where: str, late: bool) -> None:
    """Before `accelerate` it is left and named; afterwards its block hands over to the class's own."""
    model = copy.deepcopy(models[name])
    given = inputs(model, 1, 4, 6)
    owner = model if where.startswith("norm_out") else model.transformer_blocks[0]
    if late:
        accelerate(model)
    owner.get_submodule(where).register_forward_hook(lambda module, args, out: out * 1.5)
    if not late:
        assert any("hooked" in reason for reason in accelerate(model).left)
    found = run(model, given)
    restore(model)
    close(found, run(model, given))


def test_hooks_of_what_is_called_still_work(models: dict[str, Any]) -> None:
    model = copy.deepcopy(models["sd35"])
    accelerate(model)
    block, seen = model.transformer_blocks[0], []
    called = ("norm1", "attn", "attn.to_q", "attn.norm_q", "attn.norm_added_k", "ff", "ff_context", "attn2")
    for name in called:
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    run(model, inputs(model, 1, 4, 6))
    assert sorted(seen) == sorted(called)


def test_chunked_feed_forwards_are_left(models: dict[str, Any]) -> None:
    model = copy.deepcopy(models["sd3"])
    given = inputs(model, 2, 4, 6)
    expected = run(model, given)
    accelerate(model)
    model.enable_forward_chunking(chunk_size=1)
    close(run(model, given), expected)
    assert "its feed-forward is chunked" in accelerate(model).left
    close(run(model, given), expected)


class LoRA(nn.Module):
    """What PEFT puts in a layer's place, in short."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base_layer(x) + self.up(self.down(x))
        return added


def wrap(model: Any) -> None:
    for module in list(model.modules()):
        for name in ("to_q", "to_k", "add_q_proj", "to_add_out", "linear", "proj_mlp", "proj", "proj_out"):
            if type(module._modules.get(name)) is nn.Linear:
                setattr(module, name, seeded(LoRA(module._modules[name])))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["flux", "sd35"])
def test_adapters_loaded_before_and_after(models: dict[str, Any], name: str, late: bool) -> None:
    model = copy.deepcopy(models[name])
    given = inputs(model, 2, 4, 6)
    plain = run(model, given)
    if late:
        accelerate(model)
    wrap(model)
    if not late:
        accelerate(model)
    found, routes = counted(model, given)
    assert set(routes) == ROUTES[name]
    restore(model)
    expected = run(model, given)
    close(found, expected)
    assert (expected - plain).abs().max() > 1e-2


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_norm_whose_result_has_another_dtype_is_the_class_s_own(half: torch.dtype) -> None:
    """Diffusers' RMSNorm with float32 weights makes float32 of half precision."""
    from diffusers.models.normalization import RMSNorm

    norm = seeded(RMSNorm(16, eps=1e-6))
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(4)).to(half)
    expected = run_norm(norm, x)
    accelerate(norm)
    assert torch.equal(run_norm(norm, x), expected) and expected.dtype == torch.float32
    norm.to(half)
    assert run_norm(norm, x).dtype == half


def run_norm(norm: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = norm(x)
    return out


def test_norms_that_the_op_does_not_give_are_left() -> None:
    from diffusers.models.normalization import AdaLayerNormContinuous, RMSNorm

    for norm in (
        RMSNorm(8, eps=1e-6, bias=True),
        nn.RMSNorm(8),
        nn.RMSNorm((4, 8), eps=1e-6),
        AdaLayerNormContinuous(8, 8),
        AdaLayerNormContinuous(8, 8, elementwise_affine=False, norm_type="rms_norm"),
    ):
        report = accelerate(norm)
        assert report.left and not report.placed.keys() & {"adaln_modulate"}


def test_a_norm_that_makes_its_embedding_itself() -> None:
    """AdaLayerNormZero as DiT has it: from a time and a class."""
    from diffusers.models.normalization import AdaLayerNormZero

    norm = seeded(AdaLayerNormZero(16, num_embeddings=10))
    given = torch.randn(2, 3, 16), torch.tensor([3, 700]), torch.tensor([1, 4])
    with torch.no_grad():
        expected = norm(*given, hidden_dtype=torch.float32)
        accelerate(norm)
        found = norm(*given, hidden_dtype=torch.float32)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
