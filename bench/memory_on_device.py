"""Does a model draw within a smaller card's memory, what is then where, and what does it cost in time?

    python bench/memory_on_device.py --output bench/results/<machine>/memory.jsonl

Each case, "sdxl-random:8" for SDXL of random weights on a card of 8 GiB, draws one picture of the model's
own size with everything resident, then under a cap: torch's allocator may take the card's size less what a
process takes beside tensors (device.CONTEXT_BYTES), and the plan is made for that. Weights that are larger
than that begin on the host, where loading would have left them. One JSON line a case: the estimates by part,
the plan, what was really held (tensors by stage, torch's allocator, the driver), times, and how far the
picture is from the resident one. Without CUDA nothing is capped or moved, and the rest runs all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clearway
from clearway import device as machine
from clearway.device import CONTEXT_BYTES, Device
from clearway.execution.release import release
from clearway.measure.memory import Meter
from clearway.measure.provenance import provenance
from clearway.measure.random_model import SUFFIX, random_model
from clearway.models import Model, chosen, estimate, placement
from clearway.types import Event, Precision, StageDone

CASES = ("sd15-random:4", "sdxl-random:8", "sdxl-random:6")
GIB = 2**30


def modules(model: Model) -> dict[str, tuple[Any, ...]]:
    """The networks by part."""
    return {"text": tuple(model.text_encoders), "unet": (model.unet,), "vae": (model.vae,)}


def emptied(model: Model) -> None:
    """Everything resident, no graphs, nothing cached."""
    placement.resident(model)
    for part in modules(model).values():
        for module in part:
            release(module)
    gc.collect()
    machine.release_memory(model.device)


def drawn(model: Model, request: clearway.Request, times: int) -> tuple[clearway.Result, list[float]]:
    """The last of some generations, and the seconds of each, the device waited for."""
    seconds = []
    for _ in range(times):
        machine.synchronize(model.device)
        begun = time.perf_counter()
        result = clearway.generate(request, model)
        machine.synchronize(model.device)
        seconds.append(round(time.perf_counter() - begun, 4))
    return result, seconds


def live_by_stage(model: Model, request: clearway.Request) -> dict[str, int]:
    """The most bytes that tensors held in each stage of one generation; empty but on CUDA."""
    if model.device.kind != "cuda":
        return {}
    peaks: dict[str, int] = {}

    def listen(event: Event) -> None:
        if isinstance(event, StageDone):
            torch.cuda.synchronize()
            peaks[event.name] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    clearway.generate(request, model, listen)
    return peaks


def measured(model: Model, size: float, steps: int) -> dict[str, Any]:
    """One case; the model is resident before and after."""
    request = clearway.Request(prompt="a red apple", negative_prompt="blurry", steps=steps, seed=1)
    emptied(model)
    whole, resident_s = drawn(model, request, 3)
    emptied(model)
    cap = int(size * GIB)
    weights = {part: estimate.weight_bytes(held) for part, held in modules(model).items()}
    capped = dataclasses.replace(model, memory_limit_bytes=cap)
    order = request.resolved(model.defaults)
    loaded_on = "device"
    if model.device.kind == "cuda" and sum(weights.values()) > cap - CONTEXT_BYTES:
        loaded_on = "host"
        placement.rest(model)
    if model.device.kind == "cuda":  # apart from the library's own cap: nothing below can take more
        total = torch.cuda.get_device_properties(model.device.index or 0).total_memory
        torch.cuda.set_per_process_memory_fraction(min((cap - CONTEXT_BYTES) / total, 1.0))
    try:
        as_drawn = chosen.applied(capped, order.width, order.height)
        plan = placement.plan(as_drawn, order).record()
        with Meter(model.device, 0.002) as first_meter:
            _, first_s = drawn(capped, request, 1)
        with Meter(model.device, 0.002) as meter:
            result, again_s = drawn(capped, request, 2)
        outside = meter.driver_end_bytes - machine.held(model.device).reserved_bytes
        live = live_by_stage(capped, request)
    finally:
        if model.device.kind == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    emptied(model)
    error = (result.images.astype(np.float64) - whole.images).ravel()
    square = float(np.mean(error**2))
    allocator = max(first_meter.allocator_peak_bytes or 0, meter.allocator_peak_bytes or 0)
    return {
        "case": f"{model.name}, {size:g} GiB",
        "size": f"{order.width}x{order.height}",
        "steps": steps,
        "precision": dataclasses.asdict(model.precision),
        "choices": dataclasses.asdict(result.choices),
        "cap_bytes": cap,
        "weight_bytes": weights,
        "loaded_on": loaded_on,
        "plan": plan,
        "notes": list(result.notes),
        "live_peak_by_stage_bytes": live,
        "memory_first": first_meter.as_record(),
        "memory": meter.as_record(),
        "outside_allocator_bytes": outside,
        "process_peak_bytes": allocator + outside,
        "within_cap": allocator + outside <= cap if model.device.kind == "cuda" else None,
        "resident_s": resident_s,
        "capped_first_s": first_s[0],
        "capped_s": again_s,
        "capped_stages_ms": {name: round(value, 2) for name, value in result.timings_ms.items()},
        "routes": {name: count for name, count in result.routes.items() if name.count("/") == 1},
        "largest_error_of_255": int(np.abs(error).max()),
        "psnr_db": None if square == 0 else round(10 * float(np.log10(255**2 / square)), 2),
    }


def main() -> None:
    """Runs the cases, one line each, written at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", action="append", metavar="MODEL:GIB", help=f"({' '.join(CASES)})")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtype", help="of all parts (float16 on CUDA, else float32)")
    parser.add_argument("--vae-dtype", help="the VAE's, where it is another")
    given = parser.parse_args()
    device: Device = machine.pick(given.device)
    dtype = given.dtype or ("float16" if device.kind == "cuda" else "float32")
    precision = Precision(unet=dtype, text_encoder=dtype, vae=given.vae_dtype or dtype)
    about, model = provenance(device), None
    for case in given.case or CASES:
        name, _, size = case.partition(":")
        begun = time.perf_counter()
        if model is None or model.name != name:
            model = None  # before the next one comes
            gc.collect()
            machine.release_memory(device)
            model = random_model(name.removesuffix(SUFFIX), device, precision)
        line = {**measured(model, float(size), given.steps), **about}
        line["took_s"] = round(time.perf_counter() - begun, 1)
        text = json.dumps(line, ensure_ascii=False)
        print(text, flush=True)
        if given.output is not None:
            given.output.parent.mkdir(parents=True, exist_ok=True)
            with given.output.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
