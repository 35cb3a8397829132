"""What is recorded repeats the call for other inputs; what no list of operations stands for is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearway.execution.kept import Kept, inside
from clearway.execution.recorded import UnrecordableError, record
from recorded_programs import Holding, names, ran, recorded


def test_a_program_repeats_the_call_for_other_inputs() -> None:
    layers = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(2))
    program = recorded(layers, torch.randn(1, 4, 6, 6))
    assert names(program) == ["conv2d", "group_norm", "silu", "flatten"]
    for _ in range(3):
        x = torch.randn(1, 4, 6, 6)
        with torch.no_grad():
            assert torch.equal(ran(program, x), layers(x))


def test_the_recorded_call_gives_its_output_and_leaves_no_mark() -> None:
    x = torch.randn(3)
    _, output = record(lambda: {"y": (x * 2, 5)}, [x], [])
    assert torch.equal(output["y"][0], x * 2) and output["y"][1] == 5
    assert not vars(x) and not vars(output["y"][0])


def test_weights_are_the_modules_own_and_numbers_are_constants() -> None:
    scale = torch.randn(3)
    module = Holding(lambda m, x: x * m.scale + torch.tensor([1.0, 2.0, 3.0]), scale=scale)
    program = recorded(module, torch.zeros(3))
    scale.fill_(10)  # live: seen by what was recorded
    assert torch.equal(ran(program, torch.ones(3)), torch.tensor([11.0, 12.0, 13.0]))


def test_writing_into_what_the_call_made_is_recorded_as_a_value() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1).mul_(x)
        z = y.exp()
        return nn.functional.silu(z, inplace=True) + y

    program, x = recorded(Holding(run), torch.randn(4)), torch.randn(4)
    assert names(program) == ["mul", "add", "mul", "exp", "silu", "add"]
    assert torch.equal(ran(program, x), run(nn.Module(), x))


def test_writing_into_what_has_views_is_refused() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = x * 2
        row = y.view(2, 2)
        y.add_(1)
        return row

    with pytest.raises(UnrecordableError, match="changes a tensor in place"):
        recorded(Holding(run), torch.randn(4))


def test_outputs_of_many_and_structures_are_kept() -> None:
    module = Holding(lambda m, x: {"halves": x.chunk(2), "none": None})
    found = ran(recorded(module, torch.zeros(4)), torch.arange(4.0))
    assert found["none"] is None and [half.tolist() for half in found["halves"]] == [[0, 1], [2, 3]]


def test_rows_taken_by_number_are_recorded_and_by_a_mask_refused() -> None:
    program = recorded(Holding(lambda m, x, at: x[at, 1]), torch.randn(3, 2), torch.tensor([0, 1]))
    x = torch.randn(3, 2)
    assert torch.equal(ran(program, x, torch.tensor([2, 2])), x[[2, 2], 1])


def noise(m: Any, x: Tensor) -> Tensor:
    return x + torch.randn(3)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda m, x: x.add_(1), "changes a tensor in place"),
        (lambda m, x: x * float(x.sum()), "reads a number"),
        (lambda m, x: x if bool((x > 0).all()) else -x, "reads a number"),
        (lambda m, x: x[x > 0], "reads a number"),
        (lambda m, x: x * len(x.tolist()), "tolist"),
        (lambda m, x: x * x.numpy().sum(), "numpy"),
        (noise, "draws random numbers"),
        (lambda m, x: nn.functional.dropout(x, 0.5, True), "draws random numbers"),
        (lambda m, x: x + m.foreign, "neither an argument nor a weight"),
    ],
)
def test_what_no_list_stands_for_is_refused(run: Any, reason: str) -> None:
    module = Holding(run)
    module.__dict__["foreign"] = torch.ones(3)
    with pytest.raises(UnrecordableError, match=reason):
        recorded(module, torch.ones(3))


def test_values_that_others_keep_are_made_anew() -> None:
    """A value kept for the first input would be wrong for the second."""
    kept, weight = Kept(), torch.full((3,), 2.0)
    module = Holding(lambda m, x: kept.get(x, (m.weight,), lambda: (x * m.weight,))[0], weight=weight)
    x = torch.ones(3)
    module(x)
    program = recorded(module, x)
    assert ran(program, torch.full((3,), 5.0)).tolist() == [10.0] * 3
    seen = []
    record(lambda: seen.append(inside()), [], [])
    assert seen == [True]
