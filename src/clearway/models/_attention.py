"""The attention processor that is put in place of Diffusers' AttnProcessor2_0: the same steps through ops.

Cross-attention's keys and values are computed once per context (execution/kept.py), a self-attention's three
projections can be one (`packed`). Source: diffusers 0.36 to 0.42.1, models/attention_processor.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from clearway.execution.kept import Kept
from clearway.models._bound import Bound, needs_gradient
from clearway.models._joined import alike, joined, ordinary
from clearway.models._linear import product
from clearway.ops.attention import attention


class Processor:
    """Stands in for `stock`, which it keeps for gradients and for `restore`.

    `kept`: keys and values of a context are kept; `promised`: nobody changes a context in place that was made
    under inference_mode; `packed`: query, key and value are one projection where they read one input.
    """

    def __init__(
        self, stock: Any = None, kept: bool = False, promised: bool = False, packed: bool = False
    ) -> None:
        if stock is None:  # loading an IP-Adapter makes a new one of each processor's class
            from diffusers.models.attention_processor import AttnProcessor2_0

            stock = AttnProcessor2_0()
        self.stock = stock
        self.promised, self.packed = promised, packed
        self.kept = Kept() if kept else None
        listen()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        listen()

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        x, context = hidden_states, encoder_hidden_states
        if args or kwargs or needs_gradient(attn, x, context) or refuse(attn):
            other: Tensor = self.stock(attn, x, context, attention_mask, temb, *args, **kwargs)
            return other
        image = x.shape if x.dim() == 4 else None
        if image:
            x = x.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        batch, heads = x.shape[0], attn.heads
        mask = attention_mask
        if mask is not None:
            tokens = x.shape[1] if context is None else context.shape[1]
            mask = attn.prepare_attention_mask(mask, tokens, batch)
            mask = mask.view(batch, heads, -1, mask.shape[-1])
        q, k, v = (
            part.view(part.shape[0], -1, heads, part.shape[-1] // heads).transpose(1, 2)
            for part in self._projected(attn, x, context)
        )
        out: Tensor = attention(q, k, v, None, False, mask)
        out = out.transpose(1, 2).reshape(batch, -1, q.shape[-1] * heads)
        out = attn.to_out[1](attn.to_out[0](out))
        if image:
            out = out.transpose(1, 2).reshape(image)
        if attn.residual_connection:
            out = out + hidden_states
        factor: float = attn.rescale_output_factor
        return out if factor == 1.0 else out / factor

    def _projected(self, attn: Any, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, L, N E) each."""
        if context is None:
            # a compiler cannot see where weights lie
            if self.packed and not torch.compiler.is_compiling() and refuse_packed(attn) is None:
                weight, bias = self._packed(attn)
                q, k, v = product(attn.to_q)(x, weight, bias).chunk(3, dim=-1)
                return q, k, v
            return attn.to_q(x), attn.to_k(x), attn.to_v(x)
        read = context

        def compute() -> tuple[Tensor, Tensor]:
            return attn.to_k(read), attn.to_v(read)

        if self.kept is None or not (ordinary(attn.to_k) and ordinary(attn.to_v)):
            return attn.to_q(x), *compute()
        weights = [*attn.to_k.parameters(), *attn.to_v.parameters()]
        products = attn.to_k.bias is None and attn.to_v.bias is None
        k, v = self.kept.get(context, weights, compute, self.promised, products)
        return attn.to_q(x), k, v

    def _packed(self, attn: Any) -> tuple[Tensor, Tensor | None]:
        """The three weights as one tensor, and the biases."""
        layers = (attn.to_q, attn.to_k, attn.to_v)
        bias = None if attn.to_q.bias is None else joined([layer.bias for layer in layers])
        return joined([layer.weight for layer in layers]), bias


def default(part: Any) -> None:
    """What `set_default_attn_processor` of a Diffusers model does, which knows no Processor."""
    for module in part.modules():
        processor = module.__dict__.get("processor")
        if isinstance(processor, Processor):
            module.processor = processor.stock
    type(part).set_default_attn_processor(part)


@functools.cache
def listen() -> None:
    """From now on a projection put in the place of another makes its attention forget keys and values, and a
    convolution its upsampler what was made of it.

    PEFT merges an adapter through `.data`, which raises no version, and then puts the layer that it had
    wrapped back in its place: the same object at the same address with other values.
    """

    def replaced(attn: nn.Module, name: str, _: Any) -> None:
        if name in ("to_k", "to_v"):
            processor = attn.__dict__.get("processor")
            if isinstance(processor, Processor) and processor.kept is not None:
                processor.kept.forget()
        forward = attn.__dict__.get("forward")
        if name == "conv" and isinstance(forward, Bound):
            for held in forward.args:
                if isinstance(held, Kept):
                    held.forget()

    register_module_module_registration_hook(replaced)


def refuse(attn: Any) -> str | None:
    """Why this attention is not computed by `Processor`; asked of each call, since adapters come and go."""
    if attn.spatial_norm is not None or attn.norm_cross is not None:
        return "it norms its inputs by others"
    if attn.norm_q is not None or attn.norm_k is not None:
        return "it norms queries and keys"
    if attn.to_out is None or attn.to_k is None or attn.added_kv_proj_dim is not None:
        return "it projects more, or less, than queries, keys, values and its output"
    return None


def refuse_packed(attn: Any) -> str | None:
    """Why the three projections are not made one."""
    layers = (attn.to_q, attn.to_k, attn.to_v)
    if attn.is_cross_attention:
        return "its keys come from elsewhere"
    if not all(ordinary(layer) for layer in layers):
        return "a projection is wrapped, quantised or hooked"
    if len({layer.weight.shape for layer in layers}) > 1 or not alike(layers):
        return "its projections differ in shape, dtype or where they lie"
    return None
