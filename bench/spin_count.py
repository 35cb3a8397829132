"""How long OpenMP threads should spin at barriers: the embedded model alone, and beside another program.

    python bench/spin_count.py [--repeats 3] [--output bench/results/cpu/spin_count.jsonl]

Each run is a process of its own, since the setting is read when torch starts; settings alternate. The
milliseconds are those of text encoding, sampling and VAE together. Linux only. The CLI's default, SPIN_COUNT
in cli/main.py, is one that costs an idle machine little and does not hurt much where a core is taken.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata as metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from clearway import device

ROOT = Path(__file__).parents[1]
SETTINGS: tuple[dict[str, str], ...] = (
    {"OMP_WAIT_POLICY": "ACTIVE"},
    {"GOMP_SPINCOUNT": "20000"},
    {"GOMP_SPINCOUNT": "5000"},
    {"GOMP_SPINCOUNT": "1000"},
    {"OMP_WAIT_POLICY": "PASSIVE"},
)
BUSY = "while True: pass"


def draw(setting: dict[str, str], folder: str) -> float:
    """Milliseconds of one picture, without start-up and loading."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-m", "clearway", "generate", "a red apple", "--seed", "1", "--json"]
    done = subprocess.run(
        [*command, "--output", f"{folder}/"],
        env={**environment, **setting},
        capture_output=True,
        text=True,
        check=True,
    )
    timings = json.loads(done.stdout)["timings_ms"]
    return float(timings["text"] + timings["sampling"] + timings["vae"])


def main() -> int:
    """Measures every setting and writes a JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "bench" / "results" / "cpu" / "spin_count.jsonl"
    )
    args = parser.parse_args()
    found: dict[tuple[int, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for beside in (False, True):
            busy = subprocess.Popen([sys.executable, "-c", BUSY]) if beside else None
            try:
                for _ in range(args.repeats):
                    for index, setting in enumerate(SETTINGS):
                        found.setdefault((index, beside), []).append(draw(setting, folder))
            finally:
                if busy:
                    busy.kill()
                    busy.wait()
    machine = device.machine()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    with args.output.open("w", encoding="utf-8") as file:
        for (index, beside), times in found.items():
            line = {
                "scenario": "embedded model, 256 px, 10 steps, its defaults",
                "setting": SETTINGS[index],
                "beside_a_busy_process": beside,
                "n": len(times),
                "p50_ms": round(statistics.median(times)),
                "min_ms": round(min(times)),
                "max_ms": round(max(times)),
                "machine": f"{machine['processor']}, {machine['cores']} cores",
                "torch": metadata.version("torch"),
                "date": datetime.date.today().isoformat(),
                "commit": commit.stdout.strip(),
            }
            print(line["setting"], "beside another" if beside else "alone", line["p50_ms"], "ms")
            file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
