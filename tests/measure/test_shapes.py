"""Ops are heard as they are called, and timed at those shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from clearway.device import Device
from clearway.measure import shapes
from clearway.measure.clock import HostTimer
from clearway.ops import state
from clearway.ops.contract import OPS, Op, op
from fake_timer import FakeTimer

TIMER = FakeTimer()


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    state.forget()
    yield
    state.forget()


@pytest.fixture
def heard_op():
    """An op whose implementations take planted times on the fake clock."""

    @op(cases=lambda: [("tiny", (torch.ones(4), 2.0))])
    def heard_once(x: torch.Tensor, scale: float) -> torch.Tensor:
        """x times scale."""
        TIMER.spend(0.003)
        return x * scale

    @heard_once.implementation("usual", device="any", stock=True)
    def _(x: torch.Tensor, scale: float) -> torch.Tensor:
        TIMER.spend(0.002)
        return x * scale

    @heard_once.implementation("quick", device="any", stock=True)
    def _(x: torch.Tensor, scale: float) -> torch.Tensor:
        TIMER.spend(0.001 if x.numel() > 8 else 0.0021)
        return x * scale

    @heard_once.implementation(
        "picky", device="any", stock=True, refuse=lambda x, scale: "it takes nothing at all"
    )
    def _(x: torch.Tensor, scale: float) -> torch.Tensor:
        raise AssertionError

    yield heard_once
    del OPS["heard_once"]


def test_calls_are_heard_with_their_shapes_and_nothing_else_changes(heard_op: Op) -> None:
    run = Op._run
    with shapes.listening() as heard:
        assert torch.equal(heard_op(torch.ones(4), 3.0), torch.full((4,), 3.0))
        heard_op(torch.ones(4), 3.0)
        heard_op(torch.ones(2, 16).t(), 3.0)
    assert Op._run is run
    heard_op(torch.ones(4), 3.0)
    small, large = ("heard_once", "torch.float32|2"), ("heard_once", "torch.float32|5")
    assert {key: signs.total() for key, signs in heard.calls.items()} == {small: 2, large: 1}
    ((tensor, scale),) = heard.calls[large]
    assert tensor == ("tensor", (16, 2), (1, 16), torch.float32) and scale == 3.0


def test_the_fastest_by_shape_is_proposed(heard_op: Op) -> None:
    with shapes.listening() as heard:
        heard_op(torch.ones(4), 3.0)
        for _ in range(10):
            heard_op(torch.ones(16), 3.0)
    large, small = shapes.timed(heard, TIMER, "cpu", 60.0)
    assert (large["current"], large["best"], large["calls"]) == ("usual", "quick", 10)
    assert large["saves_ms"] == pytest.approx(10.0)
    assert large["times_ms"] == pytest.approx({"usual": 2.0, "quick": 1.0, "reference": 3.0})
    assert large["refused"] == {"picky": large["refused"]["picky"]}
    assert "it takes nothing at all" in large["refused"]["picky"]
    assert small["best"] == "usual" and small["saves_ms"] == 0.0


def test_a_tuned_table_does_not_decide_what_is_current(heard_op: Op) -> None:
    state.store_tuned("cpu", {"heard_once": {"torch.float32|4": "quick"}})
    with shapes.listening() as heard:
        heard_op(torch.ones(16), 3.0)
    assert shapes.timed(heard, TIMER, "cpu", 60.0)[0]["current"] == "usual"


def test_no_time_no_findings(heard_op: Op) -> None:
    with shapes.listening() as heard:
        heard_op(torch.ones(16), 3.0)
    assert shapes.timed(heard, TIMER, "cpu", 0.0) == []


def test_real_ops_run_with_data_of_the_right_kind() -> None:
    from clearway.ops.geglu import geglu

    with torch.inference_mode(), shapes.listening() as heard:
        out = geglu(torch.ones(1, 2, 8))
    assert torch.allclose(out, torch.ones(1, 2, 4) * F.gelu(torch.ones(1)))
    (found,) = shapes.timed(heard, HostTimer(Device("cpu")), "cpu", 1.0)
    assert found["op"] == "geglu" and found["times_ms"]["reference"] > 0
    made = shapes._made(("tensor", (2, 3), (1, 2), torch.int64), "cpu", torch.Generator())
    assert made.stride() == (1, 2) and not made.any()
    assert shapes._made(("tensor", (2,), (1,), torch.bool), "cpu", torch.Generator()).all()
    assert shapes._made(None, "cpu", torch.Generator()) is None


def test_lists_among_arguments_come_back_as_lists() -> None:
    from clearway.ops.constant_pad import constant_pad

    with torch.inference_mode(), shapes.listening() as heard:
        constant_pad(torch.ones(1, 2, 4, 4), [0, 1, 0, 1], 0.0)
    (found,) = shapes.timed(heard, HostTimer(Device("cpu")), "cpu", 1.0)
    assert found["op"] == "constant_pad" and found["times_ms"]["reference"] > 0
    ((_, pad, _),) = next(iter(heard.calls.values()))
    assert shapes._made(pad, "cpu", torch.Generator()) == [0, 1, 0, 1]
