"""What the host does in one generation whose graphs cost nothing: milliseconds by stage, and what takes them.

    python bench/host_time.py --output bench/results/<machine>/host_time.jsonl --label before

The whole path from prompt to PNG by `clearway.generate` with the choices that CUDA has by default, but with a
stand-in for CUDA's graphs whose replay does nothing. The models have the modules of SD 1.5 and SDXL, name for
name, in narrow widths, and the embedded model is itself; latents and pictures have their real size. One JSON
line a model, after one on the machine, appended to what is there: medians of process and wall time,
`timeline_ms` (from the start to the first replay of each part, between the UNet's, and from the VAE's to the
end), `spans_ms` (own time by stage and by what is listened to, with calls), `operations` (PyTorch's by stage,
of which a GPU launches each; a replay is none), the functions that cProfile finds the longest at work, and a
digest of pixels and infotexts.

What comes before the UNet's first replay and after the VAE's keeps a device waiting; what comes between the
UNet's is hidden while it is shorter than the device's call. Arithmetic on tensors is here the processor's and
would be a device's: functions and operations tell it from the host's own work.
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import json
import pstats
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import clearway
from clearway import device, pipeline
from clearway.execution import cuda_graph, fingerprint, pool
from clearway.image import encode
from clearway.measure import random_model, stages
from clearway.measure.clock import HostTimer
from clearway.measure.provenance import provenance
from clearway.models import Model, chosen
from clearway.request import Request
from clearway.sampling import brownian
from clearway.types import Precision

MODELS = ("sd15", "sdxl", "embedded")
REQUESTS = {
    "sd15": {"width": 512, "height": 512, "sampler": "DPM++ SDE", "schedule": "Karras", "steps": 5},
    "sdxl": {"width": 1024, "height": 1024, "sampler": "DPM++ 2M", "schedule": "Karras", "steps": 24},
    "embedded": {},
}
CFG = {"sd15": 1.15, "sdxl": 7.0}
HALF = Precision(unet="float16", text_encoder="float16", vae="float16", sampling="float32")
TEXT_WIDTH = 64
LISTENED = (
    (pipeline, "check"),
    (pipeline, "place"),
    (pipeline, "plan"),
    (pipeline, "to_uint8"),
    (pipeline, "decode"),
    (pipeline, "_infotext"),
    (chosen, "filled"),
    (chosen, "_planned"),
    (chosen, "tuned"),
    (fingerprint.Fingerprint, "holds"),
    (fingerprint.Fingerprint, "hooked"),
    (pool.Graph, "load"),
    (cuda_graph.CudaGraph, "_key"),
    (brownian.BrownianTree, "__init__"),
    (brownian.BrownianTree, "increment"),
)


class Idle:
    """In place of CUDA's graphs: a capture is one call, a replay only notes the time."""

    replays: ClassVar[list[float]] = []

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def absent(self, where: torch.device) -> str | None:
        return None

    def enter(self, buffers: Callable[[], Iterable[torch.Tensor]]) -> None:
        pass

    def warm_up(self, run: Callable[[], Any], times: int) -> Any:
        return run() or run()  # the first, which builds kernels, gives nothing

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return (lambda: self.replays.append(time.perf_counter())), run()


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations by the stage in which they are; views and bare memory are none."""

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.counts = "outside", Counter[str]()

    def __torch_dispatch__(self, run: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not run.is_view and "empty" not in run.__name__:
            self.counts[self.stage] += 1
        return run(*args, **(kwargs or {}))


def narrow(family: str) -> Model:
    """A model with all modules of the family's, and few channels."""
    plan = random_model._PLANS[family]
    levels = len(plan.unet["block_out_channels"])
    pooled = plan.texts[-1]["projection_dim"]
    unet = {
        **plan.unet,
        "block_out_channels": (32, 64, 64, 64)[:levels],
        "attention_head_dim": 8 if family == "sd15" else (1, 2, 2),
        "cross_attention_dim": TEXT_WIDTH * len(plan.texts),
    }
    if "projection_class_embeddings_input_dim" in unet:
        before = plan.unet["projection_class_embeddings_input_dim"]
        unet["projection_class_embeddings_input_dim"] = before - pooled + TEXT_WIDTH
    texts = tuple(
        {
            **text,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 2 * TEXT_WIDTH,
            "num_attention_heads": 4,
            "projection_dim": TEXT_WIDTH,
        }
        for text in plan.texts
    )
    vae = {**plan.vae, "block_out_channels": (32,) * len(plan.vae["block_out_channels"])}
    with patched(random_model._PLANS, family, replace(plan, unet=unet, vae=vae, texts=texts)):
        return random_model.random_model(family, device.pick("cpu"), HALF)


@contextmanager
def patched(held: dict[Any, Any], key: Any, value: Any) -> Iterator[None]:
    """`held[key]` is `value` within it."""
    before = held.get(key)
    held[key] = value
    try:
        yield
    finally:
        held[key] = before


@contextmanager
def listened(recorder: stages.Recorder) -> Iterator[None]:
    """Within it the recorder hears of stages, executors and what LISTENED names."""
    with ExitStack() as undo:
        undo.enter_context(stages.listening(recorder))
        for owner, name in LISTENED:
            label = f"{owner.__name__.rpartition('.')[2]}.{name}"

            def make(inner: Any, label: str = label) -> Any:
                return stages._named(recorder, inner, label, stages.ARITHMETIC)

            undo.enter_context(stages.patched(owner, name, make))
        yield


def draw(model: Model, request: Request) -> clearway.Result:
    """From the prompt to a PNG's bytes."""
    result = clearway.generate(request, model)
    for image, text in zip(result.images, result.infotexts, strict=True):
        encode(image, "PNG", text)
    return result


def timeline(model: Model, request: Request) -> dict[str, float]:
    """Where in one generation the replays are, ms; text encoders first, the VAE last."""
    Idle.replays.clear()
    begun = time.perf_counter()
    result = clearway.generate(request, model)
    drawn = time.perf_counter()
    for image, text in zip(result.images, result.infotexts, strict=True):
        encode(image, "PNG", text)
    ended = time.perf_counter()
    calls = result.routes["unet/cuda_graph"]
    *texts, last_vae = Idle.replays
    texts, unets = texts[:-calls], texts[-calls:]
    between = [after - before for before, after in pairwise(unets)]
    spans = {
        "start to text": texts[0] - begun,
        "text to UNet": unets[0] - texts[0],
        "between UNet calls, median": statistics.median(between),
        "between UNet calls, longest": max(between),
        "UNet to VAE": last_vae - unets[-1],
        "VAE to pictures": drawn - last_vae,
        "png": ended - drawn,
        "all": ended - begun,
    }
    return {name: 1e3 * seconds for name, seconds in spans.items()}


def spans(model: Model, request: Request) -> dict[str, tuple[float, int]]:
    """Own milliseconds and calls of each stage and of each thing listened to."""
    recorder = stages.Recorder(HostTimer(model.device), events=False)
    with listened(recorder), recorder.span("generation", stages.RUN):
        draw(model, request)
    found: dict[str, list[float]] = defaultdict(list)
    for own in recorder.own():
        found[f"{own.span.kind} {own.span.name}"].append(1e3 * own.host_s)
    return {name: (sum(times), len(times)) for name, times in found.items()}


def operations(model: Model, request: Request) -> dict[str, int]:
    """PyTorch's operations by stage."""
    counting = Operations()

    def stage(inner: Any) -> Any:
        @contextmanager
        def counted(self: Any, name: str) -> Iterator[None]:
            counting.stage = name
            with inner(self, name):
                yield
            counting.stage = "outside"

        return counted

    with stages.patched(clearway.clock.Clock, "stage", stage), counting:
        draw(model, request)
    return dict(counting.counts)


def longest(model: Model, request: Request, rounds: int, count: int = 25) -> list[dict[str, Any]]:
    """The functions with the most time of their own, ms a generation, as cProfile sees them."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(rounds):
        draw(model, request)
    profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = sorted(stats.items(), key=lambda row: -row[1][2])[:count]
    return [
        {
            "function": f"{Path(place).name}:{line} {name}" if line else name,
            "calls": round(calls / rounds, 1),
            "own_ms": round(1e3 * own / rounds, 3),
            "with_called_ms": round(1e3 * total / rounds, 3),
        }
        for (place, line, name), (_, calls, own, total, _) in rows
    ]


def measured(name: str, rounds: int) -> dict[str, Any]:
    """One model's line."""
    model = clearway.load("embedded", device="cpu") if name == "embedded" else narrow(name)
    request = Request(prompt="a lighthouse by the sea, (storm:1.2)", seed=1, **REQUESTS[name])
    request = replace(request, cfg_scale=CFG[name]) if name in CFG else request
    for _ in range(3):
        result = draw(model, request)
    assert result.routes["unet/cuda_graph"] and not result.notes[1:], (result.routes, result.notes)
    lines, walls, processes = [], [], []
    for _ in range(rounds):
        begun, own = time.perf_counter(), time.process_time()
        draw(model, request)
        walls.append(1e3 * (time.perf_counter() - begun))
        processes.append(1e3 * (time.process_time() - own))
        lines.append(timeline(model, request))
    heard = [spans(model, request) for _ in range(rounds)]
    middle = {key: statistics.median(one[key][0] for one in heard) for key in heard[0]}
    order = sorted(middle, key=lambda key: -middle[key])
    return {
        "modules": [len(list(part.modules())) for part in (*model.text_encoders, model.unet, model.vae)],
        "wall_ms": round(statistics.median(walls), 2),
        "process_ms": round(statistics.median(processes), 2),
        "timeline_ms": {key: round(statistics.median(one[key] for one in lines), 3) for key in lines[0]},
        "spans_ms": {key: [round(middle[key], 3), heard[0][key][1]] for key in order},
        "operations": operations(model, request),
        "functions": longest(model, request, rounds),
        "pictures": hashlib.sha256(result.images.tobytes() + repr(result.infotexts).encode()).hexdigest()[
            :16
        ],
    }


def main() -> None:
    """Measures and appends a line a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--label", default="")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.modules["clearway.execution.executor"].TorchCapture = Idle  # type: ignore[attr-defined]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with (
        patched(chosen.DEFAULTS, "cpu", chosen.DEFAULTS["cuda"]),
        given.output.open("a", encoding="utf-8") as file,
    ):
        about = provenance(device.pick("cpu"))
        print(json.dumps({"label": given.label, "about": about}), file=file, flush=True)
        for name in given.models:
            line = {"label": given.label, "model": name, **measured(name, given.rounds)}
            print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
