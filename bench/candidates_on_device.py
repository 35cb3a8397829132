"""What was tried to make the UNets faster, side by side again on this machine: what docs/candidates.md tells.

    python bench/candidates_on_device.py --output bench/results/<machine>/candidates.jsonl
    python bench/candidates_on_device.py --unets --packed-qkv     # these parts alone

Everything is fp16 on random data. The first line says where the figures come from, then one JSON line a
measurement, written at once: milliseconds of one call (p20, p50, p80), and how far the result is from the
reference's, as a ratio of norms. A UNet's graph is timed over 16 replays together. With
`--device cpu --small` all that does not need a GPU runs on tiny shapes; Triton's kernels too under
TRITON_INTERPRET=1. These figures propose: whole generations decide.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from candidate_kernels import PARTS
from candidates_timed import apart, chained, drawn, in_turns, opened, options, report
from ops_on_device import Call, Run
from torch import Tensor, nn

import clearway
from clearway import device
from clearway.execution import executor
from clearway.execution.kept import Frame, within
from clearway.measure.random_model import random_model
from clearway.ops import discover
from clearway.types import Precision

REPLAYS = 16
UNETS = ("sd15", 64), ("sdxl", 128)
SMALL_UNETS = (("tiny-sdxl", 16),)
PRECISION = Precision("float16", "float16", "float16", "float32")

Given = tuple[tuple[Tensor, Tensor], dict[str, Any]]
"""A UNet's latents and timesteps, and what it takes by name."""


def unets(run: Run) -> None:
    """Captured UNet calls: packed QKV or three products; guidance's halves in one batch or two branches."""
    for name, side in SMALL_UNETS if run.small else UNETS:
        unet = random_model(name, device.pick(run.kind), PRECISION).unet
        given = arguments(run, unet, side)
        for turn, packed in enumerate((False, True, True, False)):  # both ways round
            clearway.accelerate(unet, executor="eager", packed_qkv=packed)
            words = "packed QKV" if packed else "unpacked"
            try:
                with torch.no_grad():
                    measure(run, unet, given, f"{name} {side}x{side}", words, branches=turn < 2)
            finally:
                clearway.restore(unet)
        del unet
        device.release_memory(device.pick(run.kind))


def measure(run: Run, unet: nn.Module, given: Given, case: str, words: str, branches: bool) -> None:
    """Both halves in one batch; with `branches` also one alone, and both in branches of a graph; in turns."""
    want, call = prepared(run, unet, given)
    calls, errors = {words: call}, dict[str, float | None]()
    if branches:
        calls[f"a batch of one, {words}"] = prepared(run, unet, half(given, 0))[1]
    if branches and run.kind == "cuda":
        name = f"two branches, {words}"
        calls[name], outputs = forked(unet, [half(given, 0), half(given, 1)])
        calls[name]()
        torch.cuda.synchronize()
        errors[name] = apart(torch.cat(outputs), want)
    elif branches:
        run.write(part="unet", case=case, skipped="branches are captured in a graph, which needs CUDA")
    repeats = REPLAYS if run.kind == "cuda" else 1
    part = "unet replay" if run.kind == "cuda" else "unet call"
    many = {name: chained([call] * repeats) for name, call in calls.items()}
    for name, taken in in_turns(run, many).items():
        times = [one / repeats for one in taken]
        report(run, part, case, name, times, replays=repeats, error=errors.get(name))


def arguments(run: Run, unet: Any, side: int) -> Given:
    """Random ones for both halves of the guidance."""
    config = unet.config
    named: dict[str, Any] = {"encoder_hidden_states": drawn(run, 2, 77, config.cross_attention_dim)}
    if config.addition_embed_type:
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        sizes = torch.tensor([[8.0 * side, 8.0 * side, 0, 0, 8.0 * side, 8.0 * side]] * 2, device=run.kind)
        named["added_cond_kwargs"] = {"text_embeds": drawn(run, 2, pooled), "time_ids": sizes.half()}
    latents = drawn(run, 2, config.in_channels, side, side)
    return (latents, torch.full((2,), 500.0, device=run.kind)), named


def half(given: Given, index: int) -> Given:
    """One half of the guidance alone."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cut(one) for name, one in value.items()}
        return value[index : index + 1].clone(memory_format=torch.preserve_format)

    return (cut(given[0][0]), cut(given[0][1])), cut(given[1])


def prepared(run: Run, unet: nn.Module, given: Given) -> tuple[Tensor, Call]:
    """What a call gives, and the call; on CUDA the replay of its graph. RuntimeError where there is none."""
    made: Any = executor("cuda_graph" if run.kind == "cuda" else "eager", unet, "unet", Counter())

    def call() -> Tensor:
        output: Tensor = made(*given[0], **given[1], return_dict=False)[0]
        return output

    want = call()
    if run.kind != "cuda":
        return want, call
    if not made.pool.held:
        raise RuntimeError(f"the UNet was not captured: {made.sentences('it')}")
    return want, next(reversed(made.pool.held.values())).replay


def forked(unet: nn.Module, halves: Sequence[Given]) -> tuple[Call, list[Tensor]]:
    """(replay, outputs) of a graph whose branches are the two halves; keys and values lie outside of it."""
    frames = [Frame((named["encoder_hidden_states"],)) for _, named in halves]

    def call(index: int) -> Tensor:
        given, named = halves[index]
        with within(frames[index]):
            output: Tensor = unet(*given, **named, return_dict=False)[0]
        return output

    streams = [torch.cuda.Stream() for _ in halves]
    for index, stream in enumerate(streams):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(index)
            call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here, there = torch.cuda.current_stream(), streams[1]
        there.wait_stream(here)
        first = call(0)
        with torch.cuda.stream(there):
            second = call(1)
        here.wait_stream(there)
    return graph.replay, [first, second]


ALL: dict[str, Callable[[Run], None]] = {**PARTS, "unets": unets}


def main() -> None:
    """Part by part; a part that fails says so in a line, and the next one follows."""
    parser = options(__doc__.splitlines()[0], "tiny shapes, to see that it runs", rounds=21)
    for name, part in ALL.items():
        parser.add_argument(f"--{name}", action="store_true", help=(part.__doc__ or "").rstrip("."))
    given = parser.parse_args()
    given.limit_s = float("inf")
    discover()
    with opened(given, "candidates", "bench/candidates_on_device.py") as run:
        chosen = [name for name in ALL if getattr(given, name.replace("-", "_"))] or list(ALL)
        for name in chosen:
            begun = time.monotonic()
            try:
                ALL[name](run)
            except Exception as error:  # the other parts' figures are worth having
                run.write(part=name, failed=f"{type(error).__name__}: {error}"[:300])
            run.write(part=name, seconds=round(time.monotonic() - begun, 1))


if __name__ == "__main__":
    main()
