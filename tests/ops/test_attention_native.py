"""attention.cpp, compiled here, against the formula in float64: any sizes, layouts and threads."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clearway.ops import _cpp, attention_native
from clearway.ops.attention import attention, inputs

CAPABILITY = torch.backends.cpu.get_cpu_capability()
TARGETS_HERE = (
    list(_cpp.TARGETS)[: list(_cpp.TARGETS).index(CAPABILITY) + 1] if CAPABILITY in _cpp.TARGETS else []
)
needs_compiler = pytest.mark.skipif(_cpp.absent() is not None, reason=f"not here: {_cpp.absent()}")


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = factor * q.double() @ k.double().transpose(-2, -1)
    return torch.softmax(scores, -1) @ v.double()


def run(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return attention_native.run(q, k, v, scale, False, None)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_compiler
@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 230),
    st.integers(1, 300),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([None, 0.0, -0.7, 3.0]),
)
def test_any_sizes_agree_with_float64(
    batch: int, heads: int, queries: int, keys: int, size: int, value_size: int, scale: float | None
) -> None:
    """Tiles that are not full, blocks that are not whole, sizes that are no multiple of anything."""
    q = normal(batch, queries, heads, size).transpose(1, 2)
    k = normal(batch, heads, keys, size, seed=1)
    v = normal(batch, keys, heads, value_size, seed=2).transpose(1, 2)
    out = run(q, k, v, scale)
    largest = (abs(0.2 if scale is None else scale) * q @ k.transpose(-2, -1)).abs().max().item()
    # a score's rounding is relative to it, and the exponential's relative error is the score's absolute one
    torch.testing.assert_close(out.double(), exact(q, k, v, scale), rtol=0, atol=2e-6 * max(largest, 1.0))
    assert q.shape != out.shape or out.stride() == torch.empty_like(q).stride()


@needs_compiler
@pytest.mark.parametrize("target", _cpp.TARGETS)
def test_it_is_the_same_for_every_processor_it_is_compiled_for(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Each that this one can run: a tile of another length, and rows of it."""
    if target not in TARGETS_HERE:
        pytest.skip(f"this processor has no {target}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: target)
    monkeypatch.setattr(_cpp, "library", functools.cache(_cpp.library.__wrapped__))
    monkeypatch.setattr(
        attention_native, "_function", functools.cache(attention_native._function.__wrapped__)
    )
    for queries, keys, size, value_size in (
        (1, 1, 1, 1),
        (49, 131, 17, 9),
        (385, 130, 40, 40),
        (47, 77, 16, 24),
    ):
        q, k = normal(2, 2, queries, size), normal(2, 2, keys, size, seed=1)
        v = normal(2, 2, keys, value_size, seed=2)
        torch.testing.assert_close(run(q, k, v).double(), exact(q, k, v), rtol=0, atol=3e-6)


@needs_compiler
def test_equal_values_come_back_whatever_the_scores() -> None:
    """The weights of each query sum to 1."""
    for scale in (1.0, 30.0):
        q, k = normal(2, 3, 77, 16), normal(2, 3, 513, 16, seed=1)
        out = run(q, k, torch.full((2, 3, 513, 8), 3.0), scale)
        torch.testing.assert_close(out, torch.full_like(out, 3.0), rtol=2e-6, atol=0)


@needs_compiler
def test_the_order_of_keys_and_the_level_of_scores_do_not_matter() -> None:
    q, k, v = normal(1, 2, 50, 24), normal(1, 2, 300, 24, seed=1), normal(1, 2, 300, 24, seed=2)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(run(q, k[:, :, order], v[:, :, order]), run(q, k, v), rtol=0, atol=2e-6)
    # a column of ones in q and of 50 in k adds the same to all scores of a query
    ones, fifty = q.new_ones(1, 2, 50, 1), k.new_full((1, 2, 300, 1), 50.0)
    raised = run(torch.cat((q, ones), -1), torch.cat((k, fifty), -1), v, 0.2)
    torch.testing.assert_close(raised, run(q, k, v, 0.2), rtol=0, atol=2e-5)


@needs_compiler
def test_keys_far_below_the_others_weigh_nothing() -> None:
    """Whether they come first, so that the largest score rises, or last, in another block of keys."""
    q, v = torch.ones(1, 1, 5, 4), normal(1, 1, 400, 4)
    for best in (0, 399):
        k = torch.full((1, 1, 400, 4), -1000.0)
        k[:, :, best] = 1000.0
        torch.testing.assert_close(run(q, k, v), v[:, :, best : best + 1].expand(1, 1, 5, 4), rtol=0, atol=0)


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_stays_where_it_belongs(value: float, which: int) -> None:
    case = [normal(1, 2, 40, 16), normal(1, 2, 150, 16, seed=1), normal(1, 2, 150, 16, seed=2)]
    case[which][0, 1, 20, 3] = value
    assert torch.equal(run(*case).isfinite(), exact(*case).isfinite())


@needs_compiler
@pytest.mark.parametrize("value", [-math.inf, -3e38])
@pytest.mark.parametrize("keys", [300, 1])
def test_blocks_of_scores_that_are_minus_infinity_weigh_nothing(value: float, keys: int) -> None:
    """Before there is a largest score, too; a row of them alone has no weights, as PyTorch says."""
    q, k, v = normal(2, 2, 50, 16).abs() + 0.1, normal(2, 2, 500, 16, seed=1), normal(2, 2, 500, 8, seed=2)
    for first, last in ((0, keys), (500 - keys, 500), (100, 100 + keys)):
        other = k.clone()
        other[:, :, first:last] = value
        torch.testing.assert_close(run(q, other, v).double(), exact(q, other, v), rtol=0, atol=2e-6)
    assert run(q, torch.full_like(k, -math.inf), v).isnan().all()


@needs_compiler
def test_a_weight_of_nothing_takes_nothing_of_a_huge_value() -> None:
    q, k, v = torch.ones(1, 1, 9, 4), torch.zeros(1, 1, 200, 4), normal(1, 1, 200, 8)
    k[:, :, ::2], v[:, :, ::2] = -1000.0, 1e38
    torch.testing.assert_close(run(q, k, v).double(), exact(q, k, v), rtol=0, atol=2e-6)


@needs_compiler
def test_a_quiet_nan_of_any_payload_stays_one() -> None:
    odd = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    q, k, v = normal(1, 1, 8, 8), normal(1, 1, 8, 8, seed=1), normal(1, 1, 8, 8, seed=2)
    q[0, 0, 3, 2] = odd[0]
    out = run(q, k, v)
    assert out[0, 0, 3].isnan().all() and out[0, 0, :3].isfinite().all() and out[0, 0, 4:].isfinite().all()


@needs_compiler
def test_threads_change_no_bit() -> None:
    case = inputs(2, 3, 400, 333, 40)[:3]
    before = torch.get_num_threads()
    try:
        made = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            made.append(run(*case))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


@needs_compiler
def test_heads_whose_numbers_lie_apart_are_copied() -> None:
    q, k, v = (normal(1, 2, 16, 60, seed=seed).transpose(2, 3) for seed in range(3))
    out = run(q, k, v)
    assert out.stride() == torch.empty_like(q).stride()
    torch.testing.assert_close(out.double(), exact(q, k, v), rtol=0, atol=2e-6)


@needs_compiler
def test_it_is_one_operation_of_the_dispatcher() -> None:
    """So that whoever records operations sees it."""
    seen: list[str] = []

    class Noted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, run, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(run))
            return run(*args, **(kwargs or {}))

    case = inputs(1, 2, 8, 8, 8)[:3]
    with Noted():
        run(*case)
    assert seen == ["clearway.attention_native.default"]


def test_no_memory_for_tiles_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_native, "_function", lambda: lambda *given: 1)
    with pytest.raises(MemoryError, match="tiles"):
        run(*inputs(1, 2, 8, 8, 8)[:3])


def test_it_is_preferred_where_it_was_measured_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    def preferred(queries: int, keys: int, size: int, dtype: torch.dtype = torch.float32) -> str | None:
        args = tuple(
            one.to(dtype) for one in inputs(1, 1, queries, keys, size)[:3] if isinstance(one, Tensor)
        )
        return attention.defaults["cpu"](*args)

    monkeypatch.setattr(attention_native, "QUICKER_CAPABILITY", ("AVX2", "AVX512"))
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert preferred(1024, 77, 16) == preferred(64, 77, 80) == "native"
        assert preferred(1024, 77, 160) is None and preferred(64, 64, 16) is None
        assert preferred(1024, 77, 16, torch.bfloat16) is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert preferred(1024, 77, 16) is None
