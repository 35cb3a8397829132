"""What a module is, for tests of whoever puts things in place in it and takes them away again."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn


def bits(module: nn.Module) -> dict[str, str]:
    """Every weight's value, bit by bit."""
    return {
        name: hashlib.sha256(weight.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, weight in module.named_parameters()
    }


def marks(module: nn.Module) -> list[Any]:
    """Everything that `restore` must bring back: attributes by identity, hooks, and each tensor's strides."""
    found: list[Any] = []
    for name, child in module.named_modules():
        held = {key: id(value) for key, value in vars(child).items() if not key.startswith("_")}
        hooks = [*child._forward_pre_hooks.values(), *child._forward_hooks.values()]
        found.append((name, type(child), sorted(vars(child)), held, hooks))
        found += [(key, id(w), w.stride()) for key, w in child.named_parameters(recurse=False)]
    return found
