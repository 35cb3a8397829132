"""Attention that never holds a matrix of scores: only one chunk of it, whose size follows the memory budget.

For each chunk of queries, over the chunks of keys:

    new_max       = max(running_max, chunk_max)
    running_scale = exp(running_max - new_max)
    chunk_scale   = exp(chunk_max - new_max)
    values        = values * running_scale + chunk_values * chunk_scale
    weights       = weights * running_scale + chunk_weights * chunk_scale

with chunk_weights and chunk_values the sums of exp(scores - chunk_max) and of those times v; then values /
weights. Sums are float32 (float64 for float64). The gradient computes the chunks anew from the log of the
sums, so training holds no more than inference does. Sources: Milakov and Gimelshein 2018; Rabe and Staats
2021; the gradient: Dao et al. 2022, appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearway.ops import attention_torch, budget


def refuse(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> str | None:
    """Everything but a gradient for the mask is taken."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} axes; it takes (B, N, L, E)"
    if not q.is_floating_point():
        return f"inputs are {q.dtype}"
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return "the mask needs a gradient"
    return attention_torch.restricted()


def run(q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None) -> Tensor:
    """The reference's result in O(chunk) memory; chunks by the budget of the generation at work."""
    outer = [max(sizes) for sizes in zip(q.shape[:2], k.shape[:2], v.shape[:2], strict=True)]
    like = q.shape == (*outer, q.shape[2], v.shape[3])
    q, k, v = (tensor.expand(*outer, -1, -1) for tensor in (q, k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    size = 8 if q.dtype == torch.float64 else 4
    limit = budget.current(q.device).limit_bytes
    chunk = budget.chunks(limit, outer[0] * outer[1], q.shape[2], k.shape[2], size)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        apply: Callable[..., Tensor] = _Streaming.apply
        return apply(q, k, v, mask, factor, is_causal, chunk, like)
    return _forward(q, k, v, mask, factor, is_causal, chunk, like, None)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    factor: float,
    is_causal: bool,
    chunk: tuple[int, int],
    like: bool,
    logsum: Tensor | None,
) -> Tensor:
    """The output; `logsum` (B, N, L, 1), where given, receives the log of each row's sum."""
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape = (*q.shape[:3], v.shape[3])
    out = torch.empty_like(q) if like else q.new_empty(shape)
    for q0, q1 in _spans(q.shape[2], chunk[0]):
        query = q[:, :, q0:q1].to(kind) * factor
        running_max = query.new_full((*query.shape[:3], 1), -math.inf)
        weights = torch.zeros_like(running_max)
        values = query.new_zeros((*query.shape[:3], v.shape[3]))
        for k0, k1 in _spans(min(k.shape[2], q1) if is_causal else k.shape[2], chunk[1]):
            scores = _scores(query, k, mask, is_causal, q0, q1, k0, k1)
            chunk_max = scores.amax(-1, keepdim=True)
            new_max = torch.maximum(running_max, chunk_max)
            scores.sub_(_anchor(chunk_max)).exp_()
            running_scale = torch.exp(running_max - _anchor(new_max))
            chunk_scale = torch.exp(chunk_max - _anchor(new_max))
            weights.mul_(running_scale).add_(scores.sum(-1, keepdim=True).mul_(chunk_scale))
            values.mul_(running_scale).add_((scores @ v[:, :, k0:k1].to(kind)).mul_(chunk_scale))
            running_max = new_max
        if logsum is not None:
            logsum[:, :, q0:q1] = running_max + torch.log(weights)
        values.div_(weights)
        out[:, :, q0:q1] = values.masked_fill_(weights == 0, 0.0)  # rows that read nothing
    return out


def _spans(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, chunk):
        yield start, min(start + chunk, length)


def _anchor(maximum: Tensor) -> Tensor:
    """The maximum, or 0 where nothing is read yet: -inf minus -inf would be NaN."""
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def _scores(
    query: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, q0: int, q1: int, k0: int, k1: int
) -> Tensor:
    """The chunk of scores of scaled queries q0:q1 and keys k0:k1."""
    scores = query @ k[:, :, k0:k1].to(query.dtype).transpose(-2, -1)
    if mask is not None:
        part = mask if mask.dim() > 1 else mask[None]
        part = part if part.shape[-2] == 1 else part[..., q0:q1, :]
        part = part if part.shape[-1] == 1 else part[..., k0:k1]
        if mask.dtype == torch.bool:
            scores.masked_fill_(~part, -math.inf)
        else:
            scores.add_(part)
    if is_causal and k1 - 1 > q0:
        keys = torch.arange(k0, k1, device=query.device)
        scores.masked_fill_(keys > torch.arange(q0, q1, device=query.device)[:, None], -math.inf)
    return scores


class _Streaming(torch.autograd.Function):
    """The gradient, chunk by chunk: P = exp(scores - logsum), dV = P^T dO, dS = P * (dO V^T - rowsum(dO *
    O))."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        factor: float,
        is_causal: bool,
        chunk: tuple[int, int],
        like: bool,
    ) -> Tensor:
        kind = torch.float64 if q.dtype == torch.float64 else torch.float32
        logsum = torch.empty((*q.shape[:3], 1), dtype=kind, device=q.device)
        out = _forward(q, k, v, mask, factor, is_causal, chunk, like, logsum)
        ctx.save_for_backward(q, k, v, mask, out, logsum)
        ctx.settings = factor, is_causal, chunk
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, logsum = ctx.saved_tensors
        factor, is_causal, chunk = ctx.settings
        kind = logsum.dtype
        d_q = torch.zeros(q.shape, dtype=kind, device=q.device)
        d_k = torch.zeros(k.shape, dtype=kind, device=q.device)
        d_v = torch.zeros(v.shape, dtype=kind, device=q.device)
        for q0, q1 in _spans(q.shape[2], chunk[0]):
            query = q[:, :, q0:q1].to(kind) * factor
            d_out = grad[:, :, q0:q1].to(kind)
            along = (d_out * out[:, :, q0:q1]).sum(-1, keepdim=True)
            log = logsum[:, :, q0:q1]
            log = log.masked_fill(log == -math.inf, math.inf)  # rows that read nothing have weights of 0
            for k0, k1 in _spans(min(k.shape[2], q1) if is_causal else k.shape[2], chunk[1]):
                weights = _scores(query, k, mask, is_causal, q0, q1, k0, k1).sub_(log).exp_()
                d_v[:, :, k0:k1] += weights.transpose(-2, -1) @ d_out
                d_scores = (d_out @ v[:, :, k0:k1].to(kind).transpose(-2, -1)).sub_(along).mul_(weights)
                d_q[:, :, q0:q1] += (d_scores @ k[:, :, k0:k1].to(kind)).mul_(factor)
                d_k[:, :, k0:k1] += d_scores.transpose(-2, -1) @ query
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None, None, None, None
