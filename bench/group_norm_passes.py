"""Where the Triton GroupNorm+SiLU should change from one program a group to two passes: both, size by size.

    python bench/group_norm_passes.py --output bench/results/<machine>/group_norm_passes.jsonl

The shapes are those of SD 1.x and SDXL networks and of the VAE's decoder at 1024 pixels. Graph replays
between events, the contenders in turns, inputs swept from the cache (ops_on_device.measure). One JSON line a
shape.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import torch
from ops_on_device import Call, measure, provenance

from clearway.ops import group_norm_silu_triton as triton_source

SHAPES = (
    *((2, channels, 8, 8) for channels in (1280, 2560)),
    *((2, channels, 16, 16) for channels in (640, 1280, 1920, 2560)),
    *((2, channels, 32, 32) for channels in (320, 640, 960, 1280, 1920, 2560)),
    *((2, channels, 64, 64) for channels in (320, 640, 960, 1280, 1920)),
    *((2, channels, 128, 128) for channels in (320, 640, 960)),
    *((8, channels, size, size) for channels, size in ((640, 64), (1280, 32), (320, 64))),
    (1, 512, 128, 128),
    (1, 256, 512, 512),
    (1, 128, 1024, 1024),
)


def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, one_pass: bool) -> Call:
    """The kernel in one pass or in two."""

    def run() -> torch.Tensor:
        triton_source._one_pass = lambda *_: one_pass
        return triton_source.run(x, weight, bias, 32, 1e-5, None, True)

    return run


def main() -> None:
    """Times both on every shape in both layouts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=31)
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with given.output.open("w", encoding="utf-8") as file:
        run = SimpleNamespace(kind="cuda", rounds=given.rounds, write=lambda **line: print(line))
        print(json.dumps(dict(provenance("cuda"))), file=file, flush=True)
        for shape in SHAPES:
            for layout in (torch.channels_last, torch.contiguous_format):
                x = torch.randn(shape, device="cuda", dtype=torch.float16).to(memory_format=layout)
                weight, bias = torch.randn(2, shape[1], device="cuda", dtype=torch.float16)
                times = measure(
                    run,  # type: ignore[arg-type]
                    {"one program": call(x, weight, bias, True), "two passes": call(x, weight, bias, False)},
                )
                line = {
                    "shape": shape,
                    "layout": str(layout).removeprefix("torch."),
                    "group_elements": math.prod(shape[1:]) // 32,
                    **{f"{name} ms": round(statistics.median(taken), 5) for name, taken in times.items()},
                }
                print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
