"""Clearway's PNG writer against Pillow's: milliseconds, bytes, the same pixels.

    python bench/png.py --output bench/results/<machine>/png.jsonl

Pictures: one by the embedded model, noise (what random weights draw), and a smooth one with grain as in
photographs. Writers take turns; medians. One JSON line a picture and writer, after one on the machine.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

import clearway
from clearway import device
from clearway.image import png
from clearway.measure.provenance import provenance

ROUNDS = 15


def pictures() -> dict[str, np.ndarray]:
    """Name and uint8 (H, W, 3)."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:1024, 0:1024]
    smooth = 128 + 60 * (np.sin(x / 50) + np.cos(y / 70))[..., None]
    return {
        "embedded model, 256 px": clearway.generate(clearway.Request(prompt="a red apple", seed=1)).images[0],
        "noise, 512 px": rng.integers(0, 256, (512, 512, 3), dtype=np.uint8),
        "grain, 1024 px": np.clip(smooth + 6 * rng.standard_normal((1024, 1024, 3)), 0, 255).astype(np.uint8),
    }


def by_pillow(image: np.ndarray) -> bytes:
    """Pillow's writer as it is by default."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def main() -> None:
    """Times both on every picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    writers: dict[str, Callable[[np.ndarray], bytes]] = {"clearway": png.write, "pillow": by_pillow}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with given.output.open("w", encoding="utf-8") as file:
        print(json.dumps({"about": provenance(device.pick("cpu"))}), file=file)
        for name, image in pictures().items():
            times: dict[str, list[float]] = {writer: [] for writer in writers}
            for _ in range(ROUNDS):
                for writer, write in writers.items():
                    begun = time.perf_counter()
                    write(image)
                    times[writer].append((time.perf_counter() - begun) * 1e3)
            for writer, write in writers.items():
                data = write(image)
                same = bool(np.array_equal(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), image))
                line = {
                    "picture": name,
                    "writer": writer,
                    "p50_ms": round(statistics.median(times[writer]), 2),
                }
                print(json.dumps({**line, "bytes": len(data), "same_pixels": same}), file=file)


if __name__ == "__main__":
    main()
