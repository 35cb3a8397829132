"""The linear layer of many rows: the formula, what is preferred where, and how a choice is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _cublaslt, _linear_choices, ahead, selftest, state
from clearway.ops._cublaslt import Choice, Failed, Shape
from clearway.ops.contract import REFERENCE
from clearway.ops.linear import inputs, linear
from clearway.ops.state import BuildError
from ops.registry import named, refused

CUBLASLT = named(linear, "cublaslt")


def test_matches_the_formula() -> None:
    x, weight, bias = (arg.double() for arg in inputs(3, 4, 2, 5))
    y = linear(x, weight, bias)
    for i in range(2):
        for j in range(5):
            for n in range(4):
                expected = sum(x[i, j, k] * weight[n, k] for k in range(3)) + bias[n]
                torch.testing.assert_close(y[i, j, n], expected)
    torch.testing.assert_close(linear(x, weight, None) + bias, y)


def test_on_a_gpu_it_runs_where_it_is_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `_prepare` and a sound verdict would have it there, with tensors of this CPU."""
    args = tuple(arg.half() for arg in inputs(16, 24, 4))
    monkeypatch.setattr(state, "verdict", lambda *_: None)
    monkeypatch.setitem(linear._ready, "cpu", (state.version(), (CUBLASLT,)))
    assert linear.route(*args).name == "cublaslt"  # what is ready runs where no table says otherwise
    monkeypatch.setitem(linear.defaults, "cpu", linear.defaults["cuda"])
    assert linear.route(*args).name == REFERENCE


def test_what_it_takes() -> None:
    for bias in (True, False):
        for leading in ((4,), (2, 3), (1, 1, 7)):
            args = tuple(None if arg is None else arg.half() for arg in inputs(16, 24, *leading, bias=bias))
            assert refused(CUBLASLT, args) is None
    x, weight, bias = (arg.half() for arg in inputs(16, 24, 4))
    assert "gradient" in str(refused(CUBLASLT, (x, weight.requires_grad_(), bias)))
    assert "(N, 0)" in str(refused(CUBLASLT, (torch.ones((), dtype=torch.float16), weight.detach(), bias)))


def test_rows_of_no_elements_are_refused_with_a_sentence() -> None:
    x, weight, bias = torch.zeros(4, 0), torch.zeros(24, 0), torch.zeros(24)
    assert "no elements" in str(CUBLASLT.refuse(x.half(), weight.half(), bias.half()))
    assert (
        torch.equal(linear(x, weight, bias), torch.zeros(4, 24)) and linear.bytes_moved(x, weight, bias) == 0
    )


def test_sums_in_float16_are_the_caller_s_own_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    args = tuple(arg.half() for arg in inputs(16, 24, 4))
    matmul = SimpleNamespace(allow_fp16_accumulation=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    assert "float16" in str(refused(CUBLASLT, args))


class Known:
    """What stands in for the choices of the process; its binding computes in float64."""

    def __init__(self, choice: Choice | None) -> None:
        self.choice = choice
        self.asked: list[tuple[Shape, torch.device]] = []
        self.ran: list[Choice] = []
        self.binding = self

    def of(self, shape: Shape, device: torch.device) -> Choice | None:
        self.asked.append((shape, device))
        return self.choice

    def run(self, shape: Shape, choice: Choice, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert x.shape == (shape.rows, shape.inputs)
        self.ran.append(choice)
        return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


def half(*args: Any) -> tuple[Any, ...]:
    return tuple(arg if arg is None else arg.half() for arg in args)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(6,), (2, 3)])
def test_a_choice_is_taken_on_rows(
    monkeypatch: pytest.MonkeyPatch, leading: tuple[int, ...], bias: bool
) -> None:
    known = Known(Choice(3, bytes(64), 0))
    monkeypatch.setattr(_linear_choices, "choices", lambda: known)
    args = half(*inputs(16, 24, *leading, bias=bias))
    out = CUBLASLT.run(*args)
    torch.testing.assert_close(out, F.linear(*args))
    assert out.shape == (*leading, 24) and known.ran == [known.choice]
    assert known.asked == [(Shape(-1, torch.float16, 6, 24, 16, bias), torch.device("cpu"))]
    assert selftest.problem(linear, CUBLASLT, args) == ""


def test_without_a_choice_it_is_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Known(None)
    monkeypatch.setattr(_linear_choices, "choices", lambda: known)
    args = half(*inputs(16, 24, 2, 3))
    assert torch.equal(CUBLASLT.run(*args), F.linear(*args)) and known.asked and not known.ran


def test_where_launches_are_left_out_it_is_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    known, outs = Known(Choice(3, bytes(64), 0)), list[Tensor]()
    monkeypatch.setattr(_linear_choices, "choices", lambda: known)
    args = half(*inputs(16, 24, 2, 3))
    assert ahead.build(lambda: outs.append(CUBLASLT.run(*args))) == 0
    assert torch.equal(outs[0], F.linear(*args)) and not known.asked and not known.ran
    CUBLASLT.run(*args)
    assert known.ran


def test_memory_that_begins_at_odd_addresses_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Known(Choice(3, bytes(64), 0))
    monkeypatch.setattr(_linear_choices, "choices", lambda: known)
    _, weight, bias = half(*inputs(16, 24, 4))
    raw = bytearray(4 * 16 * 2 + 16)
    whole = torch.frombuffer(raw, dtype=torch.uint8)
    x = torch.frombuffer(raw, dtype=torch.float16, offset=2 if whole.data_ptr() % 16 == 0 else 0, count=64)
    x = x.view(4, 16)
    assert x.data_ptr() % 16
    torch.testing.assert_close(CUBLASLT.run(x, weight, bias), F.linear(x, weight, bias))
    assert not known.asked


def test_what_cannot_be_run_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise Failed("cublasLtCreate gave CUBLAS_STATUS_NOT_INITIALIZED (1)")

    monkeypatch.setattr(_linear_choices, "choices", none)
    with pytest.raises(BuildError, match="NOT_INITIALIZED"):
        CUBLASLT.run(*half(*inputs(16, 24, 4)))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_device_in_a_graph_too(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """What is chosen by trial gives the same bits eagerly, in a captured graph, and to another process."""
    if not torch.cuda.is_available() or _cublaslt.absent():
        pytest.skip("no CUDA device, or no cuBLASLt")
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    for leading, outputs, width, bias in (((2, 512), 1920, 640, False), ((2, 512), 640, 2560, True)):
        args = [
            None if arg is None else arg.to("cuda", dtype)
            for arg in inputs(width, outputs, *leading, bias=bias)
        ]
        outs = []
        for choices in (_linear_choices.Choices(_cublaslt.binding()) for _ in range(2)):
            monkeypatch.setattr(_linear_choices, "choices", lambda found=choices: found)
            out = CUBLASLT.run(*args)
            torch.testing.assert_close(out, F.linear(*args), atol=2e-2, rtol=0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = CUBLASLT.run(*args)
            captured.zero_()
            graph.replay()
            outs += [out, captured]
        assert all(torch.equal(out, outs[0]) for out in outs)
