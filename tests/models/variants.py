"""Kernels that whole networks launch at common sizes, without a device: python -m models.variants sdxl.

UNet and VAE at their real widths have no storage here; what their graphs would launch on an H200 is taken
down at every size, and beside it what is told of a size by the calls taken down at another one. One JSON line
for each pair of sizes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clearway.execution.kept import Frame, within
from clearway.measure import random_model
from clearway.models import chosen
from clearway.models.accelerate import accelerate
from clearway.models.build import classes, diffusers_module
from clearway.ops import _on_paper, _triton, ahead, state
from clearway.ops.contract import OPS

SIZES = {
    "sdxl": (
        (1024, 1024), (832, 1216), (1216, 832), (896, 1152), (1152, 896), (768, 1344), (1344, 768),
        (640, 1536), (1536, 640),
    ),
    "sd15": ((512, 512), (512, 768), (768, 512), (640, 384), (384, 640), (640, 640), (768, 768)),
}  # fmt: skip
HALF = torch.float16
Variant = tuple[str, str, Any, Any]


class Gathered:
    """Stands in for what builds: which variants there were, and of which calls."""

    def __init__(self) -> None:
        self.variants: set[Variant] = set()
        self.calls: ahead.Calls | None = {}

    note = ahead.Gathering.note

    def add(self, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        names = kernel.function.__code__.co_varnames
        signs = tuple(ahead._sign(arg, name in kernel.counts) for arg, name in zip(args, names, strict=False))
        place = kernel.function.__module__.rpartition(".")[2]
        self.variants.add((place, kernel.name, signs, tuple(constants.items())))


class LikeCudnn(TorchDispatchMode):
    """Convolutions without storage laid out as cuDNN does it."""

    def __torch_dispatch__(self, run: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = run(*args, **(kwargs or {}))
        if run is torch.ops.aten.convolution.default and any(map(lies_last, args[:2])):
            return torch.empty_like(out, memory_format=torch.channels_last)
        return out


def lies_last(x: torch.Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def network(family: str, part: str) -> Any:
    """The UNet or the VAE, as it runs on CUDA where nothing was selected."""
    plan, made = random_model._PLANS[family], classes()
    module = diffusers_module(getattr(made, part), getattr(plan, part), family).eval().requires_grad_(False)
    for weight in module.parameters():
        layout = torch.channels_last if weight.dim() == 4 else torch.contiguous_format
        weight.data = weight.data.to(HALF).contiguous(memory_format=layout)
    how = chosen.default("cuda")
    accelerate(module, how.ops, executor="eager", layout=how.layout, packed_qkv=how.packed_qkv)
    return module


def calls_of(family: str) -> Any:
    """What calls UNet and VAE for latents of a height and width, guidance in one batch."""
    unet, vae = network(family, "unet"), network(family, "vae")
    width = random_model._PLANS[family].unet["cross_attention_dim"]

    def call(height: int, wide: int) -> None:
        latents, context = empty(2, 4, height, wide), empty(2, 77, width)
        times = torch.empty(2, device="meta")
        more = {"text_embeds": empty(2, 1280), "time_ids": empty(2, 6)} if family == "sdxl" else {}
        with within(Frame((latents, times, context, *more.values()))):
            unet(latents, times, encoder_hidden_states=context, added_cond_kwargs=more, return_dict=False)
        with within(Frame((latents,))):
            vae.decode(latents[:1], return_dict=False)

    return call


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=HALF, device="meta")


def gathered(run: Any) -> Gathered:
    made: Any = Gathered()
    token = ahead._gathering.set(made)
    try:
        with state.trusting(), torch.no_grad(), LikeCudnn():
            run()
    finally:
        ahead._gathering.reset(token)
    return made  # type: ignore[no-any-return]


def main(family: str) -> None:
    _on_paper.pass_for_a_device((9, 0), 132)
    _triton.absent = lambda: None  # type: ignore[assignment]
    ready = {
        name: [one.name for one in op.implementations if one.name != "cublaslt"] for name, op in OPS.items()
    }
    _on_paper.prepare(ready, {})
    call, sizes = calls_of(family), [(high // 8, wide // 8) for high, wide in SIZES[family]]
    found = {size: gathered(lambda size=size: call(*size)) for size in sizes}
    for one in sizes:
        noted = list(found[one].calls or ())
        for other in sizes:
            told = gathered(lambda one=one, other=other, noted=noted: _on_paper.launch(noted, one, other))
            new = found[other].variants - found[one].variants
            line = {
                "first": [8 * side for side in one],
                "then": [8 * side for side in other],
                "all": len(found[other].variants),
                "new": sorted(f"{place}.{name}" for place, name, *_ in new),
                "untold": sorted(f"{place}.{name}" for place, name, *_ in new - told.variants),
                "needless": len(told.variants - found[other].variants),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
