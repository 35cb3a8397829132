"""Captured UNet calls with their small memsets as they are, and with kernels in their place.

    python bench/memsets_on_device.py --output bench/results/<machine>/memsets.jsonl

fp16, random weights and inputs, guidance's halves in one batch. The first line says where the figures come
from, then one JSON line each: what memsets the graph holds, by bytes, how many were replaced, and the seconds
that this took, with instantiating the graph; milliseconds of a replay (p20, p50, p80), 16 timed together,
both graphs taking turns; and how far the outputs are apart, beside how far two replays of the same graph are.
With `--device cpu --small` a tiny UNet is called without a graph, to see that it runs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from candidates_on_device import PRECISION, REPLAYS, SMALL_UNETS, UNETS, Given, arguments
from candidates_timed import chained, in_turns, report
from ops_on_device import Call, Run
from torch import Tensor, nn

import clearway
from clearway import device
from clearway.execution.capture import TorchCapture
from clearway.execution.cuda_graph import CudaGraph
from clearway.execution.memsets import MOST_BYTES, Memsets, absent
from clearway.execution.pool import Pool
from clearway.measure.provenance import provenance
from clearway.measure.random_model import random_model
from clearway.ops import discover

WAYS = {"memsets": False, "kernels": True}


class Timed(Memsets):
    """Notes the seconds that its part of a capture takes."""

    seconds = 0.0

    def finish(self, graph: Any) -> None:
        """As it is, timed."""
        began = time.monotonic()
        super().finish(graph)
        self.seconds += time.monotonic() - began


def compare(run: Run, name: str, side: int) -> None:
    """One UNet: its graph both ways."""
    unet = random_model(name, device.pick(run.kind), PRECISION).unet
    given, case = arguments(run, unet, side), f"{name} {side}x{side}"
    clearway.accelerate(unet, executor="eager")
    try:
        with torch.no_grad():
            if run.kind == "cuda":
                graphs(run, unet, given, case)
            else:
                times(run, case, {"no graph": lambda: unet(*given[0], **given[1])}, 1)
    finally:
        clearway.restore(unet)


def graphs(run: Run, unet: nn.Module, given: Given, case: str) -> None:
    """Captures both, compares and times them."""
    calls: dict[str, CudaGraph] = {}
    outputs: dict[str, Tensor] = {}
    for words, wanted in WAYS.items():
        backend = TorchCapture()
        backend.memsets = found = Timed(wanted)
        calls[words] = CudaGraph(unet, "unet", Counter(), Pool(backend))
        outputs[words] = output(calls[words], given)
        about: dict[str, Any] = {}
        if wanted:
            about["memsets"] = found.sizes.total()
            about["sizes"] = {str(size): count for size, count in sorted(found.sizes.items())}
            about |= {"replaced": found.replaced, "left": dict(found.left), "reason": found.reason}
            about["changed_and_instantiated_s"] = round(found.seconds, 4)
        run.write(part="memsets", case=case, candidate=words, **about)
        if not calls[words].pool.held:
            raise RuntimeError(f"the UNet was not captured: {calls[words].sentences('it')}")
    plain, changed = outputs.values()
    again = output(calls["memsets"], given)
    run.write(
        part="outputs",
        case=case,
        largest=float(plain.abs().max()),
        largest_difference=float((changed.float() - plain.float()).abs().max()),
        difference_of_two_replays=float((again.float() - plain.float()).abs().max()),
    )
    replays: dict[str, Call] = {
        words: next(iter(call.pool.held.values())).replay for words, call in calls.items()
    }
    times(run, case, replays, REPLAYS)


def output(call: CudaGraph, given: Given) -> Tensor:
    """A copy of what a call gives."""
    found: Tensor = call(*given[0], **given[1], return_dict=False)[0]
    return found


def times(run: Run, case: str, calls: dict[str, Call], replays: int) -> None:
    """A line each."""
    many = {words: chained([call] * replays) for words, call in calls.items()}
    for words, taken in in_turns(run, many).items():
        report(run, "replay", case, words, [one / replays for one in taken], replays=replays)


def main() -> None:
    """SD 1.5's UNet, then SDXL's; one that fails says so in a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the lines to this file")
    parser.add_argument("--device", default="cuda", choices=device.KINDS)
    parser.add_argument("--small", action="store_true", help="a tiny UNet, to see that it runs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit-s", type=float, default=30.0, help="start no further UNet after this")
    given = parser.parse_args()
    given.dtype, given.compile = "float16", False
    discover()
    torch.manual_seed(0)
    file = None
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        file = given.output.open("w", encoding="utf-8")
    run = Run(given, file)
    about = provenance(device.pick(given.device), dtype="float16", data="random", most_bytes=MOST_BYTES)
    run.write(bench="memsets", source="bench/memsets_on_device.py", provenance=about, absent=absent())
    for name, side in SMALL_UNETS if run.small else UNETS:
        if run.late():
            run.write(case=name, skipped="the time was up")
            continue
        began = time.monotonic()
        try:
            compare(run, name, side)
        except Exception as error:  # the other's figures are worth having
            run.write(case=name, failed=f"{type(error).__name__}: {error}"[:300])
        device.release_memory(device.pick(run.kind))
        run.write(case=name, seconds=round(time.monotonic() - began, 1))
    if file is not None:
        file.close()


if __name__ == "__main__":
    main()
