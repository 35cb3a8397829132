"""Attention in C++ on a CPU against PyTorch's own: milliseconds of a call, in turns, at the models' shapes.

    python bench/attention_on_cpu.py --output bench/results/<machine>/attention_cpu.jsonl

float32, random data, PyTorch's threads as they are. One JSON line a shape, after one on the machine; errors
are the largest, against float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway import device
from clearway.measure.provenance import provenance
from clearway.ops import _cpp, attention_native

SHAPES = (
    (2, 4, 1024, 1024, 16), (2, 4, 1024, 77, 16), (2, 4, 256, 256, 16), (2, 4, 64, 64, 24),
    (2, 8, 1024, 1024, 40), (2, 8, 1024, 77, 40), (2, 8, 256, 256, 80), (2, 8, 64, 64, 160),
)  # fmt: skip
"""Batch, heads, queries, keys, size of a head."""
ROUNDS, ROUND_S = 15, 0.03


def main() -> None:
    """Times both at every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    if reason := _cpp.absent():
        parser.error(reason)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with given.output.open("w", encoding="utf-8") as file, torch.inference_mode():
        print(json.dumps({"about": provenance(device.pick("cpu"))}), file=file)
        for batch, heads, queries, keys, size in SHAPES:
            q, k, v = (torch.randn(batch, heads, count, size) for count in (queries, keys, keys))
            ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
                "sdpa": F.scaled_dot_product_attention,
                "native": lambda q, k, v: attention_native.run(q, k, v, None, False, None),
            }
            exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
            errors = {name: (run(q, k, v) - exact).abs().max().item() for name, run in ways.items()}
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, run in ways.items():
                    times[name].append(timed(run, q, k, v))
            line = {
                "case": f"{batch}x{heads}x{queries}x{keys}x{size}",
                **{f"{name}_ms": round(statistics.median(one), 4) for name, one in times.items()},
                **{f"{name}_error": float(f"{one:.2g}") for name, one in errors.items()},
            }
            print(json.dumps(line), file=file, flush=True)
            print(line)


def timed(run: Callable[[Tensor, Tensor, Tensor], Tensor], *args: Tensor) -> float:
    """Milliseconds of a call, over some ROUND_S of them."""
    run(*args)
    calls, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < ROUND_S:
        run(*args)
        calls += 1
    return 1000 * passed / calls


if __name__ == "__main__":
    main()
