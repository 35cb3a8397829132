"""What holds for every op of the registry."""

from __future__ import annotations

import pytest
import torch

import evidence
from clearway.ops import contract, selftest
from clearway.ops._implementation import Case, able, same_layout
from ops.registry import NAMES, OPS, in_dtype, outputs, refused, small, tensors, with_implementation

every_op = pytest.mark.parametrize("name", NAMES)


def varied(name: str) -> list[Case]:
    """Two cases of an op: the first, and the first with strides."""
    cases = [args for _, args in small(OPS[name])]
    strided = [args for args in cases if not all(one.is_contiguous() for one in tensors(args))]
    return [cases[0], *strided[:1]]


@every_op
def test_cases_cover_what_breaks_kernels(name: str) -> None:
    cases = dict(small(OPS[name]))
    firsts = [args[0] for args in cases.values()]
    assert any(x.numel() <= 64 for x in firsts), "a tiny one"
    assert any(x.numel() > 64 and any(size % 2 for size in x.shape) for x in firsts), "a ragged one"
    assert any(not one.is_contiguous() for args in cases.values() for one in tensors(args)), "a strided one"
    assert all(selftest._is_small(OPS[name], args) for args in cases.values()), "large ones are functions"
    assert len(cases) == sum(not callable(given) for _, given in OPS[name].cases()), "names are distinct"


@every_op
def test_cases_are_the_same_every_time(name: str) -> None:
    for (_, one), (_, other) in zip(small(OPS[name]), small(OPS[name]), strict=True):
        for first, second in zip(tensors(one), tensors(other), strict=True):
            assert torch.equal(first, second) and first.stride() == second.stride()


@every_op
def test_large_cases_are_of_real_shapes(name: str) -> None:
    """Made without storage; they must fit the reference and the cost functions."""
    op = OPS[name]
    large = [(case, given) for case, given in op.cases() if callable(given)]
    assert large
    for case, given in large:
        with torch.device("meta"):
            args = selftest.made(op, given)
        assert args[0].is_meta, case
        out = outputs(op.reference.run(*args))
        moved = op.bytes_moved(*args) if op.bytes_moved else 0
        assert moved >= out[0].nbytes, case
        assert op.flops is None or op.flops(*args) >= 0, case


@every_op
def test_refusals_say_why(name: str) -> None:
    op = OPS[name]
    for implementation, words, args in op.refusals():
        for one in op.implementations:
            if one.name == implementation:
                given = op._bound(args, {})
                dtypes = (None, torch.float16) if one.stock else (None,)  # some take half precision only
                reasons = [str(refused(one, selftest._on(given, "cpu", dtype))) for dtype in dtypes]
                assert any(words in reason for reason in reasons), (implementation, words, reasons)


@every_op
def test_kernels_refuse_something(name: str) -> None:
    op = OPS[name]
    refusing = {implementation for implementation, _, _ in op.refusals()}
    ours = {one.name for one in op.implementations if not one.stock and one.refuse is not able}
    assert ours <= refusing


@every_op
@pytest.mark.parametrize("dtype", selftest.DTYPES, ids=str)
def test_routed_on_this_machine_is_sound(name: str, dtype: torch.dtype) -> None:
    """What this CPU takes, with its inputs unchanged, by the check that users' machines run."""
    op = OPS[name]
    for case, given in small(op):
        args = in_dtype(given, dtype)
        implementation = op.route(*args)
        assert selftest.problem(op, implementation, args, routed=True) == "", case
        evidence.note(name, implementation.name, "run on", "CPU")


@every_op
@pytest.mark.parametrize("dtype", selftest.DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_every_implementation_is_sound(name: str, dtype: torch.dtype, kind: str) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = "CPU" if kind == "cpu" else torch.cuda.get_device_name()
    op = OPS[name]
    # CUDA's channels-last GroupNorm loses digits at a large mean, as the CPU's does: 0.11 at 1000 deviations
    yardstick = (op.reference,) if kind == "cpu" else ()
    for implementation in (*op.implementations, *yardstick):
        if implementation.device not in (kind, "any") or implementation.absent() is not None:
            continue
        for case, given in small(op):
            args = selftest._on(given, kind, dtype)
            if refused(implementation, args) is None:
                assert selftest.problem(op, implementation, args) == "", (implementation.name, case)
                evidence.note(name, implementation.name, "run on", device)


@every_op
def test_routes_are_counted_and_explained(name: str) -> None:
    op = OPS[name]
    for case, args in small(op):
        routes: dict[str, int] = {}
        with contract.recording(routes):
            op(*args)
            op(*args)
        taken = op.route(*args).name
        assert routes == {f"{name}/{taken}": 2}, case
        decisions = op.explain(*args)
        assert {one.implementation for one in decisions} == {
            i.name for i in (*op.implementations, op.reference)
        }
        assert [one.implementation for one in decisions if one.taken] == [taken]
        assert all(one.reason for one in decisions if not one.taken), case


@every_op
def test_outputs_are_new(name: str) -> None:
    """torch.library forbids that an op gives back an argument or a view of one."""
    op = OPS[name]
    for case, args in small(op):
        given = {one.untyped_storage().data_ptr() for one in tensors(args)}
        made = [one.untyped_storage().data_ptr() for one in outputs(op(*args)) if one.numel()]
        assert not given & set(made) and len(set(made)) == len(made), case


@every_op
def test_the_library_op_passes_opcheck(name: str) -> None:
    for args in varied(name):
        torch.library.opcheck(OPS[name]._opaque, args)


@every_op
def test_compiles_into_one_graph(name: str) -> None:
    op = OPS[name]
    for args in varied(name):
        torch._dynamo.reset()
        compiled = torch.compile(lambda *given: op(*given), fullgraph=True, backend="aot_eager")
        for found, expected in zip(outputs(compiled(*args)), outputs(op(*args)), strict=True):
            torch.testing.assert_close(found, expected)
            assert same_layout(found, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", with_implementation("triton"))
def test_what_is_not_finite_stays_where_it_belongs(name: str) -> None:
    """NaN or infinity in one element: the reference in float32 agrees with float64 on where it spreads."""
    op = OPS[name]
    for case, args in small(op):
        for value in (float("nan"), float("inf")):
            first = args[0].clone()
            first[tuple(size // 2 for size in first.shape)] = value
            spoilt = (first, *args[1:])
            exact = outputs(op.reference.run(*in_dtype(spoilt, torch.float64)))
            for found, expected in zip(outputs(op(*spoilt)), exact, strict=True):
                assert torch.equal(found.isfinite(), expected.isfinite()), (case, value)


@every_op
def test_documented(name: str) -> None:
    op = OPS[name]
    assert "source" in op.module_doc.lower() and len(op.module_doc.splitlines()) >= 3
    assert op.doc
    assert op.bytes_moved is not None and op.flops is not None
