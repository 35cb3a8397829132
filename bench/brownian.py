"""Clearway's Brownian tree against torchsde's: milliseconds of the host's time, the same bits.

    python bench/brownian.py --output bench/results/<machine>/brownian.jsonl

Queries: those of DPM++ SDE in 5 Karras steps from sigma 14.6 to 0.029, a path an image. Process time of one
thread; the trees take turns, and are made anew in every round; medians. One JSON line a case and tree, after
one on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchsde

from clearway import device, sampling
from clearway.measure.provenance import provenance
from clearway.sampling.brownian import BrownianTree

ROUNDS = 40
STEPS = 5
CASES = ((1, (4, 64, 64)), (4, (4, 64, 64)), (1, (4, 128, 128)))
Increment = Callable[[float, float], torch.Tensor]


def queries() -> tuple[float, float, list[tuple[float, float]]]:
    """The path's ends, and (first, last) of each query."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    kept = (1 - betas).cumprod(0)
    sigmas = sampling.schedule("Karras", STEPS, ((1 - kept) / kept).sqrt().float())
    asked: list[tuple[float, float]] = []

    def noise(sigma: float, sigma_next: float) -> torch.Tensor:
        asked.append((round(sigma_next, 6), round(sigma, 6)))
        return torch.zeros(1)

    sampling.sample("DPM++ SDE", lambda x, sigma: x, torch.zeros(1), sigmas, noise=noise)
    low, high = round(float(sigmas[-2]), 6), round(float(sigmas[0]), 6)
    return low, high, [(max(first, low), min(last, high)) for first, last in asked]


def by_clearway(low: float, high: float, seeds: list[int], shape: tuple[int, ...]) -> Increment:
    """One tree for all images."""
    return BrownianTree(low, high, seeds, shape).increment


def by_torchsde(low: float, high: float, seeds: list[int], shape: tuple[int, ...]) -> Increment:
    """A tree an image, as k-diffusion has them."""
    trees = [torchsde.BrownianTree(low, torch.zeros(shape), high, entropy=seed) for seed in seeds]
    return lambda first, last: torch.stack([tree(first, last) for tree in trees])


def main() -> None:
    """Times both on every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    low, high, asked = queries()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with given.output.open("w", encoding="utf-8") as file:
        print(json.dumps({"about": provenance(device.pick("cpu"))}), file=file)
        for images, shape in CASES:
            seeds = [1000 + image for image in range(images)]
            makers = {"clearway": by_clearway, "torchsde": by_torchsde}
            made: dict[str, list[float]] = {name: [] for name in makers}
            each: dict[str, list[float]] = {name: [] for name in makers}
            all_of_them: dict[str, list[float]] = {name: [] for name in makers}
            same = True
            for _ in range(ROUNDS):
                results = {}
                for name, make in makers.items():
                    begun = time.process_time_ns()
                    tree = make(low, high, seeds, shape)
                    made[name].append((time.process_time_ns() - begun) / 1e6)
                    times, found = [], []
                    for first, last in asked:
                        begun = time.process_time_ns()
                        one = tree(first, last)
                        times.append((time.process_time_ns() - begun) / 1e6)
                        found.append(one.clone())
                    each[name] += times
                    all_of_them[name].append(sum(times) + made[name][-1])
                    results[name] = torch.stack(found)
                same = same and torch.equal(results["clearway"], results["torchsde"])
            for name in makers:
                line = {
                    "images": images,
                    "shape": shape,
                    "queries": len(asked),
                    "tree": name,
                    "p50_query_ms": round(statistics.median(each[name]), 3),
                    "p50_made_ms": round(statistics.median(made[name]), 3),
                    "p50_generation_ms": round(statistics.median(all_of_them[name]), 2),
                    "same_bits": same,
                }
                print(json.dumps(line), file=file)


if __name__ == "__main__":
    main()
