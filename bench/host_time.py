"""What the host does in one generation beside its graphs: milliseconds by stage, and what takes them.

    python bench/host_time.py --output bench/results/<machine>/host_time.jsonl --label before

The whole path from prompt to PNG by `clearway.generate` with the choices that CUDA has by default. On the
CPU a stand-in for CUDA's graphs replays nothing at all; the models have the modules of SD 1.5 and SDXL, name
for name, in narrow widths, and the embedded model is itself; latents and pictures have their real size. On
CUDA graphs and widths are the real ones. One JSON line a model, after one on the machine, appended to what is
there; of all times the 20th and 50th percentile, since others may be at work on the machine:

    host_ms     from the start until the first replay of each part is issued, between the UNet's, and from the
                VAE's to the end; `replay` is the UNet's own launch
    device_ms   on CUDA, by events: the parts' replays, and what lies between the end of one and the next one
    spans_ms    own time by stage and by what is listened to, with calls
    operations  PyTorch's by stage, of which a GPU launches each; a replay is none
    functions   the longest at work, as cProfile finds them
    pictures    a digest of pixels and infotexts

What comes before the UNet's first replay and after the VAE's keeps a device waiting; what comes between the
UNet's is hidden while it is shorter than the device's call. Arithmetic on tensors is on the CPU the
processor's and would be a device's: functions and operations tell it from the host's own work.
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import json
import os
import pstats
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import clearway
from clearway import device, pipeline
from clearway.execution import cuda_graph, fingerprint, pool
from clearway.execution.capture import TorchCapture
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


@dataclass(slots=True)
class Replay:
    """When one was issued (host seconds), and the device's events around it."""

    begun: float
    ended: float
    first: Any
    last: Any


REPLAYS: list[Replay] = []


def event() -> Any:
    """This point of the device's work; None where there is no CUDA device."""
    if not torch.cuda.is_available():
        return None
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


class Noting:
    """Notes each replay of what the next class captures."""

    def capture(self, *args: Any, **kwargs: Any) -> Any:
        replay, *rest = super().capture(*args, **kwargs)  # type: ignore[misc]

        def noted() -> None:
            first, begun = event(), time.perf_counter()
            replay()
            REPLAYS.append(Replay(begun, time.perf_counter(), first, event()))

        return noted, *rest


class Idle:
    """In place of CUDA's graphs: a capture is one call, a replay does nothing."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def absent(self, where: torch.device) -> str | None:
        return None

    def enter(self, buffers: Callable[[], Iterable[torch.Tensor]]) -> None:
        pass

    def warm_up(self, run: Callable[[], Any], times: int) -> Any:
        return run() or run()  # the first, which builds kernels, gives nothing

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return (lambda: None), run()


class NotingIdle(Noting, Idle):
    """The CPU's."""


class NotingTorch(Noting, TorchCapture):
    """CUDA's."""


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations by the stage in which they are; views and bare memory are none."""

    watches = True  # changes nothing: networks run as they would without it

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


def timeline(model: Model, request: Request) -> tuple[dict[str, float], dict[str, float]]:
    """(host, device) milliseconds of one generation; text encoders come first and the VAE last."""
    device.synchronize(model.device)
    REPLAYS.clear()
    start, begun = event(), time.perf_counter()
    result = clearway.generate(request, model)
    end, drawn = event(), time.perf_counter()
    for image, text in zip(result.images, result.infotexts, strict=True):
        encode(image, "PNG", text)
    ended = time.perf_counter()
    device.synchronize(model.device)
    calls = result.routes["unet/cuda_graph"]
    *texts, vae = REPLAYS
    texts, unets = texts[:-calls], texts[-calls:]
    between = [after.begun - before.begun for before, after in pairwise(unets)]
    host = {
        "start to text": texts[0].begun - begun,
        "text to UNet": unets[0].begun - texts[0].begun,
        "between UNet calls, median": statistics.median(between),
        "between UNet calls, longest": max(between),
        "replay": statistics.median(one.ended - one.begun for one in unets),
        "UNet to VAE": vae.begun - unets[-1].begun,
        "VAE to pictures": drawn - vae.begun,
        "png": ended - drawn,
        "all": ended - begun,
    }
    found: dict[str, float] = {}
    if start is not None:
        gaps = [before.last.elapsed_time(after.first) for before, after in pairwise(unets)]
        found = {
            "start to text": start.elapsed_time(texts[0].first),
            "text": texts[0].first.elapsed_time(texts[-1].last),
            "text to UNet": texts[-1].last.elapsed_time(unets[0].first),
            "UNet, median": statistics.median(one.first.elapsed_time(one.last) for one in unets),
            "UNet, all": sum(one.first.elapsed_time(one.last) for one in unets),
            "between UNet calls, median": statistics.median(gaps),
            "between UNet calls, all": sum(gaps),
            "UNet to VAE": unets[-1].last.elapsed_time(vae.first),
            "VAE": vae.first.elapsed_time(vae.last),
            "VAE to pictures": vae.last.elapsed_time(end),
        }
    return {name: 1e3 * seconds for name, seconds in host.items()}, found


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


def percentiles(times: Iterable[float]) -> list[float]:
    """The 20th and the 50th."""
    fifth = sorted(times)
    return [round(fifth[len(fifth) // 5], 3), round(statistics.median(fifth), 3)]


def by_name(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Percentiles of each thing that the rows name."""
    return {name: percentiles(row[name] for row in rows) for name in rows[0]}


def made(name: str, where: device.Device) -> Model:
    """The model: real on CUDA, narrow on the CPU."""
    if name == "embedded":
        return clearway.load("embedded", device=str(where))
    return narrow(name) if where.kind == "cpu" else random_model.random_model(name, where, HALF)


def measured(name: str, where: device.Device, rounds: int) -> dict[str, Any]:
    """One model's line."""
    model = made(name, where)
    request = Request(prompt="a lighthouse by the sea, (storm:1.2)", seed=1, **REQUESTS[name])
    request = replace(request, cfg_scale=CFG[name]) if name in CFG else request
    for _ in range(3):
        result = draw(model, request)
    assert result.routes["unet/cuda_graph"] and not result.notes[1:], (result.routes, result.notes)
    walls, processes, lines = [], [], []
    for _ in range(rounds):
        begun, own = time.perf_counter(), time.process_time()
        draw(model, request)
        walls.append(1e3 * (time.perf_counter() - begun))
        processes.append(1e3 * (time.process_time() - own))
        lines.append(timeline(model, request))
    heard = [spans(model, request) for _ in range(rounds)]
    times = {key: percentiles(one[key][0] for one in heard) for key in heard[0]}
    order = sorted(times, key=lambda key: -times[key][0])
    return {
        "modules": [len(list(part.modules())) for part in (*model.text_encoders, model.unet, model.vae)],
        "wall_ms": percentiles(walls),
        "process_ms": percentiles(processes),
        "host_ms": by_name([host for host, _ in lines]),
        "device_ms": by_name([found for _, found in lines]),
        "spans_ms": {key: [*times[key], heard[0][key][1]] for key in order},
        "operations": operations(model, request),
        "functions": longest(model, request, rounds),
        "pictures": hashlib.sha256(result.images.tobytes() + repr(result.infotexts).encode()).hexdigest()[
            :16
        ],
    }


def main() -> None:
    """Measures and appends a line a model."""
    os.environ.setdefault("CLEARWAY_OTHER_SIZES", "0")  # nobody else is to be at work
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--label", default="")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    given = parser.parse_args()
    where = device.pick(given.device)
    if where.kind == "cpu":
        torch.set_num_threads(1)
    noting = NotingIdle if where.kind == "cpu" else NotingTorch
    sys.modules["clearway.execution.executor"].TorchCapture = noting  # type: ignore[attr-defined]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with (
        patched(chosen.DEFAULTS, "cpu", chosen.DEFAULTS["cuda"]),
        given.output.open("a", encoding="utf-8") as file,
    ):
        print(json.dumps({"label": given.label, "about": provenance(where)}), file=file, flush=True)
        for name in given.models:
            line = {"label": given.label, "model": name, **measured(name, where, given.rounds)}
            print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
