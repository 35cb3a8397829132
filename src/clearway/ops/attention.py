"""Attention: out = softmax(scale * q k^T + mask) v, softmax over the keys; scale is 1 / sqrt(E) where None.

Self-attention of the SD 1.x UNet: 4096, 1024, 256 and 64 tokens at 512x512 in heads of 40, 80 and 160 (8
heads); SDXL's: 4096 and 1024 tokens in heads of 64 (10 and 20). Cross-attention reads 77 keys, or a multiple
of them. The VAE has one head of 512 over every latent pixel, the text encoder causal heads of 64 over 77
tokens. A batch holds both halves of the guidance.
Sources: Vaswani et al. 2017 (arXiv 1706.03762); `streaming`: Milakov and Gimelshein 2018 (arXiv 1805.02867)
over chunks as Rabe and Staats 2021 (arXiv 2112.05682), its gradient as Dao et al. 2022 (arXiv 2205.14135);
limits of PyTorch's backends: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway.ops import (
    _cpp,
    _metal,
    _metal_launch,
    _triton,
    attention_gemm,
    attention_native,
    attention_streaming,
    attention_tiled,
    attention_torch,
    budget,
)
from clearway.ops._cases import normal
from clearway.ops.contract import Case, Given, op

# Default tables: where an implementation is preferred over PyTorch's own choice. They are policy: whoever
# names an implementation gets it wherever it can run, and a table tuned on the machine comes first.
MPS_DTYPE, MPS_QUERY_TOKENS, MPS_HEAD_SIZES = torch.float16, 192, (40, 80, 160)
"""On MPS `metal` is preferred for this dtype, from so many query tokens on, in these heads (requirements of
the Metal build of the WebUI; PyTorch has no Metal kernel for heads of 40 and 160). Not measured by this
package yet."""

CUDA_WIDE_HEADS = 256
"""On CUDA `gemm` is preferred for wider heads in half precision, which flash and cuDNN refuse. It was found
sound on an H200; no result file holds its times yet."""

CUDA_CUDNN_CAPABILITY, CUDA_CUDNN_TOKENS = (9, 0), 1024
"""On Hopper `cudnn` is preferred from so many query and key tokens on. NVIDIA H200, fp16, torch 2.11.0+cu130,
2026-11-29, ms, flash against cuDNN: 2x10x4096x4096x64 0.306, 0.189; 2x20x1024x1024x64 0.055, 0.036;
2x8x4096x4096x40 0.281, 0.155 (bench/results/nvidia-h200/ops_attention.jsonl). Slower on A100 (0.82x) and
Blackwell (0.88x; huggingface/transformers#48163)."""

CUDA_FEW_KEYS, CUDA_FEW_TILES = 128, {64: 2560, 160: 512}
"""On Hopper `tiled` is preferred in half precision up to so many keys, which it takes as one tile
(cross-attention, the UNets' smallest images), while there are, in heads of at most that size, no more tiles
of 64 queries: larger batches fill cuDNN's tiles."""

CUDA_SHORT, CUDA_SHORT_TILES = {64: 1024}, 640
"""In heads of these sizes up to these numbers of keys, too, where it is level with cuDNN alone and needs none
of the fills that cuDNN launches before it. NVIDIA H200, fp16, torch 2.11.0+cu130, 2026-11-30, µs, cuDNN
against tiled: 1x20x1024x1024x64 25.9, 21.2; 2x20 36.3, 36.0; 4x20 56.1, 61.1; 16x20 200, 223; 2x8x256x256x160
11.6, 13.1 (bench/results/nvidia-h200/attention_tiles.jsonl)."""


def inputs(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    size: int,
    *,
    permuted: bool = True,
    scale: float | None = None,
    is_causal: bool = False,
    mask: Tensor | None = None,
    value_size: int | None = None,
) -> Case:
    """Arguments; `permuted`: q, k and v as views of (B, L, N, E), which is how projections leave them."""

    def one(tokens: int, width: int, seed: int) -> Tensor:
        if permuted:
            return normal(batch, tokens, heads, width, seed=seed).transpose(1, 2)
        return normal(batch, heads, tokens, width, seed=seed)

    value = one(keys, value_size or size, 2)
    return one(queries, size, 0), one(keys, size, 1), value, scale, is_causal, mask


def _packed() -> Case:
    """q, k and v as slices of one tensor (B, L, 3, N, E)."""
    whole = normal(1, 45, 3, 3, 40)
    q, k, v = (whole[:, :, i].transpose(1, 2) for i in range(3))
    return q, k, v, None, False, None


def _broadcast() -> Case:
    """Both halves of a batch read one context: k and v have stride 0 along B."""
    q, k, v, *rest = inputs(2, 4, 50, 77, 40)
    return q, k[:1].expand_as(k), v[:1].expand_as(v), *rest


def _masks() -> Iterator[tuple[str, Case]]:
    padding = torch.ones(2, 1, 1, 77, dtype=torch.bool)
    padding[1, ..., 60:] = False
    yield "padding mask", inputs(2, 2, 33, 77, 40, mask=padding)
    yield "bias as mask", inputs(1, 2, 24, 31, 64, mask=normal(1, 2, 24, 31, seed=3))
    none = torch.ones(1, 1, 9, 12, dtype=torch.bool)
    none[..., 4, :] = False
    yield "a row without keys", inputs(1, 2, 9, 12, 40, mask=none)


def cases() -> Iterator[tuple[str, Given]]:
    """Shapes of SD and SDXL UNets, VAEs and text encoders, and small ones of every layout."""
    yield "tiny", inputs(1, 1, 3, 5, 8)
    yield "one key", inputs(1, 2, 7, 1, 40)
    yield "ragged 40", inputs(2, 3, 67, 77, 40)
    yield "ragged 80", inputs(1, 2, 97, 97, 80)
    yield "ragged 160", inputs(1, 2, 65, 33, 160)
    yield "64, contiguous", inputs(1, 4, 64, 64, 64, permuted=False)
    yield "heads of 20", inputs(1, 2, 40, 40, 20)
    yield "scale", inputs(1, 2, 40, 77, 64, scale=0.5)
    yield "several tiles of keys", inputs(1, 2, 70, 300, 40)
    yield "whole tiles of keys", inputs(1, 1, 70, 256, 64)
    yield "large scores", inputs(1, 2, 40, 77, 40, scale=4.0)
    yield "packed q, k and v", _packed()
    yield "broadcast k and v", _broadcast()
    yield "text encoder, causal", inputs(1, 4, 77, 77, 64, is_causal=True)
    yield "values of another size", inputs(1, 2, 20, 24, 40, value_size=24)
    yield from _masks()
    yield "SD1.5 8x8", lambda: inputs(2, 8, 64, 64, 160)
    yield "SD1.5 16x16", lambda: inputs(2, 8, 256, 256, 160)
    yield "SD1.5 32x32", lambda: inputs(2, 8, 1024, 1024, 80)
    yield "SD1.5 64x64", lambda: inputs(2, 8, 4096, 4096, 40)
    yield "SD1.5 64x64, cross", lambda: inputs(2, 8, 4096, 77, 40)
    yield "SDXL 32x32", lambda: inputs(2, 20, 1024, 1024, 64)
    yield "SDXL 64x64", lambda: inputs(2, 10, 4096, 4096, 64)
    yield "SDXL 64x64, cross", lambda: inputs(2, 10, 4096, 77, 64)
    yield "VAE 512", lambda: inputs(1, 1, 4096, 4096, 512)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the implementations do not take."""
    plain = inputs(1, 2, 8, 8, 40)
    q, k, v, *rest = plain
    mask = torch.ones(8, 8, dtype=torch.bool)
    yield "metal", "mask", (*plain[:5], mask)
    yield "metal", "causal", inputs(1, 2, 8, 8, 40, is_causal=True)
    yield "metal", "heads of 48", inputs(1, 2, 8, 8, 48)
    yield "metal", "differ", inputs(1, 2, 8, 8, 40, value_size=80)
    yield "metal", "float64", (q.double(), k.double(), v.double(), *rest)
    yield "metal", "heads", (q, k[:, :1], v[:, :1], *rest)
    yield "flash", "float32", plain
    yield "flash", "mask", (q.half(), k.half(), v.half(), None, False, mask)
    yield "flash", "heads of 264", _half(inputs(1, 1, 8, 8, 264))
    yield "cudnn", "float32", plain
    yield "cudnn", "multiple of 8", _half(inputs(1, 1, 8, 8, 20))
    yield "cudnn", "mask", (q.half(), k.half(), v.half(), None, False, mask)
    yield "efficient", "float64", (q.double(), k.double(), v.double(), *rest)
    yield "efficient", "multiple of", tuple(inputs(1, 1, 8, 8, 18))
    yield "gemm", "mask", (*plain[:5], mask)
    yield "gemm", "causal", inputs(1, 2, 8, 8, 40, is_causal=True)
    yield "gemm", "float64", (q.double(), k.double(), v.double(), *rest)
    yield "gemm", "keys", (q, k.repeat(1, 1, 4096, 1), v.repeat(1, 1, 4096, 1), *rest)
    yield "native", "mask", (*plain[:5], mask)
    yield "native", "causal", inputs(1, 2, 8, 8, 40, is_causal=True)
    yield "native", "float64", (q.double(), k.double(), v.double(), *rest)
    yield "native", "belong together", (q, k, v[:, :, :5], *rest)
    yield "native", "heads of 264", inputs(1, 1, 8, 8, 264)
    yield "tiled", "mask", (*plain[:5], mask)
    yield "tiled", "causal", inputs(1, 2, 8, 8, 40, is_causal=True)
    yield "tiled", "float64", (q.double(), k.double(), v.double(), *rest)
    yield "tiled", "heads of 200", inputs(1, 2, 8, 8, 200)
    yield "tiled", "differ", inputs(1, 2, 8, 8, 40, value_size=80)
    yield "tiled", "not contiguous", (q.transpose(2, 3).contiguous().transpose(2, 3), k, v, *rest)
    yield "streaming", "axes", (q[0], k[0], v[0], *rest)
    yield "sdpa", "together", (*plain[:4], True, mask)


def _half(case: Case) -> Case:
    return tuple(arg.half() if isinstance(arg, Tensor) else arg for arg in case)


def _size_class(q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Any) -> str:
    _, _, queries, size = q.shape
    kind = "" if mask is None and not is_causal else " masked"
    return f"{_log2(q.shape[0] * q.shape[1])}x{_log2(queries)}x{_log2(k.shape[2])}x{size}{kind}"


def _log2(number: int) -> int:
    return round(math.log2(max(number, 1)))


def _peak(q: Tensor, k: Tensor, *_: Any) -> float:
    rows = q.numel() // (q.size(-1) or 1)  # batch * heads * query tokens; .size() is quicker than .shape
    return budget.PEAK_FACTOR * rows * k.size(-2) * q.itemsize


def _projected(out: Tensor) -> Tensor:
    """What follows attention in every block: heads side by side, then a projection."""
    batch, heads, tokens, size = out.shape
    weight = torch.linspace(-1, 1, 16 * heads * size).reshape(16, heads * size).to(out.device, out.dtype)
    return F.linear(out.transpose(1, 2).reshape(batch, tokens, heads * size), weight)


def _flops(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda q, k, v, *_: 2 * q.nbytes + k.nbytes + v.nbytes,
    flops=_flops,
    size_class=_size_class,
    then=_projected,
    exact=attention_streaming.run,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T + mask) v in the layout torch.empty_like(q) has; scale is 1 / sqrt(E) where None.

    q (B, N, L, E), k (B, N, S, E), v (B, N, S, E'); B and N of k and v may be 1. `is_causal`: query i reads
    keys 0 to i. `mask` broadcasts to (B, N, L, S): booleans (True: read), or numbers that are added. A row
    that reads nothing gives zeros.
    """
    scores = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    weights = torch.softmax(scores, -1)
    if mask is not None:
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    out = weights.to(v.dtype) @ v
    return _in_layout(out, q)


def _in_layout(out: Tensor, q: Tensor) -> Tensor:
    """`out` in q's layout, where the two have one shape; else contiguous."""
    if out.shape != q.shape:
        return out.contiguous()
    wanted = torch.empty_like(q)
    return out if out.stride() == wanted.stride() else wanted.copy_(out)


# In order of preference. PyTorch's own choice comes first, its backends by name only where a table says so.
for _kind in ("cuda", "cpu", "xpu"):
    attention.implementation(
        "sdpa",
        device=_kind,
        refuse=attention_torch.refuse_cuda if _kind == "cuda" else attention_torch.refuse,
        stock=True,
        peak=_peak,
        materialises=attention_torch.materialises,
    )(attention_torch.run)
attention.implementation(
    "sdpa",
    device="mps",
    refuse=attention_torch.refuse_mps,
    stock=True,
    peak=_peak,
    materialises=attention_torch.materialises_mps,
)(attention_torch.run_mps)
for _name in ("cudnn", "flash", "efficient"):
    attention.implementation(_name, device="cuda", refuse=attention_torch.REFUSE[_name], stock=True)(
        attention_torch.RUN[_name]
    )


@attention.default("cuda")
def _prefer_on_cuda(q: Tensor, k: Tensor, *_: Any) -> str | None:
    if q.shape[-1] > CUDA_WIDE_HEADS and q.dtype != torch.float32:
        return "gemm"
    if attention_torch.capability(q) != CUDA_CUDNN_CAPABILITY:
        return None
    keys, size = k.shape[-2], q.shape[-1]
    tiles = q.shape[0] * q.shape[1] * -(-q.shape[-2] // 64)
    most = next((most for widest, most in CUDA_FEW_TILES.items() if size <= widest), 0)
    few = keys <= CUDA_FEW_KEYS and tiles <= most
    short = keys <= CUDA_SHORT.get(size, 0) and tiles <= CUDA_SHORT_TILES
    if (few or short) and q.dtype != torch.float32:
        return "tiled"
    return "cudnn" if min(q.shape[-2], keys) >= CUDA_CUDNN_TOKENS else None


@attention.default("cpu")
def _prefer_on_cpu(q: Tensor, k: Tensor, *_: Any) -> str | None:
    return "native" if q.dtype == torch.float32 and attention_native.preferred(q, k) else None


@attention.default("mps")
def _prefer_on_mps(q: Tensor, *_: Any) -> str | None:
    wanted = q.dtype == MPS_DTYPE and q.shape[-2] >= MPS_QUERY_TOKENS
    return "metal" if wanted and q.shape[-1] in MPS_HEAD_SIZES else None


def _refuse_metal(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> str | None:
    if mask is not None or is_causal:
        return "there is a mask" if mask is not None else "it is causal; its kernel reads every key"
    reason = attention_torch.unequal(q, k, v)
    if reason:
        return reason
    if q.dtype not in _metal_launch.TYPES:
        return f"inputs are {q.dtype}; it takes float16, bfloat16 or float32"
    if v.shape[-1] != q.shape[-1]:
        return f"heads of q and v differ: {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[-1] not in _metal_launch.HEAD_SIZES:
        return f"heads of {q.shape[-1]}; it takes {', '.join(map(str, _metal_launch.HEAD_SIZES))}"
    reach = max(32 * t.stride(2) + t.shape[3] * t.stride(3) for t in (q, k, v))
    if reach >= 2**32:
        return "rows lie so far apart that a tile of 32 spans 2^32 elements"
    return attention_torch.restricted()


@attention.implementation(
    "metal",
    device="mps",
    absent=_metal.absent,
    refuse=_refuse_metal,
    sources=("attention.metal", "_metal.py", "_metal_launch.py"),
)
def _metal_run(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> Tensor:
    out = torch.empty_like(q)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    _metal_launch.attention(_metal.library("attention"), q, k, v, out, factor)
    return out


attention.implementation(
    "gemm",
    device="cuda",
    absent=_triton.absent,
    refuse=attention_gemm.refuse,
    sources=("attention_gemm.py", "_triton.py"),
)(attention_gemm.run)
attention.implementation(
    "tiled",
    device="cuda",
    absent=_triton.absent,
    refuse=attention_tiled.refuse,
    sources=("attention_tiled.py", "_triton.py"),
)(attention_tiled.run)
attention.implementation(
    "native",
    device="cpu",
    absent=_cpp.absent,
    refuse=attention_native.refuse,
    sources=("attention_native.py", "attention.cpp", "_cpp.py"),
    made_by=_cpp.maker,
)(attention_native.run)
attention.implementation(
    "streaming",
    device="any",
    refuse=attention_streaming.refuse,
    differentiable=True,
    sources=("attention_streaming.py", "budget.py"),
)(attention_streaming.run)
for _kind in ("cuda", "cpu", "xpu"):
    attention.implementation(
        "math", device=_kind, refuse=attention_torch.REFUSE["math"], stock=True, peak=_peak
    )(attention_torch.RUN["math"])
