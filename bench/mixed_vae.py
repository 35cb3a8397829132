"""One VAE decode in float32, in float16 and mixed: milliseconds, and how far it is from float32.

    python bench/mixed_vae.py --device cuda --family sdxl --side 1024

Weights are random. Once as they are, so that all parts become half, and once (`factor`) with a residual block
whose sums overflow float16, as some of SDXL's original VAE do: float16 then ends in float32. By the choices
that the device has by default, on CUDA captured graphs, without TF32. One JSON line each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from typing import Any

import torch

from clearway import device as machine
from clearway.execution import executor
from clearway.measure.random_model import random_model
from clearway.models import chosen, vae
from clearway.models.accelerate import apply
from clearway.types import Precision

BLOCK, FACTOR = 2, 1e5


def timed(args: argparse.Namespace, name: str, factor: float) -> tuple[dict[str, Any], torch.Tensor]:
    """One line, and the pixels."""
    device = machine.pick(args.device)
    whole = "float32" if name == "float16" else name
    model = random_model(args.family, device, Precision("float16", "float16", whole))
    block = model.vae.decoder.up_blocks[BLOCK]
    with torch.no_grad():
        block.resnets[-1].conv2.weight.mul_(factor)
        block.upsamplers[0].conv.weight.div_(factor)
    if name == "float16":
        model.vae.half()
    model = apply(model, chosen.default(device.kind))
    side = args.side // model.latent_factor
    drawn = torch.randn(1, model.latent_channels, side, side, generator=torch.Generator().manual_seed(0))
    latents = drawn.to(str(device)) * model.latent_scale
    call = executor(model.choices.executor, model.vae.decode, "vae", fixed=model.choices.routes)
    begun = time.perf_counter()
    first = vae.decode(model, latents, call)
    first_s = time.perf_counter() - begun
    vae.decode(model, latents, call)
    times = []
    for _ in range(args.calls):
        machine.synchronize(device)
        begun = time.perf_counter()
        made = vae.decode(model, latents, call)
        machine.synchronize(device)
        times.append(1000 * (time.perf_counter() - begun))
    line = {
        "device": machine.describe(device),
        "family": args.family,
        "side": args.side,
        "factor": factor,
        "asked": name,
        "ran": made.dtypes[0],
        "ms": round(statistics.median(times), 3),
        "first_s": round(first_s, 3),
        "notes": first.notes,
    }
    return line, made.pixels


def main() -> None:
    """Prints a line for each precision, with and without parts that overflow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--family", default="sdxl")
    parser.add_argument("--side", type=int, default=1024, help="in pixels")
    parser.add_argument("--calls", type=int, default=20)
    args = parser.parse_args()
    for factor in (1.0, FACTOR):
        exact = None
        for name in ("float32", "float16", "mixed"):
            with machine.tf32(machine.pick(args.device), False):
                line, pixels = timed(args, name, factor)
            exact = pixels if exact is None else exact
            off = (pixels.clamp(-1, 1) - exact.clamp(-1, 1)).double().cpu()
            square = float(off.square().mean())
            line["psnr_db"] = round(10 * math.log10(4 / square), 2) if square else None
            line["largest_error_of_255"] = round(float(off.abs().max()) * 127.5, 3)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
