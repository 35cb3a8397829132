"""What other sizes of a picture will need, built while nobody waits for it.

Kernels are built for the first picture when its graphs are captured (ahead.py). Another size takes some that
it did not: other tiles of a convolution, attention whose last tile is not full, one op's way in place of
another's. Which, its calls of ops tell: a tensor of the image's height and width, or of as many tokens,
becomes one of the other size, and an op is asked which way it would take then. That is done by a process of
its own (_on_paper.py) without a device, at the lowest priority, into Triton's cache on disk, where a picture
of that size finds them.

It begins when it is known what the first picture launches, beside the building of that, and holds no memory
of a device. Where nothing was ever built so, its process is started when a model is read or accelerated: to
start one takes seconds. CLEARWAY_OTHER_SIZES=0 turns it off, as the command line does, whose processes end
with what they were asked for. Nothing is begun without Triton, nor on ROCm.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearway import home
from clearway.ops import elsewhere, forks, state
from clearway.ops._workers import Crew, Job, Worker
from clearway.ops.ahead import Calls, Shaped
from clearway.ops.contract import OPS, chosen_by_name

VARIABLE = "CLEARWAY_OTHER_SIZES"
Size = tuple[int, int]
SIZES: tuple[tuple[Size, ...], ...] = (
    ((512, 768), (768, 512), (512, 512), (640, 384), (384, 640), (640, 640), (768, 768)),
    ((832, 1216), (1216, 832), (1024, 1024), (896, 1152), (1152, 896), (768, 1344), (1344, 768), (640, 1536),
     (1536, 640)),
)  # fmt: skip
"""Heights and widths in pixels of models for about 512x512 and for a megapixel; what comes first is built
first. The latter are those that SDXL was trained with most: Podell et al. 2023 (arXiv 2307.01952),
appendix I."""
FACTOR = 8
"""Pixels of a side for one of the latents."""
FOLDER = "other_sizes"
SILENCE_S = 600.0
LEVELS = 3
"""A network halves or doubles its image at most so often."""
COMMAND = ("-P", "-m", "clearway.ops._on_paper")
ENVIRONMENT = {
    state.INSIDE: "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}

SPARE_S = 180.0
"""How long a process that was started early waits for what to build."""

_begun: set[str] = set()
_lock = threading.Lock()
_spare: list[Worker] = []
_expected = False


def _worker() -> Worker:
    """The process that was started early, or one that is started now."""
    with _lock:
        spare = _spare.pop() if _spare else None
    if spare is not None:
        if spare.alive():
            return spare
        spare.close()
    return _started()


def _started() -> Worker:
    """A new one, which steps back while it reads PyTorch, not only when it builds."""
    made = Worker(ENVIRONMENT, COMMAND)
    made.step_back()
    return made


_crew = Crew(_worker)


def expect(kind: str) -> bool:
    """Starts the process that will be wanted soon, once, where a model comes to lie on a device of `kind` and
    nothing is known to have been built before; whether it did."""
    global _expected
    if _off() or not elsewhere.possible(kind):
        return False
    if forks.there():  # it will be there at once
        return False
    with _lock:
        if _expected:
            return False
        _expected = True
        here = _folder()
        if here is not None and any(home.read_json(FOLDER, name) == here for name in home.names(FOLDER)):
            return False
        try:
            _spare.append(_started())
        except (OSError, ValueError, TypeError):  # no process can be had: nor later
            return False
    timer = threading.Timer(SPARE_S, dismiss)
    timer.daemon = True
    timer.start()
    return True


def dismiss() -> None:
    """Ends a process that was started early and is not wanted."""
    with _lock:
        gone = list(_spare)
        _spare.clear()
    for worker in gone:
        worker.close()


def _off() -> bool:
    return os.environ.get(VARIABLE) == "0" or state.trusted()


def begin(inputs: Sequence[Tensor], calls: Calls) -> Job | None:
    """Begins to build what networks called with `inputs` will need at other sizes, from the `calls` of ops
    that they made; comes back at once. None where there is nothing to do, or it was begun before."""
    if _off() or not calls:
        return None
    first = next((one for one in inputs if one.dim() == 4), None)
    if first is None or not elsewhere.possible(first.device.type):
        return None
    base = int(first.shape[2]), int(first.shape[3])
    sizes = others(base)
    if not sizes:
        return None
    job = _job(base, sizes, calls, first.get_device())
    name = f"{_digest(job, base, sizes)}.json"
    with _lock:
        new = name not in _begun and home.read_json(FOLDER, name) != _folder()
        _begun.add(name)
    if not new:
        dismiss()
        return None
    made = Job(job, SILENCE_S, then=lambda done: _ended(done, name))
    _crew.give(made, 1)
    return made


def others(base: Size) -> list[Size]:
    """The sizes of latents that are likely to be asked for beside `base`, those first that are likeliest."""
    area = math.prod(base)
    for sizes in SIZES:
        areas = [math.prod(one) // FACTOR**2 for one in sizes]
        if 0.9 * min(areas) <= area <= 1.1 * max(areas):
            return [made for high, wide in sizes if (made := (high // FACTOR, wide // FACTOR)) != base]
    return []


def resized(op: str, args: Sequence[Any], base: Size, to: Size) -> tuple[Any, ...] | None:
    """A call's arguments at another size; None where none of them depends on it."""
    made = tuple(_resized(op, arg, base, to) if isinstance(arg, Shaped) else arg for arg in args)
    return None if made == tuple(args) else made


def _resized(op: str, given: Shaped, base: Size, to: Size) -> Shaped:
    shape = list(given.shape)
    if len(shape) == 4 and op != "attention":
        for level in (Fraction(2) ** power for power in range(-LEVELS, LEVELS + 1)):
            if all(side == before * level for side, before in zip(shape[2:], base, strict=True)):
                shape[2:] = (math.ceil(side * level) for side in to)
                break
    elif len(shape) >= 3:
        axis = len(shape) - 1 if op == "group_norm_silu" else len(shape) - 2
        for level in (Fraction(4) ** power for power in range(-LEVELS, LEVELS + 1)):
            if shape[axis] == math.prod(base) * level:
                shape[axis] = math.ceil(math.prod(to) * level)
                break
    return given._replace(shape=tuple(shape), strides=_strides(given, shape))


def _strides(given: Shaped, shape: Sequence[int]) -> tuple[int, ...]:
    """Those of `given` for another shape: the axes as they lay, with the gaps that there were."""
    strides, before, after = list(given.strides), 1, 1
    for axis in sorted(range(len(shape)), key=lambda axis: (given.strides[axis], given.shape[axis])):
        stride = given.strides[axis]
        if stride:
            exact = Fraction(stride * after, before)
            strides[axis] = int(exact) if exact.denominator == 1 else stride
            before, after = stride * given.shape[axis], strides[axis] * shape[axis]
    return tuple(strides)


def _job(base: Size, sizes: list[Size], calls: Calls, index: int) -> dict[str, Any]:
    """What the other process is told: the calls, what may be taken for each, and the device on paper."""
    from triton.runtime import driver

    target, names = driver.active.get_current_target(), {op for op, _ in calls}
    return {
        "base": base,
        "sizes": sizes,
        "calls": [[op, [_told(arg) for arg in args]] for op, args in calls if _tellable(args)],
        "ready": {name: _ready(name, calls) for name in sorted(names | {"geglu"})},
        "tuned": {name: table for name in sorted(names) if (table := state.tuned(name, "cuda"))},
        "named": chosen_by_name(),
        "target": [target.backend, target.arch, target.warp_size],
        "capability": torch.cuda.get_device_capability(index),
        "processors": torch.cuda.get_device_properties(index).multi_processor_count,
    }


def _ready(name: str, calls: Calls) -> list[str]:
    """The implementations of an op that nothing speaks against, in the dtype that it was called in."""
    if name not in OPS:
        return []
    dtypes = (args[0].dtype for op, args in calls if op == name and isinstance(args[0], Shaped))
    dtype = getattr(torch, next(dtypes, "float16"))
    return [
        one.name for one in OPS[name].implementations if OPS[name]._impossible(one, "cuda", dtype) is None
    ]


def _tellable(args: tuple[Any, ...]) -> bool:
    return all(arg is None or isinstance(arg, Shaped | bool | int | float | str) for arg in args)


def _told(arg: Any) -> Any:
    return {"tensor": list(arg)} if isinstance(arg, Shaped) else arg


def heard(arg: Any) -> Any:
    """An argument as `_told` told it."""
    if not isinstance(arg, dict):
        return arg
    dtype, shape, strides, offset = arg["tensor"]
    return Shaped(dtype, tuple(shape), tuple(strides), offset)


def _digest(job: dict[str, Any], base: Size, sizes: list[Size]) -> str:
    """Of what decides which kernels are built: alike for every size that the calls were taken down at."""
    everywhere = sorted({*sizes, base})
    calls = sorted(
        str((op, resized(op, args, base, everywhere[0]) or args))
        for op, told in job["calls"]
        for args in [tuple(map(heard, told))]
    )
    rest = {key: value for key, value in job.items() if key not in ("base", "sizes", "calls")}
    about = [everywhere, calls, rest, state.sources(), state.identity("cuda")]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def _folder() -> dict[str, Any] | None:
    """Triton's folder, which is what is kept of a job that was done; None where it is not there."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    return {"folder": str(folder)} if folder.is_dir() else None


def _ended(job: Job, name: str) -> None:
    here = _folder()
    if not job.failed() and here is not None:
        home.write_json(here, FOLDER, name)
