"""Generated code gives what the steps give, writes into nothing that is read later, and hands out its own."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from clearway.execution.generated import generated, lasting_values
from clearway.execution.recorded import Program
from clearway.execution.rewrite import simplified
from recorded_programs import Holding, ran, recorded


def program_of(run: Any, *inputs: Tensor, **tensors: Tensor) -> tuple[Program, nn.Module]:
    module = Holding(run, **tensors)
    return simplified(recorded(module, *inputs)), module


def test_elementwise_steps_write_into_what_is_not_read_again() -> None:
    program, module = program_of(lambda m, x: F.silu(x * 2 + 1) / 3, torch.randn(4))
    source = generated(program).source
    x = torch.randn(4)
    assert torch.equal(ran(program, x), module(x))
    assert source.count("f") >= 4


def chain(m: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Views, halves and sums whose operands live on for a while."""
    a = x * 2
    b = a.view(2, 4).t()
    c = F.silu(b)
    d = a + 1
    e, f = d.chunk(2)
    g = F.gelu(e) + f
    h = y.view(-1) + g.expand(2, 4).reshape(-1)[:8]
    i = h - m.weight
    j = F.silu(i)
    return {"i": i, "out": j + c.reshape(-1), "y": y.view(2, 4), "weight": m.weight, "c": c}


@given(st.integers(0, 2**31))
def test_nothing_that_is_read_later_is_written(seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    x, y, weight = (torch.randn(8, generator=drawn) for _ in range(3))
    program, module = program_of(chain, x, y, weight=weight)
    before = x.clone(), y.clone(), weight.clone()
    expected = module(x, y)
    for _ in range(2):
        found = ran(program, x, y)
        for name, one in expected.items():
            torch.testing.assert_close(found[name], one, rtol=0, atol=1e-6)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1]) and torch.equal(weight, before[2])
    for one in found.values():  # the caller may write into what it was given
        one.zero_()
    assert torch.equal(x, before[0]) and torch.equal(y, before[1]) and torch.equal(weight, before[2])


def test_what_lasts_is_computed_apart_and_never_written_into() -> None:
    def run(m: nn.Module, x: Tensor, context: Tensor) -> Any:
        key = F.silu(context * m.weight)
        return F.gelu(x + key) + key, key

    x, context, weight = torch.randn(3), torch.randn(3), torch.randn(3)
    program, module = program_of(run, x, context, weight=weight)
    function = generated(program, [1])
    assert len(lasting_values(program, [1])) == 3
    kept = function.once(context)
    for _ in range(2):
        found, expected = function.run(x, context, *kept), module(x, context)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        found[1].zero_()
        assert torch.equal(kept[0], expected[1])


def test_outputs_keep_their_layout_where_it_was_plain() -> None:
    conv = nn.Conv2d(4, 4, 1).requires_grad_(False).to(memory_format=torch.channels_last)
    x = torch.randn(1, 4, 5, 5)
    program = simplified(recorded(conv, x))
    program.contiguous = [program.output]
    assert ran(program, x).is_contiguous()


def test_constants_of_every_kind_are_named() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = torch.full((2,), float("inf"), dtype=torch.float64, device="cpu") + x.sum(
            dim=[0], dtype=torch.float64
        )
        return torch.where(x[:1] > 0, y, -y)

    program, module = program_of(run, torch.ones(3))
    assert torch.equal(ran(program, -torch.ones(3)), module(-torch.ones(3)))


@pytest.mark.parametrize("output", [None, 5, ("text", 1.5)])
def test_outputs_without_tensors(output: Any) -> None:
    program, _ = program_of(lambda m, x: output, torch.ones(3))
    assert ran(program, torch.ones(3)) == output
