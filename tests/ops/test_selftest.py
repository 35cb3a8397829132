"""The self-test: what is wrong is found, in a process of its own, and the program goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from clearway import device
from clearway.ops import selftest, state, verdicts
from clearway.ops.attention import attention
from clearway.ops.contract import Implementation, use
from ops.faulty import faulty_double

EXPECTED = {
    "aborts": "signal 6",
    "hangs": "was silent for",
    "leaves_quietly": "exit code 0",
    "green": "is allowed",
    "leaves_a_tail": "not written",
    "changes_inputs": "changed its inputs",
    "other_layout": "strides",
    "does_not_build": "the compiler says no",
    "takes_all": "should have refused",
}


def named(name: str) -> Implementation:
    return next(i for i in faulty_double.implementations if i.name == name)


@pytest.mark.parametrize("name", [n for n in EXPECTED if n not in ("aborts", "hangs", "leaves_quietly")])
def test_each_fault_is_found_by_the_checks_themselves(name: str) -> None:
    found = list(selftest.check(faulty_double, named(name), "cpu", every_case=True))
    assert any(EXPECTED[name] in problem for _, _, problem in found)


def test_small_cases_like_the_arguments_come_first() -> None:
    labels = [
        label for label, _, _ in selftest.check(faulty_double, named("sound"), "cpu", False, like=(9, 30))
    ]
    assert labels[0] == "ragged float32"


def test_gaps_broadcast_axes_and_offsets_survive_the_move() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    for view in (x[1:, ::2], x[:1].expand(3, 6), x.t()[2:]):
        moved = selftest._to(view, "cpu", torch.float64)
        assert moved.stride() == view.stride() and torch.equal(moved, view.double())


def test_a_dtype_that_the_device_lacks_is_refused_by_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = selftest._to

    def lacking(arg: object, kind: str, dtype: object) -> object:
        if kind == "cpu":
            raise TypeError("Cannot convert a MPS Tensor to float64")
        return whole(arg, kind, dtype)

    monkeypatch.setattr(selftest, "_to", lacking)
    (x,) = selftest._placed((torch.ones(3, 4, dtype=torch.float64).t(),), "cpu")
    assert x.is_meta and x.dtype == torch.float64 and x.stride() == (1, 4)


def test_values_beyond_a_dtype_and_nan_are_right_where_float64_says_so() -> None:
    op = faulty_double
    x = torch.tensor([[60000.0, 1.0, float("nan"), float("inf")]], dtype=torch.float16)
    assert selftest.problem(op, named("sound"), (x,)) == ""
    assert "finite" in selftest.problem(op, named("green"), (x,))


def test_a_kernel_that_is_read_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention followed by a projection: here the output is completed only after the projection read it."""
    late: list[torch.Tensor] = []
    then = attention.then

    def run(*args: object) -> torch.Tensor:
        right = attention.reference.run(*args)
        late.extend((torch.zeros_like(right), right))
        return late[0]

    def projection(out: torch.Tensor) -> torch.Tensor:
        result = then(out)
        if late:
            late.pop(0).copy_(late.pop(0))
        return result

    monkeypatch.setattr(attention, "then", projection)
    made = Implementation("attention", "late", "cpu", run)
    args = attention._bound(dict(attention.cases())["ragged 40"], {})
    assert "projection" in selftest.problem(attention, made, args)
    monkeypatch.setattr(attention, "then", then)
    assert selftest.problem(attention, attention.reference, args) == ""


def test_the_routed_call_must_be_the_direct_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = (torch.randn(3, 4),)
    monkeypatch.setenv(state.INSIDE, "1")
    assert selftest.problem(faulty_double, named("sound"), x, routed=True) == ""
    with use(faulty_double="sound"):
        assert faulty_double.route(*x).name == "sound"


def test_nothing_to_check_is_not_sound() -> None:
    large = attention._bound((torch.ones(1, 1, 2, 2, dtype=torch.float16),) * 3, {})
    metal = next(i for i in attention.implementations if i.name == "metal")
    lines = list(selftest.check(attention, metal, "cpu", False, torch.float64, tuple(large[0].shape)))
    assert [line for line in lines if line[2] == ""] == []  # float64 is refused: no case is checked


def test_its_process_prints_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "clearway.ops.selftest"],
        input="{}\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "KeyError" in done.stderr
    assert done.stdout == ""


def test_a_job_keeps_to_its_limit_and_leaves_nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job of a worker: others use the device beside it."""
    asked: list[Any] = []

    @contextmanager
    def capped(where: device.Device, limit: int | None) -> Iterator[None]:
        asked.append((str(where), limit))
        yield
        asked.append("done")

    monkeypatch.setattr(device, "capped", capped)
    monkeypatch.setattr(device, "release_memory", lambda where: asked.append(f"released {where}"))
    job = verdicts._content(named("sound"), "cpu", torch.float32, (2, 3), False)
    for limit in ({"limit_bytes": 2**30}, {}):
        lines: list[dict[str, Any]] = []
        selftest._work({**job, **limit}, lines.append)
        assert lines[0] == {"started": True} and lines[-1]["problem"] == ""
    once = ["done", "released cpu"]
    assert asked == [("cpu", 2**30), *once, ("cpu", None), *once]
