"""The process that builds kernels for sizes of a picture that were not drawn yet: see other_sizes.py.

There is no device in it. Tensors have no storage and pass for a GPU's, Triton is told what it builds for, and
launches are taken down by ahead.py as they are where there is a device. So what is built is just what a
picture of that size will launch, and lies in Triton's cache under the same key.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway import ops
from clearway.ops import ahead, attention_gemm, contract, elsewhere, forks, other_sizes, selftest, state
from clearway.ops._allowance import cores
from clearway.ops._layout import image_format
from clearway.ops.ahead import Shaped
from clearway.ops.contract import OPS, Op

THREADS = min(max(cores() // 4, 2), 4)
SHARE = 3
"""One of so many cores' worth of forks: on all of them, though they step back, they slow a picture that is
being drawn."""
INSTEAD = "geglu_linear"
"""Where its reference is taken, models take a product and then `geglu`."""


def work(job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Builds what a job's calls of ops launch at its sizes."""
    pass_for_a_device(tuple(job["capability"]), job["processors"])
    build_for(*job["target"])
    prepare(job["ready"], job["tuned"])
    calls = [(op, tuple(map(other_sizes.heard, args))) for op, args in job["calls"] if op in OPS]
    base = tuple(job["base"])
    tell({"started": True})

    def run() -> None:
        made = ahead.gathering()
        assert made is not None
        made.known = True  # what was called is being built by the one who tells of it
        launch(calls, base, base)
        made.known = False
        for size in job["sizes"]:
            launch(calls, base, tuple(size))
            tell({"case": "x".join(map(str, size))})

    with torch.no_grad(), contract.use(**job["named"]):
        if not hasattr(os, "fork"):
            ahead.build(run, THREADS)
            return
        for number, _ in forks.each(ahead.taken_down(run), max(elsewhere.most() // SHARE, 1)):
            tell({"built": number})


def launch(calls: list[tuple[str, tuple[Any, ...]]], base: tuple[int, int], size: tuple[int, int]) -> None:
    """Calls each op as it would be at another size, or as it was at `base`, where it takes a way of ours."""
    for name, args in calls:
        there = args if size == base else other_sizes.resized(name, args, base, size)
        if there is not None:
            with contextlib.suppress(Exception):  # what is wrong the picture itself will meet
                _launch(OPS[name], tuple(tensor(arg) if isinstance(arg, Shaped) else arg for arg in there))


def _launch(op: Op, args: tuple[Any, ...]) -> None:
    chosen = op.route(*args)
    if not chosen.stock:
        chosen.run(*args)
    elif op.name == INSTEAD and chosen is op.reference:
        _launch(OPS["geglu"], (args[0].new_empty((*args[0].shape[:-1], args[1].shape[0])),))


def tensor(like: Shaped) -> Tensor:
    """A tensor without storage that lies so."""
    size = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.strides, strict=True))
    whole = torch.empty(like.offset + size, dtype=getattr(torch, like.dtype), device="meta")
    return whole.as_strided(like.shape, like.strides, like.offset)


def prepare(ready: dict[str, list[str]], tuned: dict[str, Any]) -> None:
    """From now on ops have the implementations named, all of them sound, and these tuned tables."""
    ops.discover()
    state._tuned["cuda"] = tuned
    for name, op in OPS.items():
        taken = [one for one in op.implementations if one.name in ready.get(name, ())]
        here = tuple(one for one in taken if one.device in ("cuda", "any"))
        op._ready["cuda"] = state.version(), here


def pass_for_a_device(capability: tuple[int, ...], processors: int) -> None:
    """From now on tensors without storage pass for those of a GPU like this in this process."""
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: capability  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=processors)  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.is_autocast_enabled = lambda *_: False  # which does not know tensors without storage
    attention_gemm._scores = lambda q, k: q.float() @ k.float()
    F.conv2d = convolved  # type: ignore[assignment]


_conv2d = F.conv2d


def convolved(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """F.conv2d laid out as cuDNN does it: channels-last where x or the weight is."""
    out = _conv2d(x, weight, *args, **kwargs)
    last = torch.channels_last in (image_format(x), image_format(weight))
    return torch.empty_like(out, memory_format=torch.channels_last) if last else out


def build_for(backend: str, arch: int, warp_size: int) -> None:
    """From now on Triton builds for such a GPU, which is not there."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import driver

    target = GPUTarget(backend, arch, warp_size)
    stand_in: Any = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: None,
        get_current_stream=lambda _: 0,
        launcher_cls=CudaLauncher,  # built by the C compiler, and kept too
    )
    driver.set_active(stand_in)


def step_back() -> None:
    """Takes only what no other process wants."""
    with contextlib.suppress(AttributeError, OSError):
        os.nice(19)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def process() -> int:
    """The process itself."""
    step_back()
    return selftest.main(work)


if __name__ == "__main__":
    sys.exit(process())
