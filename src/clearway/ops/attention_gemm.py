"""Attention by two matrix products and a softmax, some query rows at a time: for heads too wide to be fused.

The VAE has one head of 512, which flash and cuDNN refuse. Scores are float32 (SDXL's overflow half precision)
and so few rows at once that they stay in the cache; the softmax scales them and writes half precision.
Source: the formula; chunks as Rabe and Staats 2021 (arXiv 2112.05682), whole rows, so nothing is rescaled.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

import math

import torch
from torch import Tensor

from clearway.ops import _triton, attention_torch
from clearway.ops._layout import in_layout_of, refuse_dtype
from clearway.ops._triton import kernel, tl

SCORES_BYTES = 2**25
"""Scores at once: of 16,384 keys 512 query rows, which an H200's 60 MB of cache hold with their softmax."""


def refuse(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> str | None:
    """What it does not take; metadata only."""
    reason = attention_torch.restricted_keys(q, k, v, is_causal, mask)
    reason = reason or refuse_dtype("q", q, _triton.DTYPES)
    if reason is None and k.shape[2] > _triton.WIDEST:
        return f"there are {k.shape[2]} keys; it takes up to {_triton.WIDEST}"
    return reason


@kernel
def _softmax_rows(scores, out, keys, scale, BLOCK: tl.constexpr):
    """softmax(scale * row) in the dtype of out; one row a program."""
    row = tl.program_id(0).to(tl.int64) * keys
    c = tl.arange(0, BLOCK)
    live = c < keys
    x = tl.load(scores + row + c, mask=live, other=0.0) * scale
    x = tl.where(live, x, -float("inf"))  # after the scale, which may be negative or 0
    x = tl.exp(x - tl.max(x, 0))
    tl.store(out + row + c, (x / tl.sum(x, 0)).to(out.dtype.element_ty), mask=live)


def run(q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None) -> Tensor:
    """The op, for arguments it does not refuse."""
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    scale = 1 / math.sqrt(size) if scale is None else scale
    rows = max(min(SCORES_BYTES // (4 * keys * batch * heads), queries), 1)
    wide, values = k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1)
    parts = []
    for part in torch.split(q.flatten(0, 1), rows, dim=1):
        scores = _scores(part, wide)
        weights = torch.empty_like(scores, dtype=v.dtype)
        block = _triton.power_of_two(keys)
        _softmax_rows.launch(
            (scores.shape[0] * scores.shape[1],),
            *(scores, weights, keys, scale),
            BLOCK=block,
            num_warps=_triton.warps(block),
        )
        parts.append(weights @ values)
    made = torch.cat(parts, 1).view(batch, heads, queries, v.shape[3])
    return in_layout_of(q, made) if made.shape == q.shape else made


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q @ k in float32, whatever they are in."""
    if q.dtype == torch.float32:
        return q @ k
    if q.is_cuda:
        return torch.bmm(q, k, out_dtype=torch.float32)
    return q.float() @ k.float()
