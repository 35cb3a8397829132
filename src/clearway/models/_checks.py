"""Self-tests begun when it is known what will run: side by side, while weights are read and words encoded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from clearway import device as machine
from clearway import ops
from clearway.device import Device
from clearway.models import chosen
from clearway.models._mixed_choice import HALF
from clearway.models._report import Report
from clearway.models.model import Model
from clearway.ops import elsewhere, other_sizes, verdicts
from clearway.types import MIXED, Precision

NAMES = {
    "cross_kv": ("grouped_linear",),
    "group_norm": ("group_norm_silu",),
    "geglu": ("geglu", "geglu_linear"),
    "linear": (),
}
"""The ops behind what the report calls otherwise, or that run in its place; `linear` is PyTorch's own but
where another is named, which is then tested when it is first asked for."""


def begin(label: str, part: nn.Module, report: Report, model: Model | None = None) -> int:
    """Begins the self-tests of the ops in place in `part` where it lies, in its dtype; how many it began.

    A part of `model` runs on that model's device, wherever it rests, and its limit holds for them too.
    """
    weight = next((one for one in part.parameters() if one.is_floating_point()), None)
    if weight is None:
        return 0
    placed = _ops(
        what
        for what, names in report.placed.items()
        if any(name == label or name.startswith(f"{label}.") for name in names)
    )
    if not placed:
        return 0
    _expect(weight.device.type if model is None else model.device.kind)
    if model is None:
        return verdicts.prepare(placed, weight.device.type, weight.dtype, likes(part))
    mixed = model.precision.vae == MIXED and part is model.vae
    dtypes = dict.fromkeys((weight.dtype, *(_halves(model.device) if mixed else ())))
    with machine.capped(model.device, model.memory_limit_bytes):
        return sum(verdicts.prepare(placed, model.device.kind, dtype, likes(part)) for dtype in dtypes)


def begin_loading(device: Device, precision: Precision, limit_bytes: int | None = None) -> int:
    """Begins the self-tests of what a model that is about to be read will be run by; how many it began."""
    wanted = _ops(chosen.default(device.kind).ops)
    if not wanted or device.kind == "cpu":
        return 0
    ops.discover()
    _expect(device.kind)
    halves = _halves(device) if precision.vae == MIXED else ()
    named = map(machine.dtype, (precision.unet, precision.vae_weights))
    with machine.capped(device, limit_bytes):
        return sum(verdicts.prepare(wanted, device.kind, dtype) for dtype in dict.fromkeys((*named, *halves)))


def _expect(kind: str) -> None:
    """Starts the processes that will build kernels for a model on such a device."""
    elsewhere.expect(kind)
    other_sizes.expect(kind)


def _halves(device: Device) -> tuple[torch.dtype, ...]:
    """What parts of a mixed VAE may run in on a device, beside float32."""
    return (machine.dtype(HALF[device.kind]),) if device.kind in HALF else ()


def _ops(names: Iterable[str]) -> list[str]:
    return [op for name in names for op in NAMES.get(name, (name,))]


def likes(part: nn.Module) -> dict[str, tuple[int, ...]]:
    """By op a shape such as its first argument will have, as far as the modules of `part` tell."""
    found: dict[str, tuple[int, ...]] = {}
    for module in part.modules():
        if isinstance(module, nn.LayerNorm):
            found.setdefault("layer_norm", (2, 64, module.normalized_shape[-1]))
        heads, q = getattr(module, "heads", None), getattr(module, "to_q", None)
        if isinstance(heads, int) and isinstance(q, nn.Linear):
            found.setdefault("attention", (2, heads, 64, q.out_features // heads))
        if type(module).__name__ == "GEGLU" and isinstance(module.proj, nn.Linear):
            found.setdefault("geglu", (2, 64, module.proj.out_features))
            found.setdefault("geglu_linear", (2, 64, module.proj.in_features))
    return found
