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

Self-tests run in processes of their own beside the first picture of a machine: what the whole device had in
use, less what other processes had before the case, is `device_peak_bytes` (while loading, of the first
picture, of later ones), and `first_within_cap` and its like say whether that is within the card. Each case
has a state folder of its own, empty at first, in which no verdict is known; `--state kept` takes the
machine's. `--begun` says when self-tests begin: "at load", as clearway.load begins them, or "at generate".
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
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
from clearway.execution.release import release
from clearway.measure.memory import Meter
from clearway.measure.provenance import provenance
from clearway.measure.random_model import SUFFIX, random_model
from clearway.models import Model, _checks, chosen, estimate, placement
from clearway.models.load import _read_where_it_fits
from clearway.ops import state, verdicts
from clearway.types import Event, Precision, StageDone

CASES = ("sd15-random:4", "sdxl-random:8", "sdxl-random:6")
GIB = 2**30
BEGUN = ("at load", "at generate")


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


def loaded(name: str, device: Device, precision: Precision, cap: int, begun: str) -> tuple[Model, str]:
    """(model, "device" or "host", where its weights lie): as `clearway.load` does, on the host where the
    device has no memory for all of it."""
    if begun == "at load":
        _checks.begin_loading(device, precision, cap)
    model = _read_where_it_fits(lambda where: random_model(name, where, precision), device, cap)
    where = next(model.unet.parameters()).device.type
    return model, "device" if where == device.kind else "host"


class _Memory(ctypes.Structure):
    """The driver's nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_before(device: Device) -> int | None:
    """Bytes of a CUDA device that are free, asked without this process taking any of it as torch's question
    would; None where the driver does not tell."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = device.index or 0
    name = names[index].strip() if index < len(names) and names[index] else str(index)
    handle, memory = ctypes.c_void_p(), _Memory()
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
        failed = driver.nvmlInit_v2()
        if name.isdigit():
            failed = failed or driver.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
        else:
            failed = failed or driver.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        failed = failed or driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    except (OSError, AttributeError):
        return None
    return None if failed else int(memory.free)


def in_use_by_others(device: Device) -> int | None:
    """Bytes of a CUDA device that other processes have, before this one has used it; None where that is not
    told."""
    free = free_before(device) if device.kind == "cuda" else None
    return None if free is None else max(torch.cuda.mem_get_info(device.index or 0)[1] - free, 0)


def within(meters: dict[str, Meter], device: Device, others: int | None, cap: int) -> dict[str, Any]:
    """What this process and those it began had of the device at most, by meter, and whether that is within
    the cap. What others had counts as theirs for as long as the case runs; where it is not told, as none."""
    if device.kind != "cuda":
        return {"device_peak_bytes": None, **{f"{name}_within_cap": None for name in meters}}
    peaks = {name: meter.driver_peak_bytes - (others or 0) for name, meter in meters.items()}
    return {
        "device_peak_bytes": peaks,
        **{f"{name}_within_cap": peak <= cap for name, peak in peaks.items()},
    }


def measured(
    name: str, device: Device, precision: Precision, size: float, steps: int, begun: str
) -> dict[str, Any]:
    """One case, in a process that has used the device for nothing else."""
    others = in_use_by_others(device)
    request = clearway.Request(prompt="a red apple", negative_prompt="blurry", steps=steps, seed=1)
    cap = int(size * GIB)
    with limited(device, cap):
        with Meter(device, 0.002) as loading:
            model, loaded_on = loaded(name, device, precision, cap, begun)
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
        "begun": begun,
        "self_tests_s": verdicts.times()["checks_s"],
        "self_tests_waited_s": verdicts.times()["waited_s"],
        "not_used": list(state.losses()),
        "others_bytes": others,
        **within({"loading": loading, "first": first_meter, "later": meter}, device, others, cap),
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


@contextmanager
def state_folder(which: str) -> Iterator[None]:
    """Within it the state folder is the machine's own ("kept"), or a new one, "empty" at first."""
    if which == "kept":
        yield
        return
    before = os.environ.get("CLEARWAY_HOME")
    with tempfile.TemporaryDirectory(prefix="memory-", ignore_cleanup_errors=True) as folder:
        os.environ["CLEARWAY_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["CLEARWAY_HOME"]
            if before is not None:
                os.environ["CLEARWAY_HOME"] = before


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
    parser.add_argument("--begun", default=BEGUN[0], choices=BEGUN, help="when self-tests begin")
    parser.add_argument("--state", default="empty", choices=("empty", "kept"), help="the state folder")
    given = parser.parse_args()
    cases = given.case or list(CASES)
    if len(cases) > 1:
        options = ("output", "device", "steps", "dtype", "vae_dtype", "begun", "state")
        named = {f"--{name.replace('_', '-')}": getattr(given, name) for name in options}
        return each(cases, [f"{name}={value}" for name, value in named.items() if value is not None])
    device: Device = machine.pick(given.device)
    dtype = given.dtype or ("float16" if device.kind == "cuda" else "float32")
    precision = Precision(unet=dtype, text_encoder=dtype, vae=given.vae_dtype or dtype)
    name, _, size = cases[0].partition(":")
    begun = time.perf_counter()
    with state_folder(given.state):
        line = measured(name.removesuffix(SUFFIX), device, precision, float(size), given.steps, given.begun)
    line = {"state": given.state, **line}
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
