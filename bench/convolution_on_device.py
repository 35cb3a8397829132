"""Convolutions of small images: PyTorch's own against the op `convolution`, cut in several ways.

    python bench/convolution_on_device.py --output bench/results/<machine>/convolution.jsonl

Everything is fp16 on random data, channels-last, with several sets of weights in turns, so that they are read
from memory. The first line says where the figures come from, the second what the contenders are; then one
JSON line a case: microseconds of one call (median) by contender, and its error as a multiple of cuDNN's own,
both the largest difference from float64. "shares" are products whose shares are never added up, "early" lets
the second launch begin before the first has ended, "last" adds the shares in the program that comes last.
With `--device cpu --small` tiny shapes run, Triton's kernels under TRITON_INTERPRET=1.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from candidates_timed import SETS, Calls, chained, drawn, in_turns, over, triton
from ops_on_device import Call, Run, captured
from torch import Tensor
from torch.nn import functional as F

from clearway import device
from clearway.measure.provenance import provenance
from clearway.ops import convolution
from clearway.ops._triton import counting, kernel, tl
from clearway.ops.convolution import Plan, _share

TURNS = 4  # calls of each set that a graph holds
OUTPUTS = 1280
CHANNELS = (640, 1280, 1920, 2560)
CASES = (
    *((batch, channels, side, 3) for batch in (2, 4) for side in (8, 16) for channels in CHANNELS),
    *((2, channels, side, 1) for channels, side in ((2560, 8), (640, 16), (1920, 16), (2560, 16))),
)
"""Images, channels, side of the image, side of the taps."""
SMALL = ((2, 128, 4, 3), (1, 256, 3, 1))
VARIANTS: dict[str, tuple[int, int, int, int, int, int]] = {
    "128x128x64 w8 s4": (128, 128, 64, 1, 8, 4),
    "128x128x64 w4 s4": (128, 128, 64, 1, 4, 4),
    "128x128x128 w8 s3": (128, 128, 128, 1, 8, 3),
    "128x64x64 w4 s5": (128, 64, 64, 1, 4, 5),
    "128x64x128 w4 s4": (128, 64, 128, 1, 4, 4),
    "128x64x64 w4 s4, two": (128, 64, 64, 2, 4, 4),
    "64x128x64 w4 s4, two": (64, 128, 64, 2, 4, 4),
    "64x64x128 w4 s3, two": (64, 64, 128, 2, 4, 3),
    "128x256x64 w8 s3": (128, 256, 64, 1, 8, 3),
}
"""Rows, columns and depth of a tile, programs a multiprocessor, warps, stages."""
MORE = ("128x128x64 w8 s4", "128x64x64 w4 s5", "64x64x128 w4 s3, two")
"""Those that are tried as "shares", "early" and "last" too."""


@counting("rows", "height", "width")
def _product_last(
    x, weight, shares, counts, out, rows, height, width, channels, outputs,
    SIDE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As convolution's two kernels; `counts` (a number a tile, 0) says who is the last, and is 0 again."""
    total = _share(x, weight, rows, height, width, channels, SIDE, BLOCK_M, BLOCK_N, BLOCK_K)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = (m < rows)[:, None]
    at = m[:, None] * outputs + o[None, :]
    tl.store(shares + tl.program_id(2) * rows * outputs + at, total, mask=live)
    tl.debug_barrier()  # all of this program's share before its count
    count = counts + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    before = tl.atomic_add(count, 1, sem="acq_rel")
    if before == SPLIT - 1:
        tl.debug_barrier()
        whole = tl.load(shares + at, mask=live, other=0.0, cache_modifier=".cg")
        for share in range(1, SPLIT):
            whole += tl.load(shares + share * rows * outputs + at, mask=live, other=0.0, cache_modifier=".cg")
        tl.store(out + at, whole.to(out.dtype.element_ty), mask=live)
        tl.store(count, 0)


@counting("rows", "height", "width")
def _product_early(
    x, weight, out, rows, height, width, channels, outputs,
    SIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As convolution's own; what follows may be launched as soon as every program runs."""
    tl.extra.cuda.gdc_launch_dependents()
    total = _share(x, weight, rows, height, width, channels, SIDE, BLOCK_M, BLOCK_N, BLOCK_K)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    to = out + (tl.program_id(2) * rows + m)[:, None] * outputs + o[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m < rows)[:, None])


@kernel
def _add_early(shares, out, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """As convolution's own, after it waited for the whole of the launch before."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    tl.extra.cuda.gdc_wait()
    total = tl.load(shares + at, mask=live, other=0.0)
    for share in tl.static_range(1, SPLIT):
        total += tl.load(shares + share * size + at, mask=live, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live)


def planned(variant: str, x: Tensor, weight: Tensor) -> Plan | None:
    """How a variant cuts these arguments; None where its tile does not fit them."""
    block_m, block_n, block_k, each, warps, stages = VARIANTS[variant]
    if weight.shape[0] % block_n or x.shape[1] % block_k:
        return None
    tiles = -(-pixels(x) // block_m) * (weight.shape[0] // block_n)
    processors = convolution._processors(x.get_device()) if x.is_cuda else convolution.PROCESSORS
    blocks = weight.numel() // weight.shape[0] // block_k
    return Plan(
        block_m, block_n, block_k, max(min(each * processors // tiles, blocks // 2), 1), warps, stages
    )


def pixels(x: Tensor) -> int:
    """Of all images."""
    return x.shape[0] * x.shape[2] * x.shape[3]


def by_plan(plan: Plan, **kernels: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The op's implementation cut so, with other kernels in place of its own."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        with patch.multiple(convolution, _planned=lambda *_: plan, **kernels):
            return convolution._split_k_run(x, weight)

    return run


def by_last(plan: Plan, kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """One launch; a call's counts are its own, kept from call to call."""
    counts = torch.zeros(4096, dtype=torch.int32, device=kind)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        rows, outputs = pixels(x), weight.shape[0]
        shares = torch.empty((plan.split, rows, outputs), dtype=torch.float32, device=x.device)
        shape, last = (batch, outputs, height, width), torch.channels_last
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=last)
        _product_last.launch(
            (outputs // plan.block_n, -(-rows // plan.block_m), plan.split),
            *(x, weight, shares, counts, out, rows, height, width, channels, outputs),
            SIDE=weight.shape[-1],
            SPLIT=plan.split,
            BLOCK_M=plan.block_m,
            BLOCK_N=plan.block_n,
            BLOCK_K=plan.block_k,
            num_warps=plan.warps,
            num_stages=plan.stages,
        )
        return out

    return run


class Waiting:
    """Launches a kernel that begins before the one ahead of it has ended."""

    def launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        _add_early.launch(grid, *args, **constants, launch_pdl=True)


class Nothing:
    """Launches nothing."""

    def launch(self, *_: Any, **__: Any) -> None:
        return None


def contenders(run: Run, xs: list[Tensor], weights: list[Tensor]) -> tuple[dict[str, Calls], dict[str, Plan]]:
    """Calls of each set by name, and the plans of those that have one."""
    padding = weights[0].shape[-1] // 2
    called: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "conv2d": lambda x, w: F.conv2d(x, w, padding=padding)
    }
    plans: dict[str, Plan] = {}
    if convolution._triton.absent() is None:
        plans["default"] = convolution._planned(xs[0], weights[0])
        called["default"] = convolution._split_k_run
        for name in VARIANTS:
            plan = planned(name, xs[0], weights[0])
            if plan is None:
                continue
            plans[name], called[name] = plan, by_plan(plan)
            if name in MORE and plan.split > 1:
                called[f"shares {name}"] = by_plan(plan, _add=Nothing())
                called[f"last {name}"] = by_last(plan, run.kind)
                if run.kind == "cuda":
                    early = {"_product": _product_early, "_add": Waiting()}
                    called[f"early {name}"] = by_plan(plan, **early)
    calls = {name: over(call, xs, weights) for name, call in called.items()}
    columns = [windows(x, padding) for x in xs]
    flat = [w.permute(0, 2, 3, 1).reshape(w.shape[0], -1) for w in weights]
    calls["product of columns"] = over(F.linear, columns, flat)
    return calls, plans


def windows(x: Tensor, padding: int) -> Tensor:
    """What each pixel of the output reads, a row each, channels last: (N * H * W, taps * C)."""
    side, image = 2 * padding + 1, x.permute(0, 2, 3, 1)
    padded = F.pad(image, (0, 0, padding, padding, padding, padding)).unfold(1, side, 1).unfold(2, side, 1)
    return padded.permute(0, 1, 2, 4, 5, 3).reshape(pixels(x), -1)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """In float64, as a product."""
    flat = weight.double().permute(0, 2, 3, 1).reshape(weight.shape[0], -1)
    rows = windows(x.double(), weight.shape[-1] // 2) @ flat.T
    return rows.view(x.shape[0], x.shape[2], x.shape[3], -1).permute(0, 3, 1, 2)


def measure(run: Run, batch: int, channels: int, side: int, taps: int) -> None:
    """One case, a line."""
    outputs = 128 if run.small else OUTPUTS
    sets = 2 if run.small else SETS
    xs = [drawn(run, batch, channels, side, side) for _ in range(sets)]
    weights = [drawn(run, outputs, channels, taps, taps, fan=taps * taps * channels) for _ in range(sets)]
    calls, plans = contenders(run, xs, weights)
    want = exact(xs[0], weights[0])
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    ready: dict[str, Call] = {}
    turns = 1 if run.kind == "cpu" else TURNS
    for name, each in calls.items():
        try:
            first, again = each[0](), each[0]()
            if first.dim() == 4 and not name.startswith("shares"):
                errors[name] = float((first.double() - want).abs().max())
                if not torch.equal(first, again):
                    failed[name] = "a second call gives other bits"
            many = chained(list(each) * turns)
            ready[name] = captured(many) if run.kind == "cuda" else many
        except Exception as error:  # one that cannot be built or launched; the others' figures are wanted
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    times = in_turns(run, ready)
    us = {name: round(1e3 * statistics.median(taken) / (turns * sets), 2) for name, taken in times.items()}
    own = errors.get("conv2d") or float("nan")
    run.write(
        part="convolution",
        case=f"{batch}x{channels}->{outputs}@{side} k{taps}",
        bytes_weight=weights[0].nbytes,
        us=dict(sorted(us.items(), key=lambda item: item[1])),
        error_of_conv2d=float(f"{own:.3g}"),
        times_its_error={name: float(f"{error / own:.3g}") for name, error in errors.items()},
        split={name: plan.split for name, plan in plans.items()},
        failed=failed,
    )


def main() -> None:
    """Case by case; a case that fails says so in a line, and the next one follows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the lines to this file")
    parser.add_argument("--device", default="cuda", choices=device.KINDS)
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit-s", type=float, default=55.0, help="start no further case after this")
    given = parser.parse_args()
    given.dtype, given.compile = "float16", False
    torch.manual_seed(0)
    file = None
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        file = given.output.open("w", encoding="utf-8")
    run = Run(given, file)
    about = provenance(device.pick(given.device), dtype="float16", data="random")
    run.write(bench="convolution", source="bench/convolution_on_device.py", provenance=about)
    triton(run, "convolution")
    run.write(sets=SETS, variants=VARIANTS, order="rows, columns, depth, programs each, warps, stages")
    for case in SMALL if run.small else CASES:
        if run.late():
            run.write(case=str(case), skipped="the time was up")
            continue
        try:
            measure(run, *case)
        except Exception as error:  # the other cases' figures are worth having
            run.write(case=str(case), failed=f"{type(error).__name__}: {error}"[:300])
    run.write(seconds=round(time.monotonic() - run.started, 1))
    if file is not None:
        file.close()


if __name__ == "__main__":
    main()
