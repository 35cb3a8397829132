"""What executors read off a call: whose it is, what is promised, why nothing of it can be kept."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from clearway.execution.calls import Call, copied, defaults, owner_of, told


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2).requires_grad_(False)

    def other(self, x: Any) -> Any:
        return self.layer(x)


def test_the_owner_of_a_module_a_method_and_a_function() -> None:
    network = Network()
    assert owner_of(network) is owner_of(network.other) is network
    assert owner_of(len) is None and owner_of([].append) is None
    assert Call.of(network, (), {}).itself and not Call.of(network.other, (), {}).itself


def test_promises_follow_the_tensors_in_order() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    call = Call.of(len, (x, [y, 3]), {"held": {"a": x, "b": None}, "free": y})
    assert call.tensors == [x, y, x, y] and call.leaves.count(3) == 1
    assert call.promises(("held",)) == [False, False, True, False]


def test_promises_of_empty_and_foreign_values() -> None:
    x = torch.zeros(1)
    call = Call.of(len, (x, None, 0, "a", [], np.zeros(2)), {"held": x, "more": (None, [x])})
    assert call.promises(("held", "more")) == [False, True, True]


@pytest.mark.parametrize(
    "nest", [lambda x: x, lambda x: (x,), lambda x: (x, None, 2), lambda x: {"a": [x, 1]}]
)
def test_a_copied_output_is_the_callers_own(nest: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(2)
    made = copied(nest(x))
    assert type(made) is type(nest(x)) and str(made) == str(nest(x))
    x.zero_()
    assert str(made) != str(nest(x))


def test_what_nothing_can_be_kept_of() -> None:
    network, x = Network(), torch.zeros(2)
    assert Call.of(network, (x,), {"a": "b", "c": 1.5}).refuse() is None
    assert "no tensor" in str(Call.of(network, (1,), {}).refuse())
    assert "no key" in str(Call.of(network, (x, bytearray()), {}).refuse())
    with torch.autocast("cpu"):
        assert "autocast" in str(Call.of(network, (x,), {}).refuse())
    assert "gradient" in str(Call.of(network, (x.clone().requires_grad_(),), {}).refuse())
    network.requires_grad_(True)
    assert "gradient" in str(Call.of(network.other, (x,), {}).refuse())
    with torch.no_grad():
        assert Call.of(network, (x,), {}).refuse() is None


class Mutable:
    """Hashable, and another thing whenever somebody likes."""


@pytest.mark.parametrize("argument", [Mutable(), len, lambda: None, torch.Generator(), {1, 2}, np.zeros(2)])
def test_what_may_change_or_do_something_is_no_key(argument: Any) -> None:
    assert "no key" in str(Call.of(Network(), (torch.zeros(2),), {"given": [argument]}).refuse())


@pytest.mark.parametrize(
    "argument", [np.int64(3), 1j, b"a", torch.float16, torch.device("cpu"), torch.strided]
)
def test_constants_are_keys(argument: Any) -> None:
    assert Call.of(Network(), (torch.zeros(2),), {"given": [argument]}).refuse() is None


class Other(TorchDispatchMode):
    def __torch_dispatch__(self, run: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, run: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(*args, **(kwargs or {}))


class Watching(Other):
    watches = True


@pytest.mark.parametrize("mode", [Other, Function])
def test_a_mode_that_may_do_another_operation_sees_them_all(mode: Any) -> None:
    call = Call.of(Network(), (torch.zeros(2),), {})
    with mode():
        assert call.refuse() == f"{mode.__name__} sees its operations"
    with Watching(), torch.device("cpu"):
        assert call.refuse() is None
    assert call.refuse() is None


def test_a_trace_is_made_of_the_module_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_tracing_state", object)
    assert Call.of(Network(), (torch.zeros(2),), {}).refuse() == "torch.jit is tracing"


def test_defaults_are_those_of_tensors_made_now() -> None:
    before = defaults()
    with torch.device("meta"):
        assert defaults() != before
    torch.set_default_dtype(torch.float64)
    try:
        assert defaults() != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert defaults() == before


@pytest.mark.parametrize(("calls", "words"), [(2, "ran eagerly: why"), (3, "ran eagerly at times: why")])
def test_reasons_are_told(calls: int, words: str) -> None:
    assert told("the UNet", Counter({"why": 2}), calls) == [f"the UNet {words}"]
    assert told("the UNet", Counter(), calls) == []
