"""The attention processors of Flux and SD 3, put in place of Diffusers' own: the same steps through ops.

Text and image are joined in Diffusers' order (Flux: text first; SD 3: image first). Projections and norms
are called as modules, so LoRA, quantisation and hooks on them work as before. In memory heads stay within
their positions, (B, L, N, E), which is how projections leave them and how the output projection reads them.
Source: diffusers 0.36 to 0.42.1, models/transformers/transformer_flux.py, models/attention_processor.py.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from clearway.models._bound import Bound, needs_gradient
from clearway.ops.attention import attention
from clearway.ops.rope import rope

Tables = tuple[Tensor, Tensor]
_DISPATCH = "diffusers.models.attention_dispatch"
_NATIVE = "native"
_BY_ROW = {
    "torch.nn.modules.normalization.LayerNorm",
    "torch.nn.modules.normalization.RMSNorm",
    "diffusers.models.normalization.FP32LayerNorm",
    "diffusers.models.normalization.LpNorm",
    "diffusers.models.normalization.RMSNorm",
}
"""Norms of queries and keys that read each head of each position by itself, in whichever order these lie."""


class Processor:
    """Stands in for `stock`, which it keeps for gradients, for what it does not compute and for `restore`."""

    def __init__(self, stock: Any = None) -> None:
        self.stock = stock if stock is not None else self.usual()()

    @staticmethod
    def usual() -> type[Any]:
        """The class stood in for: unloading an IP-Adapter makes a new one of each processor's class."""
        raise NotImplementedError


class FluxProcessor(Processor):
    """For FluxAttnProcessor. `rotate`: queries and keys are rotated by the op, else by Diffusers."""

    def __init__(self, stock: Any = None, rotate: bool = True) -> None:
        super().__init__(stock)
        self.rotate = rotate
        self.backend = self.stock._attention_backend

    @staticmethod
    def usual() -> type[Any]:
        from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

        kind: type[Any] = FluxAttnProcessor
        return kind

    @property
    def _attention_backend(self) -> Any:
        """Set by `set_attention_backend`: at the processor that it is meant for, which then runs; and here,
        where a captured graph looks for what has changed."""
        return self.backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.backend = self.stock._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self.stock._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.stock._parallel_config = config

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        x, context = hidden_states, encoder_hidden_states
        if (
            (context is None) != (attn.added_kv_proj_dim is None)
            or needs_gradient(attn, x, context)
            or refuse_backend(self.stock)
        ):
            return self.stock(attn, x, context, attention_mask, image_rotary_emb)
        q, k, v = (_of_heads(part, attn.head_dim) for part in _projected(attn, x))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if context is not None:
            added = _projected_text(attn, context)
            text_q, text_k, text_v = (_of_heads(part, attn.head_dim) for part in added)
            text_q, text_k = attn.norm_added_q(text_q), attn.norm_added_k(text_k)
            q, k, v = (torch.cat(pair, dim=1) for pair in ((text_q, q), (text_k, k), (text_v, v)))
        if image_rotary_emb is not None:
            q, k = self._rotated(q, image_rotary_emb), self._rotated(k, image_rotary_emb)
        out = _attended(q, k, v, _broadcast(attention_mask, q, k))
        if context is None:
            return out
        tokens = context.shape[1]
        text, image = out[:, :tokens], out[:, tokens:]
        image = attn.to_out[1](attn.to_out[0](image.contiguous()))
        return image, attn.to_add_out(text.contiguous())

    def _rotated(self, x: Tensor, tables: Any) -> Tensor:
        """Queries or keys (B, L, N, E) by the tables (L, E) of their positions."""
        if self.rotate and _are_tables(tables):
            cos, sin = (table.to(x.device) for table in tables)
            out: Tensor = rope(x.transpose(1, 2), cos, sin)
            return out.transpose(1, 2)
        from diffusers.models.embeddings import apply_rotary_emb

        turned: Tensor = apply_rotary_emb(x, tables, sequence_dim=1)
        return turned


class JointProcessor(Processor):
    """For JointAttnProcessor2_0, which reads no mask."""

    @staticmethod
    def usual() -> type[Any]:
        from diffusers.models.attention_processor import JointAttnProcessor2_0

        kind: type[Any] = JointAttnProcessor2_0
        return kind

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        x, context = hidden_states, encoder_hidden_states
        if needs_gradient(attn, x, context) or refuse_joint(attn):
            return self.stock(attn, x, context, attention_mask, *args, **kwargs)
        q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
        size = k.shape[-1] // attn.heads
        q, k, v = _of_heads(q, size), _of_heads(k, size), _of_heads(v, size)
        q, k = _normed(attn.norm_q, q), _normed(attn.norm_k, k)
        if context is not None:
            added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            text_q, text_k, text_v = (_of_heads(project(context), size) for project in added)
            text_q, text_k = _normed(attn.norm_added_q, text_q), _normed(attn.norm_added_k, text_k)
            q, k, v = (torch.cat(pair, dim=1) for pair in ((q, text_q), (k, text_k), (v, text_v)))
        out = _attended(q, k, v)
        if context is None:
            return attn.to_out[1](attn.to_out[0](out))
        image, text = out[:, : x.shape[1]], out[:, x.shape[1] :]
        if not attn.context_pre_only:
            text = attn.to_add_out(text)
        return attn.to_out[1](attn.to_out[0](image)), text


def _projected(attn: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of the image, (B, L, N E) each."""
    if attn.fused_projections:
        return attn.to_qkv(x).chunk(3, dim=-1)  # type: ignore[no-any-return]
    return attn.to_q(x), attn.to_k(x), attn.to_v(x)


def _projected_text(attn: Any, context: Tensor) -> tuple[Tensor, ...]:
    if attn.fused_projections:
        return attn.to_added_qkv(context).chunk(3, dim=-1)  # type: ignore[no-any-return]
    return attn.add_q_proj(context), attn.add_k_proj(context), attn.add_v_proj(context)


def _of_heads(x: Tensor, size: int) -> Tensor:
    """(B, L, N E) as (B, L, N, E)."""
    return x.view(x.shape[0], x.shape[1], -1, size)


def _normed(norm: Any, x: Tensor) -> Tensor:
    out: Tensor = x if norm is None else norm(x)
    return out


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of (B, L, N, E), its heads side by side: (B, L, N E)."""
    out: Tensor = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, False, mask)
    return out.transpose(1, 2).flatten(2, 3)


def _broadcast(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask as attention reads it: one of keys (B, S) for every head and query, as Diffusers takes it."""
    if mask is not None and mask.shape == (q.shape[0], k.shape[1]):
        return mask[:, None, None]
    return mask


def _are_tables(tables: Any) -> bool:
    """Whether cosines and sines are one row a position, as the op reads them."""
    return len(tables) == 2 and all(isinstance(table, Tensor) and table.dim() == 2 for table in tables)


def refuse_flux(attn: Any) -> str | None:
    """Why this FluxAttention keeps its processor."""
    return refuse_backend(attn.processor)


def refuse_joint(attn: Any) -> str | None:
    """Why this Attention keeps its joint processor; asked of each call, since hooks come and go."""
    if attn.to_out is None or attn.to_k is None:
        return "it projects less than queries, keys, values and its output"
    norms = (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)
    if not all(norm is None or _by_row(norm) for norm in norms):
        return "a norm of its queries or keys is of another class, or hooked"
    return None


def _by_row(norm: Any) -> bool:
    forward = norm.__dict__.get("forward")
    ours = forward is None or isinstance(forward, Bound)
    ours = ours or getattr(forward, "__func__", None) is type(norm).forward
    return qualified(norm) in _BY_ROW and ours and not norm._forward_hooks and not norm._forward_pre_hooks


def refuse_backend(processor: Any) -> str | None:
    """Why attention runs as Diffusers was told to: by `set_attention_backend`, its context or variable."""
    if getattr(processor, "_parallel_config", None) is not None:
        return "its attention is spread over devices"
    backend = getattr(processor, "_attention_backend", None)
    if backend is None:
        backend = sys.modules[_DISPATCH]._AttentionBackendRegistry.get_active_backend()[0]
        if _name(backend) == _NATIVE:
            return None
    return f"its attention backend was set to {_name(backend)}"


def _name(backend: Any) -> str:
    return str(getattr(backend, "value", backend))


def qualified(module: Any) -> str:
    """The full name of a module's exact class, by which it is known without importing that."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"
