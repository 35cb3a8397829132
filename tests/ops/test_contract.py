"""Registration, routing, explaining, counting and torch.compile, on small ops made for the purpose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clearway.errors import RequestError, UnavailableError
from clearway.ops import budget, contract, state
from clearway.ops.contract import OPS, Op, recording, use

_numbers = itertools.count()


def toy(compile: str = "opaque", **more) -> Op:
    """A fresh op, x * factor, with `first` (even widths), `second` (always) and `elsewhere` (for MPS)."""
    name = f"toy_{next(_numbers)}"

    def reference(x: Tensor, factor: float = 2.0) -> Tensor:
        """x times a factor."""
        return x * factor

    reference.__name__ = name
    made = contract.op(cases=lambda: [("one", (torch.ones(2, 4),))], compile=compile, **more)(reference)

    def odd(x: Tensor, factor: float) -> str | None:
        return f"the last axis is {x.shape[-1]}, which is odd" if x.shape[-1] % 2 else None

    @made.implementation("first", device="cpu", refuse=odd, stock=True)
    def _first(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @made.implementation("second", device="cpu", stock=True)
    def _second(x: Tensor, factor: float) -> Tensor:
        return (x.transpose(-1, -2) * factor).contiguous().transpose(-1, -2)  # a layout of its own

    @made.implementation("elsewhere", device="mps", stock=True)
    def _elsewhere(x: Tensor, factor: float) -> Tensor:
        raise AssertionError("not on a CPU")

    @made.implementation("never", device="cpu", absent=lambda: "the moon is not full", stock=True)
    def _never(x: Tensor, factor: float) -> Tensor:
        raise AssertionError("absent")

    return made


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    state.forget()
    yield
    state.forget()
    for name in [name for name in OPS if name.startswith("toy_")]:
        del OPS[name]


even, odd = torch.ones(3, 4), torch.ones(4, 3)


def test_the_first_that_does_not_refuse_is_taken() -> None:
    op = toy()
    assert op.route(even).name == "first"
    assert op.route(odd).name == "second"
    assert op.route(even.to("meta")).name == "reference"
    assert torch.equal(op(odd, 3.0), odd * 3)
    assert torch.equal(op(odd, factor=3.0), odd * 3) and torch.equal(op(x=odd), odd * 2)


def test_arguments_are_python_s() -> None:
    op = toy()
    for bad in (
        lambda: op(),
        lambda: op(even, 1.0, 2.0),
        lambda: op(even, x=even),
        lambda: op(even, scale=1),
    ):
        with pytest.raises(TypeError, match=op.name):
            bad()


def test_explain_gives_a_reason_for_each() -> None:
    op = toy()
    reasons = {d.implementation: (d.taken, d.reason) for d in op.explain(odd)}
    assert reasons["first"] == (False, "the last axis is 3, which is odd")
    assert reasons["second"] == (True, "")
    assert reasons["elsewhere"] == (False, "it is for mps, these are on cpu")
    assert reasons["never"] == (False, "the moon is not full")
    assert reasons["reference"] == (False, "second comes before it")
    on_mps = {d.implementation: d.taken for d in op.explain(even.to("meta"), kind="mps")}
    assert on_mps == {"first": False, "second": False, "elsewhere": True, "never": False, "reference": False}


def test_a_named_one_is_taken_or_raises() -> None:
    op = toy()
    with use(**{op.name: "second"}):
        assert op.route(even).name == "second"
        assert {d.reason for d in op.explain(even) if d.implementation == "first"} == {"second was asked for"}
    with use(**{op.name: "reference"}):
        assert op.route(even).name == "reference"
    with use(**{op.name: "first"}), pytest.raises(UnavailableError) as error:
        op(odd)
    assert str(error.value) == (
        f"{op.name}=first was asked for and cannot run: the last axis is 3, which is odd "
        "(others that can: second, reference)"
    )
    for name, words in (("elsewhere", "it is for mps"), ("never", "the moon")):
        with use(**{op.name: name}), pytest.raises(UnavailableError, match=words):
            op(even)
    assert op.route(even).name == "first"


def test_unknown_names_are_the_user_s_mistake() -> None:
    op = toy()
    with pytest.raises(RequestError, match="nearest: 'first'"), use(**{op.name: "frist"}):
        pass
    with pytest.raises(RequestError, match="is not known"), use(attenshun="math"):
        pass


def test_the_tuned_table_comes_before_the_order_and_never_over_a_refusal() -> None:
    op = toy()
    size = contract.bucket(even)
    state.store_tuned("cpu", {op.name: {f"torch.float32|{size}": "second"}})
    assert op.route(even).name == "second"
    assert op.route(torch.ones(64, 64)).name == "first"  # another size class
    state.store_tuned("cpu", {op.name: {f"torch.float32|{size}": "first"}})
    assert op.route(odd).name == "second"  # the tuned one refuses
    state.store_tuned("cpu", {op.name: {f"torch.float32|{size}": "reference"}})
    assert op.route(even).name == "reference"
    state.store_tuned("cpu", {op.name: {f"torch.float32|{size}": "gone since"}})
    assert op.route(even).name == "first"


def test_the_default_table_of_a_device_lies_between() -> None:
    op = toy(size_class=lambda x, factor: f"{x.shape[-1]}")
    op.default("cpu")(lambda x, factor: "second" if factor == 5.0 else None)
    assert op.route(even, 5.0).name == "second" and op.route(even, 2.0).name == "first"
    state.store_tuned("cpu", {op.name: {"torch.float32|4": "first"}})
    assert op.route(even, 5.0).name == "first"


def test_of_empty_arguments_no_table_is_asked() -> None:
    """Whose sizes and estimates divide by their elements."""
    op, empty = toy(size_class=lambda x, factor: f"{1 // x.numel()}"), torch.ones(0, 4)
    assert op.route(empty).name == "first"
    op.default("cpu")(lambda x, factor: "second" if 1 // x.numel() else None)
    assert op.route(empty).name == "reference" and op(empty).shape == (0, 4)
    state.store_tuned("cpu", {op.name: {"torch.float32|0": "second"}})
    assert op.route(empty).name == "reference"
    assert [one.implementation for one in op.explain(empty) if one.taken] == ["reference"]
    assert op.route(even).name == "second"


def test_an_automatic_one_that_does_not_build_is_left_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    op = toy()
    tried = []

    @op.implementation("kernel", device="cpu", stock=True)
    def _kernel(x: Tensor, factor: float) -> Tensor:
        tried.append(1)
        raise state.BuildError("the compiler says no")

    op.implementations.insert(0, op.implementations.pop())
    routes: dict[str, int] = {}
    with recording(routes):
        assert torch.equal(op(even), even * 2) and torch.equal(op(even), even * 2)
    assert routes == {f"{op.name}/first": 2} and len(tried) == 1
    assert capsys.readouterr().err.count("the compiler says no") == 1
    assert "the compiler says no" in {d.reason for d in op.explain(even)}
    state.forget()
    with (
        use(**{op.name: "kernel"}),
        pytest.raises(UnavailableError, match="was asked for and the compiler says no"),
    ):
        op(even)


def test_routes_are_counted_also_for_replays() -> None:
    op = toy()
    routes: dict[str, int] = {}
    captured: dict[str, int] = {}
    with recording(routes):
        op(even)
        with recording(captured):
            op(even)
            op(odd)
        contract.count(captured, times=3)
    contract.count(captured)  # outside of a recording: nowhere
    assert routes == {f"{op.name}/first": 4, f"{op.name}/second": 3}


def test_the_route_key_changes_with_what_routes_depend_on() -> None:
    op = toy()
    key = contract.route_key()
    with use(**{op.name: "second"}):
        named = contract.route_key()
        assert named != key
    assert contract.route_key() == key
    with use(**{op.name: "second"}):
        assert contract.route_key() == named  # a graph captured under the name serves again
    state.store_tuned("cpu", {})
    assert contract.route_key() != key
    hash(key)


def test_a_budget_passes_over_what_needs_too_much_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    op = toy()
    heavy = {"peak": lambda x, factor: 4e9, "materialises": lambda x, factor: x.shape[0] == 3}
    op.implementation("heavy", device="cpu", stock=True, **heavy)(lambda x, factor: x * factor)
    op.implementations.insert(0, op.implementations.pop())
    assert op.route(even).name == "first"
    assert "budget" in op.explain(even)[0].reason
    assert op.route(torch.ones(2, 4)).name == "heavy"  # it would not really hold them
    with use(**{op.name: "heavy"}):
        assert op.route(even).name == "heavy"
    sample = budget.Sample("cpu", 2**40, 2**40, 5e9)
    token = budget._current.set(sample)
    try:
        assert op.route(even).name == "heavy"
    finally:
        budget._current.reset(token)


class Wrapped(Tensor):
    """A tensor class of its own."""


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in jvp
def test_a_kernel_of_our_own_is_never_given_what_it_would_misread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(state.INSIDE, "1")  # no self-test for this one
    op = toy()

    @op.implementation("kernel", device="cpu")
    def _kernel(x: Tensor, factor: float) -> Tensor:
        return x * factor

    op.implementations.insert(0, op.implementations.pop())
    assert op.route(even).name == "kernel"
    needs = torch.ones(2, 4, requires_grad=True)
    assert op.route(needs).name == "first"
    with torch.no_grad():
        assert op.route(needs).name == "kernel"
    assert op.route(even.as_subclass(Wrapped)).name == "first"
    assert op.route(torch.ones(0, 4)).name == "first"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op.route(even).name == "first"
    assert torch.equal(torch.func.vmap(op)(torch.ones(5, 2, 4)), torch.ones(5, 2, 4) * 2)
    out = torch.func.jvp(lambda x: op(x), (even,), (even,))
    assert torch.equal(out[1], even * 2)
    with use(**{op.name: "kernel"}), pytest.raises(UnavailableError, match="a gradient is needed"):
        op(needs)


def test_registering_is_checked() -> None:
    op = toy()
    for name, device in (("first", "cpu"), ("reference", "cuda"), ("first", "any")):
        with pytest.raises(RuntimeError, match="registered twice"):
            op.implementation(name, device=device)(lambda x, factor: x)
    with pytest.raises(RuntimeError, match="reference's arguments"):
        op.implementation("other", device="cpu")(lambda x, scale: x)
    with pytest.raises(RuntimeError, match="opaque"):
        toy(compile="sometimes")
    assert op.doc == "x times a factor." and "small ops" in op.module_doc


def compiled(op: Op, *args) -> tuple[Tensor, list[str]]:
    """The result under torch.compile with no graph break, and the functions of its graph."""
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, _inputs: object) -> object:
        seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    out = torch.compile(lambda *given: op(*given) + 1, backend=backend, fullgraph=True)(*args)
    return out, seen


def test_torch_compile_sees_one_opaque_node_that_routes() -> None:
    op = toy()
    routes: dict[str, int] = {}
    with recording(routes):
        out, seen = compiled(op, even)
    assert torch.equal(out, even * 2 + 1)
    assert any(f"clearway.{op.name}" in name for name in seen)
    assert routes == {f"{op.name}/first": 1}


def test_torch_compile_sees_the_reference_inlined() -> None:
    op = toy(compile="inline")
    out, seen = compiled(op, even)
    assert torch.equal(out, even * 2 + 1)
    assert not any("clearway" in name for name in seen)


def test_a_gradient_goes_through_the_reference_under_torch_compile() -> None:
    op = toy()
    x = torch.ones(2, 4, requires_grad=True)
    out, seen = compiled(op, x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 2.0)) and not any("clearway" in name for name in seen)


def test_the_opaque_node_gives_the_layout_it_promised() -> None:
    op = toy()
    assert op(odd).stride() != odd.stride()  # a stock implementation with a layout of its own
    assert op._opaque(odd).stride() == odd.stride()
    assert torch.equal(op._opaque(odd, 3.0), odd * 3)
    torch.library.opcheck(getattr(torch.ops.clearway, op.name).default, (odd, 2.0))


def test_threads_and_nested_names_keep_apart() -> None:
    one, two = toy(), toy()
    with use(**{one.name: "second"}), use(**{two.name: "second"}):
        assert one.route(even).name == two.route(even).name == "second"
    assert one.route(even).name == "first"
