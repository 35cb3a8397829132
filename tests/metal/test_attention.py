"""attention.metal, emulated, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from clearway.ops import _metal_launch as launch
from metal.accuracy import DTYPES, MODES, assert_accurate, assert_sound, poisoned
from metal.emulator import Library

Heads = tuple[Tensor, Tensor, Tensor]


def heads(batch: int, count: int, queries: int, keys: int, size: int, dtype: torch.dtype) -> Heads:
    """q, k, v (B, N, L, E) as views of (B, L, N, E), which is how the models make them."""
    generator = torch.Generator().manual_seed(size + queries + keys)
    return tuple(  # type: ignore[return-value]
        torch.randn(batch, length, count, size, generator=generator).to(dtype).transpose(1, 2)
        for length in (queries, keys, keys)
    )


def check(library: Library, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> None:
    scale = q.shape[3] ** -0.5 if scale is None else scale
    batch, count, queries, size = q.shape
    out = poisoned(batch, queries, count, size, dtype=q.dtype).transpose(1, 2)
    launch.attention(library, q, k, v, out, scale)
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    eager = torch.softmax(q @ k.transpose(2, 3) * scale, -1) @ v
    assert_accurate(out, exact, eager)
    assert_sound(library, {3: out})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", launch.HEAD_SIZES)
def test_head_sizes_in_half(emulated: Callable[..., Library], size: int, mode: str) -> None:
    """Ragged in queries and keys: 45 is no multiple of a tile of 32 or 16, 35 none of 32 queries."""
    check(emulated("attention", **MODES[mode]), *heads(1, 2, 35, 45, size, torch.float16))


@pytest.mark.parametrize("mode", ["in order", "checked"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("size", [40, 160])
def test_other_types(emulated: Callable[..., Library], size: int, dtype: torch.dtype, mode: str) -> None:
    check(emulated("attention", **MODES[mode]), *heads(1, 1, 33, 49, size, dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("queries, keys", [(1, 1), (32, 32), (33, 31), (64, 77)])
def test_lengths(emulated: Callable[..., Library], queries: int, keys: int, mode: str) -> None:
    check(emulated("attention", **MODES[mode]), *heads(2, 1, queries, keys, 40, torch.float16))


def contiguous(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return q.contiguous(), k.contiguous(), v.contiguous()


def packed(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """q, k and v as slices of one projection: they share storage, k and v begin within it."""
    return torch.stack([q, k, v], 3).unbind(3)  # type: ignore[return-value]


def broadcast(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """One head of keys for all heads, one batch of values for all batches: strides of 0."""
    return q, k[:, :1].expand_as(k), v[:1].expand_as(v)


def odd_offset(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """k begins three elements into its storage: no vector reads."""
    store = torch.zeros(k.numel() + 3, dtype=k.dtype)
    view = store[3:].view(k.shape)
    view.copy_(k)
    return q, view, v


def element_strides(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """Every other element of wider rows, and elements as the outermost axis."""
    wide = torch.zeros(*k.shape[:3], 2 * k.shape[3], dtype=k.dtype)
    wide[..., ::2] = k
    return q.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), wide[..., ::2], v


@pytest.mark.parametrize("mode", ["in order", "checked"])
@pytest.mark.parametrize("layout", [contiguous, packed, broadcast, odd_offset, element_strides])
def test_layouts(emulated: Callable[..., Library], layout: Callable[..., Heads], mode: str) -> None:
    check(emulated("attention", **MODES[mode]), *layout(*heads(2, 2, 37, 37, 40, torch.float16)))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_scales(emulated: Callable[..., Library], scale: float) -> None:
    check(emulated("attention"), *heads(1, 1, 9, 50, 40, torch.float32), scale)


def test_a_sum_of_equal_values_is_the_value(emulated: Callable[..., Library]) -> None:
    """A property of softmax: the weights add up to 1, whatever the scores."""
    q, k, _ = heads(1, 2, 20, 70, 64, torch.float32)
    v = torch.full_like(k, 0.75)
    out = poisoned(*q.shape, dtype=q.dtype)
    launch.attention(emulated("attention"), q * 5, k, v, out, 1.0)
    torch.testing.assert_close(out, torch.full_like(out, 0.75), rtol=0, atol=2e-7)


def nan_query(q: Tensor, k: Tensor, v: Tensor) -> None:
    q[0, 0, 3, 5] = float("nan")


def nan_key(q: Tensor, k: Tensor, v: Tensor) -> None:
    k[0, 0, 0, 0] = float("nan")


def nan_value(q: Tensor, k: Tensor, v: Tensor) -> None:
    v[0, 1, 40, 2] = float("nan")


def infinite_score(q: Tensor, k: Tensor, v: Tensor) -> None:
    q[0, 0, 2] = 1.0
    k[0, 0, 7] = float("inf")


def a_first_tile_of_minus_infinity(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The running maximum stays at -inf for a whole tile, and the result is finite all the same."""
    q[:] = q.abs()
    k[0, 0, :32] = -float("inf")


def only_minus_infinity(q: Tensor, k: Tensor, v: Tensor) -> None:
    q[:] = q.abs()
    k[0, 1] = -float("inf")


@pytest.mark.parametrize("nan_wins", [False, True], ids=["max ignores NaN", "max keeps NaN"])
@pytest.mark.parametrize(
    "spoil",
    [nan_query, nan_key, nan_value, infinite_score, a_first_tile_of_minus_infinity, only_minus_infinity],
)
def test_what_is_not_finite(
    emulated: Callable[..., Library], spoil: Callable[[Tensor, Tensor, Tensor], None], nan_wins: bool
) -> None:
    """As the reference has it, under either reading of max(x, NaN)."""
    q, k, v = heads(1, 2, 12, 45, 40, torch.float32)
    spoil(q, k, v)
    check(emulated("attention", defines=["MSL_NAN_WINS"] if nan_wins else []), q, k, v)


@pytest.mark.cpu_slow
@pytest.mark.parametrize("batch, keys", [(2, 77), (1, 1024)])
def test_sd15_at_its_real_size(emulated: Callable[..., Library], batch: int, keys: int) -> None:
    """512 x 512: 4096 queries against 77 tokens of text; and some of the self-attention's keys."""
    check(emulated("attention"), *heads(batch, 8 if keys == 77 else 1, 4096, keys, 40, torch.float16))
