"""Linear layers of a UNet's transformers by the op `linear`: their forward, and what is computed of them.

A layer stays a module that is called, so hooks and LoRA on it work as before, and counts as plain: what takes
several layers together, or a pointwise convolution as a product, goes through the op where the layer does.
Source: diffusers 0.36 to 0.42.1, models/attention.py, transformers/transformer_2d.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from clearway.models._bound import Bound, needs_gradient, own, plain_weight, same
from clearway.ops.linear import linear

MARK = "_clearway_linear"
"""Where a pointwise convolution holds that its product is the op's."""


@same
def routed(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """nn.Linear."""
    if args or kwargs or needs_gradient(layer, x):
        return own(layer, x, *args, **kwargs)
    return linear(x, layer.weight, layer.bias)


def product(layer: nn.Module) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """What computes a product with this layer's weight, or one that it is part of, without calling it."""
    held = layer.__dict__
    if MARK in held:
        return linear
    forward = held.get("forward")
    return linear if isinstance(forward, Bound) and forward.func is routed else F.linear


def layers(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of the linear layers that many rows go through in a Transformer2DModel.

    Not those of a context, whose keys and values are computed once.
    """
    from diffusers.models.activations import GEGLU
    from diffusers.models.attention import FeedForward
    from diffusers.models.attention_processor import Attention

    for name, module in part.named_modules():
        found: dict[str, Any] = {}
        if module is part:
            found = {key: part._modules.get(key) for key in ("proj_in", "proj_out")}
        elif type(module) is Attention:
            keys = ("to_q",) if module.is_cross_attention else ("to_q", "to_k", "to_v")
            found = {key: module._modules.get(key) for key in keys}
            found["to_out.0"] = module.to_out[0] if module.to_out is not None else None
        elif type(module) is GEGLU:
            found = {"proj": module.proj}
        elif type(module) is FeedForward:
            found = {f"net.{number}": layer for number, layer in enumerate(module.net)}
        for key, layer in found.items():
            if type(layer) in (nn.Linear, nn.Conv2d):
                yield f"{name}.{key}" if name else key, layer


def refuse(layer: Any) -> str | None:
    """Why a layer is left alone."""
    return None if plain_weight(layer.weight) else "its weight is quantised or of a class of its own"
