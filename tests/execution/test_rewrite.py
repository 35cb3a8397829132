"""Steps that do nothing, repeat others, depend on weights or are not used go; values stay to the bit."""

import pytest
import torch
from torch import Tensor, nn

from clearway.execution.recorded import UnrecordableError
from clearway.execution.rewrite import simplified, used
from recorded_programs import Holding, names, ran, recorded


def test_what_changes_no_value_goes() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = nn.functional.dropout(x.contiguous().clone(), 0.3, False).to(torch.float32) / 1.0 * 1
        return torch.sigmoid(y.detach().reshape(2, 3))

    program = simplified(recorded(Holding(run), torch.randn(2, 3)))
    assert names(program) == ["sigmoid"]


def test_a_cast_or_a_factor_that_does_something_stays() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        return (x.to(torch.float64) * 1.5).expand(4, 3)

    program, x = simplified(recorded(Holding(run), torch.randn(1, 3))), torch.randn(1, 3)
    assert torch.equal(ran(program, x), (x.double() * 1.5).expand(4, 3))


def test_views_become_reshapes_that_every_layout_takes() -> None:
    module = Holding(lambda m, x: (x.permute(0, 2, 3, 1).contiguous() + 1).view(2, 9, 4))
    program = simplified(recorded(module, torch.randn(2, 4, 3, 3)))
    assert names(program) == ["permute", "add", "reshape"]
    x = torch.randn(2, 4, 3, 3)
    assert torch.equal(ran(program, x), module(x))
    assert torch.equal(ran(program, x.contiguous(memory_format=torch.channels_last)), module(x))


def test_equal_steps_are_done_once_and_other_ones_twice() -> None:
    module = Holding(lambda m, x: x.sin() + x.sin() + x.mul(2) + x.mul(2.0) + x.sum(0) + x.sum(0, True))
    program, x = simplified(recorded(module, torch.randn(2, 2))), torch.randn(2, 2)
    assert names(program).count("sin") == 1 and names(program).count("sum") == 2
    assert torch.equal(ran(program, x), module(x))


def test_what_depends_on_weights_alone_is_computed_once() -> None:
    module = Holding(lambda m, x: x @ (m.weight.exp() + torch.arange(3)), weight=torch.randn(3, 3))
    program, x = simplified(recorded(module, torch.randn(2, 3))), torch.randn(2, 3)
    assert names(program) == ["matmul"]
    assert torch.equal(ran(program, x), module(x))


def test_unread_steps_go_and_outputs_stay() -> None:
    module = Holding(lambda m, x: (x.exp(), x.cos())[0])
    assert names(used(recorded(module, torch.randn(2)))) == ["exp"]


def test_what_means_memory_is_refused() -> None:
    module = Holding(lambda m, x: x.as_strided((2,), (2,)))
    with pytest.raises(UnrecordableError, match="laid out"):
        simplified(recorded(module, torch.randn(4)))
