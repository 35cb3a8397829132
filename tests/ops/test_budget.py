"""The memory router's formulas, on machines that are not here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearway.device import Device, Memory
from clearway.ops import budget
from clearway.ops.attention import attention

GIB = 2**30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Sets what the machine has; `sampled` holds how often it was asked."""
    has = {"memory": Memory(32 * GIB, 16 * GIB), "asked": 0}

    def memory(device: Device) -> Memory:
        has["asked"] += 1
        return has["memory"]

    monkeypatch.setattr("clearway.device.memory", memory)
    budget.forget()
    yield has
    budget.forget()


def test_the_formulas_are_exact() -> None:
    assert budget.attention_bytes(2, 8, 4096, 4096, 2) == 536_870_912
    assert budget.estimated_peak(536_870_912) == 1_342_177_280
    assert budget.limit(Memory(8 * GIB, 6 * GIB)) == 8 * GIB / 10
    assert budget.limit(Memory(8 * GIB, 2 * GIB)) == 2 * GIB / 5
    assert budget.limit(Memory(128 * GIB, 100 * GIB)) == 1.5 * GIB


@given(st.integers(1, 2**42), st.integers(0, 2**42))
def test_the_limit_is_the_least_of_three(total: int, available: int) -> None:
    found = budget.limit(Memory(total, available))
    assert (
        found <= total * 0.1 * (1 + 1e-12) and found <= available * 0.2 * (1 + 1e-12) and found <= 1.5 * GIB
    )
    assert found in (total / 10, available / 5, 1.5 * GIB)


@pytest.mark.parametrize(
    ("total", "available", "size", "fits"),
    [
        (32, 24, 512, True),  # 2 x 8 heads, 4096 tokens: 1.25 GiB estimated in float16
        (8, 6, 512, False),  # the same picture on an 8 GB machine
        (32, 4, 512, False),  # and on the large one with a browser open
        (8, 6, 384, True),
        (32, 24, 768, False),
    ],
)
def test_machines_decide_differently(machine, total: int, available: int, size: int, fits: bool) -> None:
    machine["memory"] = Memory(total * GIB, available * GIB)
    tokens = (size // 8) ** 2
    with budget.sampled(Device("cpu")) as sample:
        assert sample.admits(budget.estimated_peak(budget.attention_bytes(2, 8, tokens, tokens, 2))) is fits
        assert sample.record()["over_budget"] is not fits


def test_memory_is_sampled_once_a_generation(machine) -> None:
    with budget.sampled(Device("cpu")) as sample:
        machine["memory"] = Memory(GIB, GIB // 8)  # another program starts
        for _ in range(5):
            assert budget.current(torch.device("cpu")) is sample
    assert machine["asked"] == 1
    assert budget.current(torch.device("cpu")).total_bytes == GIB
    budget.current(torch.device("cpu"))
    assert machine["asked"] == 2  # outside of one: a second old at most


def test_a_repeat_can_pin_the_decision(machine) -> None:
    with budget.sampled(Device("cpu")) as first:
        assert first.admits(GIB) and not first.admits(2 * GIB)
    kept = first.record()
    machine["memory"] = Memory(8 * GIB, GIB)
    with budget.sampled(Device("cpu"), pinned_bytes=kept["limit_bytes"]) as again:
        assert again.pinned and again.admits(GIB) and not again.admits(2 * GIB)
    assert again.record()["over_budget"] is True


def test_a_graph_holds_while_the_limit_decides_alike() -> None:
    sample = budget.Sample("cpu", 0, 0, 100.0)
    assert sample.holds(1.0) and sample.holds(1e12)  # nothing was decided
    sample.admits(40.0)
    sample.admits(300.0)
    assert [sample.holds(limit) for limit in (39.0, 40.0, 299.0, 300.0)] == [False, True, True, False]


@given(
    st.floats(1, 2e9),
    st.integers(1, 64),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([2, 4, 8]),
)
def test_a_chunk_stays_within_the_limit(limit: float, heads: int, queries: int, keys: int, size: int) -> None:
    rows, columns = budget.chunks(limit, heads, queries, keys, size)
    assert 1 <= rows <= queries and 1 <= columns <= keys
    peak = budget.estimated_peak(budget.attention_bytes(1, heads, rows, columns, size))
    assert peak <= limit or (rows, columns) == (1, 1)


def test_over_budget_attention_streams_and_flash_is_exempt(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARWAY_SELFTEST", "1")
    others = [one for one in attention.implementations if one.name != "native"]  # which holds no scores
    monkeypatch.setattr(attention, "implementations", others)
    monkeypatch.setattr(attention, "_ready", {})
    q = torch.zeros(2, 8, 4096, 40)
    args = attention._bound((q, q, q), {})
    machine["memory"] = Memory(8 * GIB, 6 * GIB)
    with budget.sampled(Device("cpu")) as sample, torch.no_grad():
        assert attention.route(*args).name == "sdpa"  # flash on a CPU holds no scores
        wide = torch.zeros(2, 8, 4096, 40)[..., :39:2]  # PyTorch falls back to its math here
        assert attention.route(wide, wide, wide, None, False, None).name == "streaming"
        assert sample.record()["over_budget"]
        small = wide[:, :, :64]
        assert attention.route(small, small, small, None, False, None).name == "sdpa"
        reasons = {d.implementation: d.reason for d in attention.explain(wide, wide, wide)}
        assert "MiB of scores and the budget is" in reasons["sdpa"] and "budget" in reasons["math"]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert attention.route(wide, wide, wide).name == "sdpa"  # the caller's own choice


def test_on_mps_heads_without_a_metal_kernel_count_as_scores(machine) -> None:
    machine["memory"] = Memory(8 * GIB, 6 * GIB)
    for size, over in ((40, True), (64, False), (80, False), (160, True)):
        q = torch.empty(2, 8, 4096, size, dtype=torch.float16, device="meta")
        with budget.sampled(Device("cpu")), torch.no_grad():
            reasons = {d.implementation: d.reason for d in attention.explain(q, q, q, kind="mps")}
        assert ("budget" in reasons["sdpa"]) is over
