"""How long a first picture takes where nothing is cached, and the first of another size. One JSON line a run.

    python bench/first_picture.py [--models sdxl sd15] [--output bench/results/<machine>/first_picture.jsonl]

Each run is a process of its own with folders of its own for verdicts and for every cache of compiled kernels
(Clearway's, Triton's, Inductor's, the driver's), empty at first. Weights are random, at real sizes; reading
them is timed apart and not counted. Then seconds of wall time, from the request to the PNG's bytes: the first
picture, a warm one, the first of another size, a warm one of that; between sizes `--pause-s` leaves time in
which kernels of others are built. `begun` says when self-tests began: "at load", as clearway.load begins them
while it reads weights; "at generate", with nothing beforehand; "by accelerate", where the pictures are those
of a Diffusers pipeline and the first one's seconds begin with `clearway.accelerate(pipeline)` (`accelerate_s`
of them). With `caches` "full" the run is another process on the same folders.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
SIZES = {
    "sdxl": ((1024, 1024), (1216, 832), (832, 1216)),
    "sd15": ((512, 512), (640, 384), (384, 640)),
    "tiny-sdxl": ((64, 64), (96, 64), (64, 96)),
    "tiny-sd15": ((64, 64), (96, 64), (64, 96)),
}
BEGUN = ("at load", "at generate", "by accelerate")
CACHES = {
    "CLEARWAY_HOME": "clearway",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "driver",
}
LIMIT_S = 500.0


def child(
    name: str,
    device_name: str | None,
    vae: str | None,
    steps: int,
    warm: int,
    begun: str,
    pause_s: float,
) -> None:
    """One run in this process; prints its line."""
    import torch

    import clearway
    from clearway import device as machine
    from clearway.execution.cuda_graph import CudaGraph
    from clearway.measure.provenance import provenance
    from clearway.measure.random_model import random_model
    from clearway.models import _checks
    from clearway.ops import ahead, state, verdicts

    imported_s = time.perf_counter() - STARTED
    device = machine.pick(device_name)
    precision = machine.default_precision(device)
    precision = replace(precision, vae=vae or precision.unet)
    captured: list[float] = []
    capture = CudaGraph._capture

    def timed(self: Any, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return capture(self, *args)
        finally:
            captured.append(time.perf_counter() - start)

    CudaGraph._capture = timed  # type: ignore[method-assign]

    def spent() -> dict[str, float]:
        """What first pictures wait for, so far in this process."""
        return {
            "self_tests_waited_s": verdicts.times()["waited_s"],
            "kernels_s": ahead.times()["seconds"],
            "kernels": ahead.times()["variants"],
            "captures_s": sum(captured),
            "captures": len(captured),
        }

    start = time.perf_counter()
    if begun == "at load":
        _checks.begin_loading(device, precision)
    model = random_model(name, device, precision)
    pipe = pipeline(model, steps) if begun == "by accelerate" else None
    machine.synchronize(device)
    loaded_s = time.perf_counter() - start
    pictures, accelerate_s = {}, 0.0
    before = spent()
    if pipe is not None:
        start = time.perf_counter()
        clearway.accelerate(pipe)
        accelerate_s = time.perf_counter() - start
    for number, (width, height) in enumerate(SIZES[name]):
        time.sleep(pause_s if number else 0.0)
        first = picture(model, pipe, width, height, steps)
        after = spent()
        again = [picture(model, pipe, width, height, steps)["seconds"] for _ in range(warm)]
        seconds = first["seconds"] + (0.0 if number else accelerate_s)
        line = {"width": width, "height": height, "first_s": round(seconds, 3)}
        line |= {key: round(after[key] - before[key], 3) for key in after}
        line["warm_s"] = round(statistics.median(again), 3) if again else None
        line["over_warm_s"] = round(seconds - line["warm_s"], 3) if again else None
        line |= {key: first[key] for key in ("stages_ms", "routes", "notes")}
        pictures[("first", "another size", "a third size")[number]] = line
        before = spent()
    content = {
        "bench": "first picture",
        "model": name,
        "steps": steps,
        "begun": begun,
        "pause_s": pause_s,
        "imported_s": round(imported_s, 3),
        "loaded_s": round(loaded_s, 3),
        "accelerate_s": round(accelerate_s, 3),
        "pictures": pictures,
        "self_tests_s": verdicts.times()["checks_s"],
        "not_used": list(state.losses()),
        "provenance": provenance(device, precision=asdict(precision)),
    }
    if torch.cuda.is_available():
        content["peak_bytes"] = torch.cuda.max_memory_reserved()
    print(json.dumps(content, ensure_ascii=False), flush=True)


def pipeline(model: Any, steps: int) -> Any:
    """Diffusers' own pipeline over a model's weights, Euler's scheduler in it."""
    from clearway.measure import scenario
    from clearway.measure.compiled import Compiled
    from clearway.measure.diffusers_arms import Pipeline

    return Pipeline(replace(scenario.find("sdxl-30"), steps=steps), model, Compiled()).pipe()


def picture(model: Any, pipe: Any, width: int, height: int, steps: int) -> dict[str, Any]:
    """One picture of the model, or of a pipeline over its weights: from words to a PNG, on the clock."""
    import torch

    from clearway import Request, generate
    from clearway import device as machine
    from clearway.image import encode

    asked: dict[str, Any] = {"prompt": "a red apple on a wooden table", "negative_prompt": "blurry"}
    asked |= {"width": width, "height": height}
    machine.synchronize(model.device)
    start = time.perf_counter()
    if pipe is not None:
        drawn = pipe(**asked, num_inference_steps=steps, guidance_scale=7.0, generator=torch.manual_seed(1))
        drawn.images[0].save(io.BytesIO(), "PNG")
        told: dict[str, Any] = {"stages_ms": {}, "routes": {}, "notes": []}
    else:
        request = Request(**asked, steps=steps, sampler="Euler", cfg_scale=7.0, seed=1)
        result = generate(request, model)
        encode(result.images[0], "PNG", result.infotexts[0])
        told = {"stages_ms": {stage: round(ms, 1) for stage, ms in result.timings_ms.items()}}
        told |= {"routes": dict(result.routes), "notes": list(result.notes)}
    return {"seconds": round(time.perf_counter() - start, 3), **told}


def run(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """The line of a child on caches in `folder`; what it said last where it came to no good end."""
    caches = {name: str(folder / part) for name, part in CACHES.items()}
    command = [sys.executable, __file__, "--child", *arguments]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **caches},
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"it took longer than {LIMIT_S:g} s", "arguments": arguments}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": f"exit code {done.returncode}", "arguments": arguments}
    content: dict[str, Any] = json.loads(lines[-1])
    return content


def main() -> int:
    """Runs all arms, each with empty caches and then with those it filled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["sdxl", "sd15"], choices=list(SIZES))
    parser.add_argument("--device", help="the device (default: the best one here)")
    parser.add_argument("--vae", help="the VAE's dtype (default: as the UNet's)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm", type=int, default=3, help="warm pictures a size (default 3)")
    parser.add_argument(
        "--pause-s",
        type=float,
        default=0.0,
        help="wait so long before another size, whose kernels are built meanwhile (default 0)",
    )
    parser.add_argument("--begun", nargs="+", default=list(BEGUN), choices=BEGUN)
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(
            given.models[0], given.device, given.vae, given.steps, given.warm, given.begun[0], given.pause_s
        )
        return 0
    failed = 0

    def write(content: dict[str, Any]) -> None:
        text = json.dumps(content, ensure_ascii=False)
        print(text, flush=True)
        if given.output is not None:
            given.output.parent.mkdir(parents=True, exist_ok=True)
            with given.output.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    for name in given.models:
        for begun in given.begun:
            arguments = ["--models", name, "--begun", begun]
            arguments += ["--steps", str(given.steps), "--warm", str(given.warm)]
            arguments += ["--pause-s", str(given.pause_s)]
            arguments += [word for key in ("device", "vae") for word in _named(key, getattr(given, key))]
            with tempfile.TemporaryDirectory(prefix="first-picture-") as folder:
                for caches in ("empty", "full"):
                    content = {**run(Path(folder), arguments), "caches": caches}
                    failed += "failed" in content
                    write(content)
                    say(content)
    return 1 if failed else 0


def say(content: dict[str, Any]) -> None:
    """One line a picture, for people."""
    if "failed" in content:
        print(f"failed: {content['failed']}", file=sys.stderr)
        return
    head = f"{content['model']}, caches {content['caches']}, self-tests begun {content['begun']}"
    print(f"{head}: weights in {content['loaded_s']} s", file=sys.stderr)
    for which, one in content["pictures"].items():
        print(
            f"  {which} {one['width']}x{one['height']}: {one['first_s']} s, warm {one['warm_s']} s; waited "
            f"{one['self_tests_waited_s']} s for tests, {one['kernels']} kernels took {one['kernels_s']} s; "
            f"{one['captures']} captures in {one['captures_s']} s with both",
            file=sys.stderr,
        )


def _named(key: str, value: str | None) -> list[str]:
    return [] if value is None else [f"--{key}", value]


if __name__ == "__main__":
    sys.exit(main())
