"""What routing costs: an op called, against its chosen implementation called directly. One JSON line a shape.

    python bench/routing.py [--output bench/results/cpu/routing.jsonl]

Host time only, the tensors tiny, so that next to nothing is computed; calls alternate in short rounds, and
the figure is the difference of the quickest ones. The limit that the project sets itself is 3 µs a call.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clearway import device
from clearway.ops import contract
from clearway.ops.attention import attention, inputs

ROUNDS, CALLS = 2000, 100  # short rounds: some of them are not disturbed
LIMIT_US = 3.0


def quickest(contenders: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds a call of each, from the quickest of interleaved rounds."""
    best = dict.fromkeys(contenders, float("inf"))
    for call in contenders.values():
        call()
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)
    return best


def measure(name: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """One scenario: route alone, and the whole detour of a call."""
    args = attention._bound(args, {})
    with torch.no_grad():
        chosen = attention.route(*args)
        out = quickest(
            {
                "direct": lambda: chosen.run(*args),
                "routed": lambda: attention(*args),
                "route": lambda: attention.route(*args),
            }
        )
    detour = out["routed"] - out["direct"]
    return {
        "scenario": f"routing, attention, {name}",
        "implementation": chosen.name,
        "direct_us": round(out["direct"], 3),
        "routed_us": round(out["routed"], 3),
        "route_us": round(out["route"], 3),
        "detour_us": round(detour, 3),
        "within_limit": detour <= LIMIT_US,
        "limit_us": LIMIT_US,
        "n": ROUNDS * CALLS,
        "verified": bool(torch.equal(attention(*args), chosen.run(*args))),
    }


def provenance() -> dict[str, Any]:
    """Machine, versions, date and commit of a result."""
    machine = device.machine()
    return {
        "machine": f"{machine['processor']}, {machine['cores']} cores",
        "system": machine["system"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": "cpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
    }


def git(*words: str) -> str | None:
    """What git says in this repository; None without it."""
    done = subprocess.run(
        ["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> None:
    """Measures and appends to the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    given = parser.parse_args()
    tiny = inputs(1, 1, 2, 2, 8)
    results = [measure("default order", tiny)]
    with contract.recording({}):
        results.append(measure("counted", tiny))
    with contract.use(attention="math"):
        results.append(measure("named (math)", tiny))
    lines = [json.dumps({**result, **provenance()}, ensure_ascii=False) for result in results]
    print("\n".join(lines))
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        with given.output.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
