"""Does a model draw within a smaller card's memory, what is then where, and what does it cost in time?

    python bench/memory_on_device.py --output bench/results/<machine>/memory.jsonl

Each case, "sdxl-random:8" for SDXL of random weights on a card of 8 GiB, is a process of its own, capped from
its start: torch's allocator may take the card's size less what a process takes beside tensors
(device.CONTEXT_BYTES), the model is loaded under that, on the host where it does not fit, and the placement
is planned for it. Pictures of the model's own size are drawn so, and the process's peak is taken then; only
after that the cap is lifted and the same picture drawn with everything resident, to compare. One JSON line a
case: the estimates by part, the plan, what was really held (tensors by stage, torch's allocator, the driver),
times, and how far the picture is from the resident one. Without CUDA nothing is capped or moved, and the rest
runs all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clearway
from clearway import device as machine
from clearway.device import CONTEXT_BYTES, Device
from clearway.errors import UnavailableError
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


@contextmanager
def limited(device: Device, cap: int) -> Iterator[None]:
    """Within it torch's allocator takes no more of a CUDA device than a card of `cap` bytes leaves it: apart
    from the library's own cap, which is under measurement."""
    if device.kind != "cuda":
        yield
        return
    index = device.index or 0
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min((cap - CONTEXT_BYTES) / total, 1.0), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)


def loaded(name: str, device: Device, precision: Precision, cap: int) -> tuple[Model, str]:
    """(model, "device" or "host", where its weights lie): as `clearway.load` does, on the host where the
    device has no memory for all of it."""
    try:
        with machine.capped(device, cap):
            return random_model(name, device, precision), "device"
    except UnavailableError:
        if device.kind != "cuda":
            raise
    gc.collect()
    machine.release_memory(device)
    model = random_model(name, Device("cpu"), precision)
    return dataclasses.replace(model, device=device), "host"


def measured(name: str, device: Device, precision: Precision, size: float, steps: int) -> dict[str, Any]:
    """One case, in a process that has used the device for nothing else."""
    request = clearway.Request(prompt="a red apple", negative_prompt="blurry", steps=steps, seed=1)
    cap = int(size * GIB)
    with limited(device, cap):
        with Meter(device, 0.002) as loading:
            model, loaded_on = loaded(name, device, precision, cap)
        weights = {part: estimate.weight_bytes(held) for part, held in modules(model).items()}
        capped = dataclasses.replace(model, memory_limit_bytes=cap)
        order = request.resolved(model.defaults)
        with Meter(device, 0.002) as first_meter:
            as_drawn = chosen.applied(capped, order.width, order.height)
            plan = placement.plan(as_drawn, order).record()
            _, first_s = drawn(capped, request, 1)
        with Meter(device, 0.002) as meter:
            result, again_s = drawn(capped, request, 2)
        outside = meter.driver_end_bytes - machine.held(device).reserved_bytes
        live = live_by_stage(capped, request)
    allocator = max(one.allocator_peak_bytes or 0 for one in (loading, first_meter, meter))
    emptied(model)
    whole, resident_s = drawn(model, request, 3)
    error = (result.images.astype(np.float64) - whole.images).ravel()
    square = float(np.mean(error**2))
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
        "memory_loading": loading.as_record(),
        "memory_first": first_meter.as_record(),
        "memory": meter.as_record(),
        "outside_allocator_bytes": outside,
        "process_peak_bytes": allocator + outside,
        "within_cap": allocator + outside <= cap if device.kind == "cuda" else None,
        "resident_s": resident_s,
        "capped_first_s": first_s[0],
        "capped_s": again_s,
        "capped_stages_ms": {name: round(value, 2) for name, value in result.timings_ms.items()},
        "routes": {name: count for name, count in result.routes.items() if name.count("/") == 1},
        "largest_error_of_255": int(np.abs(error).max()),
        "psnr_db": None if square == 0 else round(10 * float(np.log10(255**2 / square)), 2),
    }


def each(cases: list[str], arguments: list[str]) -> int:
    """Each case in a process of its own, with these arguments besides; 1 where one of them failed."""
    commands = [[sys.executable, __file__, *arguments, "--case", case] for case in cases]
    return int(any([subprocess.run(command, check=False).returncode for command in commands]))


def main() -> int:
    """Runs the cases, one line each, written at once."""
    os.environ.setdefault("CLEARWAY_OTHER_SIZES", "0")  # nobody else is to be at work
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", action="append", metavar="MODEL:GIB", help=f"({' '.join(CASES)})")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtype", help="of all parts (float16 on CUDA, else float32)")
    parser.add_argument("--vae-dtype", help="the VAE's, where it is another")
    given = parser.parse_args()
    cases = given.case or list(CASES)
    if len(cases) > 1:
        options = ("output", "device", "steps", "dtype", "vae_dtype")
        named = {f"--{name.replace('_', '-')}": getattr(given, name) for name in options}
        return each(cases, [f"{name}={value}" for name, value in named.items() if value is not None])
    device: Device = machine.pick(given.device)
    dtype = given.dtype or ("float16" if device.kind == "cuda" else "float32")
    precision = Precision(unet=dtype, text_encoder=dtype, vae=given.vae_dtype or dtype)
    name, _, size = cases[0].partition(":")
    begun = time.perf_counter()
    line = measured(name.removesuffix(SUFFIX), device, precision, float(size), given.steps)
    line = {**line, **provenance(device), "took_s": round(time.perf_counter() - begun, 1)}
    text = json.dumps(line, ensure_ascii=False)
    print(text, flush=True)
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        with given.output.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
