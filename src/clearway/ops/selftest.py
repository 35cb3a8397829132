"""Is an implementation sound on this machine? The checks, and what the process does in which they run.

A GPU fault kills the interpreter and cannot be caught, so checks run in other processes (_workers.py), which
are ended when they fall silent. They say what they begin before they begin it: after a crash or a hang the
parent knows the case. What fails is not used on this machine; the program goes on. Before first use the small
cases most like the arguments about to run are checked, within seconds; `clearway ops check` runs every case,
and the tests of the package call the same functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from clearway import device
from clearway.ops import ahead, contract, state
from clearway.ops._implementation import (
    Case,
    Given,
    Implementation,
    changed,
    refused,
    same_layout,
    tensors,
)
from clearway.ops.contract import OPS, Op

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL_ELEMENTS = 2**17  # cases up to this size are what is run before first use
SMALL_FLOPS = 2**30
BUDGET_S = 2.0  # for the checks before first use; what is left then is left to `ops check`
FIRST = 4
"""Before first use on CUDA the kernels of so many cases are built at once, and these cases checked."""
MOST_FLOPS = {"cpu": 2**33, "cuda": 2**38}
"""Larger cases are passed over: their yardstick in float64 would take minutes."""
HABITS = {"cpu": torch.float32}  # large cases run in one dtype: float16, or what the device computes in
BEGUN = "…"


def check(
    op: Op,
    implementation: Implementation,
    kind: str,
    every_case: bool,
    dtype: torch.dtype | None = None,
    like: tuple[int, ...] | None = None,
    threads: int | None = None,
) -> Iterator[tuple[str, str, str]]:
    """(case, dtype, problem) for each case and dtype in turn; an empty problem is a sound one.

    A case is yielded with the problem "…" when it begins. Cases that the implementation refuses are passed
    over. Before first use (`every_case` False) only small ones run, those like the shape `like` first, or
    without one some of all kinds. On CUDA, where building a kernel takes longer than its check, these are no
    more than FIRST, and `threads` build their kernels beforehand.
    """
    deadline = time.monotonic() + BUDGET_S
    for name, words, refusable in op.refusals():
        if name == implementation.name:
            reason = refused(implementation, _placed(made(op, refusable), kind))
            if reason is None or words not in reason:
                yield f"refusal {words!r}", "", f"it should have refused with that, and said {reason!r}"
    cases = _taken(op, implementation, kind, every_case, dtype, like)
    if kind == "cuda" and not every_case:
        first = list(itertools.islice(cases, FIRST))
        yield "building its kernels", state.dtype_name(dtype) if dtype is not None else "", BEGUN
        if ahead.build(lambda: _tried(implementation, [one[2] for one in first]), threads):
            cases, deadline = iter(first), math.inf
        else:
            cases = itertools.chain(first, cases)
    for label, name, args, large in cases:
        yield label, name, BEGUN
        yield label, name, problem(op, implementation, args, every_case, large)
        if not every_case and time.monotonic() > deadline:
            return


def _tried(implementation: Implementation, cases: list[Case]) -> None:
    """Runs it while nothing is launched; what is wrong the checks that follow will find."""
    for args in cases:
        try:
            implementation.run(*args)
        except Exception as error:
            if device.is_out_of_memory(error):
                raise


def _taken(
    op: Op,
    implementation: Implementation,
    kind: str,
    every_case: bool,
    dtype: torch.dtype | None,
    like: tuple[int, ...] | None,
) -> Iterator[tuple[str, str, Case, bool]]:
    """(label, dtype, arguments, whether it is large) of the cases that the implementation takes."""
    for name, given in _cases(op, every_case, like):
        large = callable(given)
        if large and _flops(op, given) > MOST_FLOPS.get(kind, math.inf):
            continue
        wanted = (dtype,) if dtype is not None else DTYPES
        for each in (HABITS.get(kind, torch.float16),) if large else wanted:
            args = _on(made(op, given), kind, each)
            if refused(implementation, args) is None:
                in_dtype = state.dtype_name(each)
                yield f"{name} {in_dtype}", in_dtype, args, large


def _flops(op: Op, given: Given) -> int:
    if op.flops is None:
        return 0
    with torch.device("meta"):
        return op.flops(*made(op, given))


def made(op: Op, given: Given) -> Case:
    """A case's arguments, all of them."""
    return op._bound(given() if callable(given) else given, {})


def _cases(op: Op, every_case: bool, like: tuple[int, ...] | None) -> list[tuple[str, Given]]:
    found = list(op.cases())
    if every_case:
        return found
    small: list[tuple[str, Given]] = []
    for name, given in found:
        if not callable(given) and _is_small(op, made(op, given)):
            small.append((name, given))
    if like:
        small.sort(key=lambda case: _distance(made(op, case[1])[0].shape, like))
        return small
    step = -(-len(small) // FIRST)  # some of all kinds first
    return [case for start in range(step) for case in small[start::step]]


def _distance(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[bool, int]:
    return len(shape) != len(like), abs(shape[-1] - like[-1]) if shape and like else 0


def _is_small(op: Op, args: Case) -> bool:
    elements = sum(tensor.numel() for tensor in tensors(args))
    return elements <= SMALL_ELEMENTS and (op.flops is None or op.flops(*args) <= SMALL_FLOPS)


def problem(
    op: Op, implementation: Implementation, args: Case, routed: bool = False, large: bool = False
) -> str:
    """What is wrong with an implementation's answer for `args`; empty where nothing is.

    `routed` also compares what a call by name gives, which must be the very same bits. The yardstick is plain
    PyTorch on the CPU, in float64 and in the arguments' own dtype; for `large` ones CUDA computes it, and MPS
    what is in its own dtype. TF32 is off meanwhile: it is another precision, which convolutions take unasked.
    """
    with device.tf32(device.Device(args[0].device.type), False):
        return _problem(op, implementation, args, routed, large)


def _problem(op: Op, implementation: Implementation, args: Case, routed: bool, large: bool) -> str:
    before = [tensor.clone() for tensor in tensors(args)]
    where = "cuda" if large and args[0].is_cuda else "cpu"
    yardstick = op.exact if large else op.reference.run
    exact = tuple(one.cpu() for one in _outputs(yardstick(*_on(args, where, torch.float64))))
    layout = _outputs(op.reference.run(*args))
    eager = layout if large else _eager(op, args, exact)
    try:
        with _poisoned(layout):
            raw = implementation.run(*args)
            followed = _then(op, raw)  # at once, so that a kernel outside the stream is read too early
    except Exception as error:
        if device.is_out_of_memory(error):
            raise
        return f"it raised {type(error).__name__}: {str(error).strip() or 'no message'}"
    for old, new in zip(before, tensors(args), strict=True):
        if not torch.equal(_bits(old), _bits(new)):
            return "it changed its inputs"
    out = _outputs(raw)
    if len(out) != len(layout):
        return f"it gave {len(out)} tensors, not {len(layout)}"
    for mine, like, ref, own in zip(out, layout, exact, eager, strict=True):
        found = _unlike(mine, like, implementation.stock) or _difference(op, mine, own, ref)
        if found:
            return found
    found = _projection_differs(op, raw, followed)
    if found or not routed:
        return found
    with state.trusting(), contract.use(**{op.name: implementation.name}):
        again = _outputs(op(*args))
    same = all(torch.equal(_bits(a), _bits(b)) for a, b in zip(again, out, strict=True))
    return "" if same else "called through the router it gives other bits than called directly"


def _outputs(out: Any) -> tuple[Tensor, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def _bits(tensor: Tensor) -> Tensor:
    """The values with NaN made comparable."""
    return tensor.nan_to_num(nan=12345.0) if tensor.is_floating_point() else tensor


def _eager(op: Op, args: Case, exact: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What plain PyTorch on the CPU gives in the arguments' own dtype; exact values rounded where it
    cannot."""
    try:
        return _outputs(op.reference.run(*_on(args, "cpu", None)))
    except RuntimeError:
        dtype = args[0].dtype
        return tuple(one.to(dtype) if one.is_floating_point() else one for one in exact)


def _unlike(out: Tensor, like: Tensor, stock: bool) -> str:
    if out.shape != like.shape or out.dtype != like.dtype or out.device != like.device:
        return f"it gave {tuple(out.shape)} {out.dtype}, not {tuple(like.shape)} {like.dtype}"
    if not stock and not same_layout(out, like):
        return f"it gave strides {out.stride()}, not {like.stride()}"
    return ""


def _difference(op: Op, out: Tensor, eager: Tensor, exact: Tensor) -> str:
    """What is wrong with values: where they are not finite, or how far from `exact` beyond what is
    promised."""
    dtype = out.dtype
    if not dtype.is_floating_point:
        return "" if torch.equal(out.cpu(), exact) else "its integers differ"
    found, eager = out.detach().to("cpu", torch.float64), eager.detach().to("cpu", torch.float64)
    target = exact.detach().to(dtype).double()  # where float64 is beyond the dtype, infinity is right
    wrong = (found.isfinite() != target.isfinite()) & (eager.isfinite() == target.isfinite())
    wrong |= target.isinf() & eager.isinf() & (found != target)
    if wrong.any():
        return (
            f"{int(wrong.sum())} of {out.numel()} values are finite where they should not be, or not written"
        )
    exact = exact.detach()
    finite = exact.isfinite() & target.isfinite() & found.isfinite()
    if not finite.any():
        return ""
    largest = exact[finite].abs().max().item()
    error = (found - exact)[finite].abs().max().item()
    stated = op.promise.tolerances.get(state.dtype_name(dtype))
    if stated:
        budget = stated[1] + stated[0] * largest
    elif dtype == torch.float64:  # nothing finer to compare with: rounding in another order
        budget = 256 * torch.finfo(dtype).eps * largest
    else:
        both = finite & eager.isfinite()
        own = (eager - exact)[both].abs().max().item() if both.any() else 0.0
        budget = op.promise.factor * own + 2 * torch.finfo(dtype).eps * largest
    return "" if error <= budget else f"it is {error:.3g} from float64, and {budget:.3g} is allowed"


def _then(op: Op, out: Any) -> Tensor:
    """What usually reads the output: the op's own `then`, else a projection of the last axis."""
    if op.then is not None:
        return op.then(out)
    first = _outputs(out)[0]
    if not first.is_floating_point() or first.dim() == 0:
        return first.clone()
    width = first.shape[-1]
    weight = torch.linspace(-1, 1, 8 * width).reshape(8, width)
    return torch.nn.functional.linear(first, weight.to(first.device, first.dtype))


def _projection_differs(op: Op, raw: Any, followed: Tensor) -> str:
    """Compares what was computed from the output at once with what its final values give."""
    quiet = [
        one.detach().to("cpu", torch.float64) if one.is_floating_point() else one.cpu()
        for one in _outputs(raw)
    ]
    exact = _then(op, tuple(quiet) if isinstance(raw, tuple) else quiet[0])
    found = followed.detach().to("cpu", exact.dtype)
    finite = exact.isfinite() & found.isfinite()
    if not exact.is_floating_point() or not finite.any():
        return ""
    scale = max(
        exact[finite].abs().max().item(),
        max(float(one[one.isfinite()].abs().max()) for one in quiet if one.isfinite().any()),
    )
    error = (found - exact)[finite].abs().max().item()
    budget = 32 * torch.finfo(followed.dtype).eps * scale
    return (
        "" if error <= budget else f"a projection right after it is off by {error:.3g}: it was not in order"
    )


@contextmanager
def _poisoned(layout: tuple[Tensor, ...]) -> Iterator[None]:
    """Within it new, uninitialised tensors hold NaN, so that a value never written shows.

    Python's makers are wrapped; what C++ allocates is likely to be one of the blocks filled and freed here.
    """
    makers = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch, "empty_permuted"),
        (Tensor, "new_empty"),
        (Tensor, "new_empty_strided"),
    ]
    originals = [getattr(owner, name) for owner, name in makers]
    blocks = [torch.full_like(one, float("nan")) for one in layout * 2 if one.is_floating_point()]
    del blocks

    def poisoned(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor: Tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    for (owner, name), make in zip(makers, originals, strict=True):
        setattr(owner, name, poisoned(make))
    try:
        yield
    finally:
        for (owner, name), make in zip(makers, originals, strict=True):
            setattr(owner, name, make)


def _on(args: Case, kind: str, dtype: torch.dtype | None) -> Case:
    """The arguments on a device in a dtype."""
    return tuple(changed(arg, lambda one: _to(one, kind, dtype)) for arg in args)


def _placed(args: Case, kind: str) -> Case:
    """The arguments on a device as they are; without values where it has no such dtype (MPS: float64)."""
    try:
        return _on(args, kind, None)
    except (TypeError, RuntimeError):
        return _on(args, "meta", None)


def _to(one: Tensor, kind: str, dtype: torch.dtype | None) -> Tensor:
    """A tensor on a device in a dtype with its very strides, gaps and broadcast axes included."""
    wanted = dtype if dtype is not None and one.is_floating_point() else one.dtype
    storage = one.untyped_storage()
    whole = torch.empty(0, dtype=one.dtype, device=one.device).set_(storage).to(kind, wanted)
    return whole.as_strided(one.shape, one.stride(), one.storage_offset())


def load(module: str, source: str) -> None:
    """Imports the module that registers an op, from its file where it is not to be found by name."""
    try:
        importlib.import_module(module)
    except ImportError:
        spec = importlib.util.spec_from_file_location(module, source)
        if spec is None or spec.loader is None:
            raise
        made = importlib.util.module_from_spec(spec)
        sys.modules[module] = made
        spec.loader.exec_module(made)


def main(work: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None] | None = None) -> int:
    """The process: takes jobs from stdin, one JSON line each, and answers with lines for whatever begins and
    ends. `work(job, tell)` does one (None: checks one implementation)."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not for the one who listens

    def tell(line: dict[str, Any]) -> None:
        lines.write(json.dumps(line) + "\n")
        lines.flush()

    for text in sys.stdin:
        try:
            (work or _work)(json.loads(text), tell)
        except (RuntimeError, MemoryError) as error:
            if "busy or unavailable" in str(error):  # a device that takes one process at a time
                tell({"end": True, "scarce": "of the device, which another process has"})
            elif device.is_out_of_memory(error):
                tell({"end": True, "scarce": "memory"})
            else:
                raise
        else:
            tell({"end": True})
    return 0


def _work(job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Checks one implementation, within the job's `limit_bytes` of the device where it has such; `tell` takes
    a line for each case that begins or ends."""
    load("_selftest_main" if job["module"] == "__main__" else job["module"], job["source"])
    op = OPS[job["op"]]
    name, kind = job["implementation"], job["kind"]
    implementation = next(i for i in op.implementations if i.name == name and i.device in (kind, "any"))
    tell({"started": True})
    dtype = getattr(torch, job["dtype"]) if job["dtype"] else None
    like = tuple(job["like"]) if job["like"] else None
    where = device.Device(kind)
    with device.capped(where, job.get("limit_bytes")):
        for case, in_dtype, found in check(
            op, implementation, kind, job["every"], dtype, like, job.get("threads")
        ):
            line: dict[str, Any] = {"case": case, "dtype": in_dtype}
            line.update({"begin": True} if found == BEGUN else {"problem": found})
            tell(line)
    device.synchronize(where)  # a fault that is still to come belongs to this one
    device.release_memory(where)  # nor does it keep from a model what it took


process = main
"""What a fork of another process runs (forks.py)."""


if __name__ == "__main__":
    sys.exit(process())
