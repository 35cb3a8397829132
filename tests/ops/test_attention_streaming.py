"""The streaming softmax: exact whatever the chunks, differentiable, and never more than a chunk in memory."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from clearway.ops import attention_streaming, budget
from clearway.ops.attention import attention, inputs


@contextmanager
def limited(bytes_: float) -> Iterator[None]:
    token = budget._current.set(budget.Sample("cpu", 0, 0, bytes_))
    try:
        yield
    finally:
        budget._current.reset(token)


def stream(*args, limit: float = 2000.0) -> Tensor:
    with limited(limit):
        return attention_streaming.run(*attention._bound(args, {}))


@settings(max_examples=40)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.integers(1, 90), st.sampled_from([1, 7, 16]),
    st.booleans(), st.floats(1, 1e5),
)  # fmt: skip
def test_any_chunk_gives_what_sdpa_gives(batch, heads, queries, keys, size, is_causal, limit) -> None:
    q, k, v, *_ = inputs(batch, heads, queries, keys, size)
    out = stream(q, k, v, None, is_causal, None, limit=limit)
    assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, is_causal=is_causal), atol=2e-5)


@pytest.mark.parametrize("limit", [1.0, 300.0, 4000.0, 1e9])
@pytest.mark.parametrize("shape", [(9, 12), (1, 1, 9, 12), (2, 3, 9, 12), (2, 1, 1, 12), (1, 1, 9, 1), (12,)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_masks_of_every_shape(limit: float, shape: tuple[int, ...], kind: torch.dtype) -> None:
    q, k, v, *_ = inputs(2, 3, 9, 12, 8)
    generator = torch.Generator().manual_seed(1)
    mask = torch.randn(shape, generator=generator)
    mask = mask > -0.5 if kind == torch.bool else mask
    expected = attention.reference.run(q, k, v, None, False, mask)
    assert torch.allclose(stream(q, k, v, None, False, mask, limit=limit), expected, atol=1e-5)


def test_large_scores_do_not_overflow_and_order_does_not_matter() -> None:
    q, k, v, *_ = inputs(1, 2, 20, 40, 16)
    for factor in (1e3, 1e18):
        out = stream(q * factor, k, v, 1.0, False, None)
        assert out.isfinite().all()
    flipped = stream(q, k.flip(2), v.flip(2), limit=500.0)
    assert torch.allclose(flipped, stream(q, k, v, limit=500.0), atol=1e-5)


def test_rows_that_read_nothing_are_zero_in_every_chunk() -> None:
    q, k, v, *_ = inputs(1, 1, 6, 30, 8)
    mask = torch.ones(6, 30, dtype=torch.bool)
    mask[2] = False
    mask[3, :20] = False  # the first chunks of this row are empty
    out = stream(q, k, v, None, False, mask, limit=200.0)
    assert torch.equal(out[0, 0, 2], torch.zeros(8))
    assert torch.allclose(
        out[0, 0, 3], F.scaled_dot_product_attention(q, k[:, :, 20:], v[:, :, 20:])[0, 0, 3]
    )


def test_half_precision_is_summed_in_float32() -> None:
    q, k, v, *_ = inputs(1, 2, 64, 600, 32)
    exact = attention.reference.run(
        q.half().double(), k.half().double(), v.half().double(), None, False, None
    )
    out = stream(q.half(), k.half(), v.half(), limit=5e4)
    assert out.dtype == torch.float16 and (out.double() - exact).abs().max() < 2.0**-11 * exact.abs().max()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("limit", [1.0, 400.0, 1e9])
def test_the_gradient_is_right_in_float64(is_causal: bool, masked: bool, limit: float) -> None:
    given = inputs(1, 2, 5, 6, 4)[:3]
    q, k, v = (tensor.double().detach().requires_grad_() for tensor in given)
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[1, 2:], mask[3] = False, False

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stream(q, k, v, 0.7, is_causal, mask if masked else None, limit=limit)

    with limited(limit):
        assert torch.autograd.gradcheck(call, (q, k, v))


def test_the_gradient_is_the_reference_s_also_for_broadcast_keys() -> None:
    q, k, v, *_ = inputs(2, 3, 11, 13, 8)
    grads = []
    for run in (
        lambda *a: stream(*a, limit=900.0),
        lambda *a: attention.reference.run(*a, None, False, None),
    ):
        leaves = [
            q.detach().clone().requires_grad_(),
            k[:1].detach().clone().requires_grad_(),
            v.clone().requires_grad_(),
        ]
        (run(*leaves) ** 2).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_a_gradient_for_the_mask_is_refused() -> None:
    q, k, v, *_ = inputs(1, 1, 4, 4, 8)
    mask = torch.zeros(4, 4, requires_grad=True)
    assert "mask needs a gradient" in (attention_streaming.refuse(q, k, v, None, False, mask) or "")
    with torch.no_grad():
        assert attention_streaming.refuse(q, k, v, None, False, mask) is None


class Meter(TorchDispatchMode):
    """Counts the bytes of live storages made within it, and the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.note(tensor)
        return out

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or storage.nbytes() == 0:
            return
        self.known.add(key)
        self.live += storage.nbytes()
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, storage.nbytes())
        weakref.finalize(storage, self.gone, key, storage.nbytes())

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def measured(tokens: int, limit: float, train: bool = False) -> tuple[int, int]:
    q, k, v, *_ = inputs(1, 2, tokens, tokens, 16)
    if train:
        q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
    with Meter() as meter, limited(limit):
        out = attention_streaming.run(q, k, v, None, False, None)
        if train:
            out.sum().backward()
    return meter.peak, meter.largest


@pytest.mark.parametrize("train", [False, True])
def test_memory_follows_the_chunk_and_not_the_square(train: bool) -> None:
    limit = 2.0**17
    linear = 2 * 16 * 4  # bytes a token of one float32 tensor like q
    for tokens in (512, 1024):
        peak, largest = measured(tokens, limit, train)
        scores = 2 * tokens * tokens * 4
        assert largest <= max(limit / 2.5 * 1.01, 2 * linear * tokens)
        assert peak <= limit + (14 if train else 6) * linear * tokens < scores, (tokens, peak)


def test_memory_follows_the_budget() -> None:
    peaks = [measured(512, limit)[0] for limit in (2.0**16, 2.0**18, 2.0**20, 2.0**22)]
    assert all(one < other for one, other in itertools.pairwise(peaks))
