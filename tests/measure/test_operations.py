"""The ops on real shapes: implementations in turns, each against the formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from clearway.device import Device
from clearway.measure import operations
from clearway.measure.harness import Plan, bench
from clearway.measure.record import to_line
from clearway.measure.scenario import Scenario

CPU = Device("cpu")
OPS = Scenario(name="ops", what="ops")


class Ticking:
    """A clock that takes a second a look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 1
        return self.seconds

    def synchronize(self) -> None:
        pass

    def event(self) -> Any:
        return None

    def between(self, begun: Any, ended: Any) -> float | None:
        return None


class FakeOp:
    """An op of one large case and one small, doubled rightly, wrongly or not at all."""

    name = "double"

    def __init__(self, *implementations: Any) -> None:
        self.implementations = implementations
        self.reference = implementation("reference", lambda x: x * 2)
        self.exact = self.reference.run
        self.flops, self.bytes_moved = (lambda x: x.numel()), (lambda x: 8 * x.numel())

    def _bound(self, args: Any, more: Any) -> Any:
        return args

    def cases(self) -> Iterator[tuple[str, Any]]:
        yield "tiny", (torch.ones(2),)
        yield "real", lambda: (torch.ones(64),)
        yield "huge", lambda: (torch.ones(2**26),)


def implementation(name: str, run: Any, device: str = "any", absent: str | None = None) -> Any:
    from clearway.ops._implementation import Implementation

    return Implementation("double", name, device, run, absent=lambda: absent, stock=True)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    def go(*implementations: Any, **plan: Any) -> dict[str, Any]:
        monkeypatch.setattr(operations, "discover", lambda: {"double": FakeOp(*implementations)})
        records = bench(OPS, [], CPU, Plan(**({"rounds": 3} | plan)), timer=Ticking())
        assert all(to_line(one) for one in records)
        return {one.contender: one for one in records}

    return go


def test_each_implementation_has_a_record_with_its_rates(run: Any) -> None:
    found = run(implementation("twice", lambda x: x + x), implementation("elsewhere", None, "mps"))
    assert list(found) == ["twice", "reference"]
    (row,) = found["twice"].operations
    assert (row["op"], row["case"], row["name"], row["n"]) == ("double", "real", "double, real", 3)
    assert row["p50_ms"] == 1000 and row["flops"] == 64 and row["gb_per_s"] == pytest.approx(512e-9)
    assert found["twice"].correctness["verified"] is True and found["twice"].throughput is None
    assert found["twice"].provenance["settings"]["left_out"] == ["double, huge: too much for a CPU"]


def test_a_wrong_one_is_refused_a_broken_one_fails_an_absent_one_is_not_there(run: Any) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    found = run(
        implementation("wrong", lambda x: x * 2.1),
        implementation("broken", broken),
        implementation("absent", broken, absent="no compiler"),
    )
    assert "0.05 from the reference" in found["wrong"].refused and not found["wrong"].correctness["verified"]
    assert found["broken"].failed == "double, real: RuntimeError: no such kernel"
    assert found["broken"].operations is None and "absent" not in found


def test_the_limit_leaves_cases_out_and_says_so(run: Any) -> None:
    assert run(limit_s=0) == {}


def test_real_ops_are_given_in_the_dtype_asked_for() -> None:
    left_out: list[str] = []
    op, case, args = next(operations._cases(CPU, "float16", left_out))
    assert (
        op.name and case and {arg.dtype for arg in args if isinstance(arg, torch.Tensor)} == {torch.float16}
    )
