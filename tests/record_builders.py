"""Made-up records for tests of reports: consistent with their own samples unless a test breaks them."""

import math
import random
from typing import Any

from clearway.measure.clock import Samples, compare
from clearway.measure.record import Record

H200 = {
    "machine": "nvidia-h200",
    "device": "NVIDIA H200, 140 GiB, compute 9.0",
    "kind": "cuda",
    "driver": "580.159.04",
    "os": "Linux 6.8",
    "cores": 16,
    "threads": 16,
    "memory_bytes": 150_000_000_000,
    "python": "3.12.3",
    "torch": "2.11.0+cu130",
    "torch_channel": "release",
    "torch_commit": "0123456789abcdef",
    "cuda": "13.0",
    "triton": "3.6.0",
    "diffusers": "0.42.1",
    "transformers": "5.17.0",
    "clearway": "0.1.0",
    "commit": "fedcba9876543210",
    "dirty": False,
    "date": "2026-11-29T12:00:00Z",
    "settings": {"dtype": "float16", "environment": {"OMP_NUM_THREADS": "1"}},
}
MAC = {
    **H200,
    "machine": "apple-m1",
    "device": "Apple M1, 16 GiB",
    "kind": "mps",
    "driver": "macOS 15.6",
    "os": "macOS 15.6",
    "cores": 8,
    "memory_bytes": 17_179_869_184,
    "torch": "2.13.0",
    "cuda": None,
    "triton": None,
}
FLOOR = 0.004


def samples(middle: float, n: int = 12, seed: int = 0, spread: float = 0.004) -> list[float]:
    """n times about `middle` seconds, right-skewed as times are, the same for the same seed."""
    draw = random.Random(seed)
    return [middle * math.exp(abs(draw.gauss(0, spread)) + draw.gauss(0, spread / 4)) for _ in range(n)]


def throughput(times: list[float], images: int = 1, price: float | None = 2.5, **more: Any) -> dict[str, Any]:
    """The ledger of some samples."""
    taken = Samples(tuple(times), None, times[0], 3, True)
    hourly = images * 3600 / taken.p50
    found = {
        "images": images,
        "n": len(times),
        "p20_s": taken.p20,
        "p50_s": taken.p50,
        "p80_s": taken.p80,
        "samples_s": times,
        "device_p50_s": taken.p50 * 0.97,
        "first_s": times[0] * 3,
        "ready_s": 4.2,
        "new_size_s": times[0] * 2,
        "outliers": taken.outliers(),
        "images_per_hour": hourly,
    }
    if price is not None:
        found["cost_per_1000"] = price * 1000 / hourly
    return found | more


def comparison(mine: list[float], others: list[float], against: str, floor: float = FLOOR) -> dict[str, Any]:
    """What a record says of its times against another's."""
    found = compare(*(Samples(tuple(times), None, times[0], 3, True) for times in (others, mine)), floor)
    return {
        "against": against,
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "floor": found.floor,
        "verdict": found.verdict,
        "p_value": found.p_value,
        "n": found.n,
        "test": found.test,
    }


def made(
    scenario: str, contender: str, times: list[float] | None, provenance: dict[str, Any] = H200, **more: Any
) -> Record:
    """One record with a throughput ledger."""
    ledger = throughput(times) if times else None
    return Record(
        scenario=scenario, contender=contender, provenance=provenance, **{"throughput": ledger, **more}
    )


def pair(scenario: str = "sdxl-30", provenance: dict[str, Any] = H200, factor: float = 0.8) -> list[Record]:
    """A baseline and a contender that takes `factor` of its time, compared."""
    others, mine = samples(3.0, seed=1), samples(3.0 * factor, seed=2)
    return [
        made(scenario, "diffusers", others, provenance),
        made(scenario, "clearway", mine, provenance, comparisons=[comparison(mine, others, "diffusers")]),
    ]
