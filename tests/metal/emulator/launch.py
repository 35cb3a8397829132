"""One dispatch: refuses what the real call refuses, fills the runtime's parameters, reads its report."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .arguments import Argument, bind, give_back
from .kernels import BUFFER, Kernel
from .report import CCounters, CFault, EmulatorError, Fault, Report, Traffic

MAX_THREADS = 1024  # of a threadgroup; a pipeline with many registers may allow fewer, which is not modelled
GROUP_BYTES = 32768
MAX_FAULTS = 32


class _Parameter(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("bytes", ctypes.c_size_t), ("element", ctypes.c_char))


class _Buffer(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("inside", ctypes.c_void_p))


class _Params(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_int32),
        ("shuffled", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("checked", ctypes.c_int32),
        ("max_faults", ctypes.c_int32),
        ("group_buffer_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("group_buffer_count", ctypes.c_int32),
        ("group_limit", ctypes.c_uint32),
        ("faults", ctypes.POINTER(CFault)),
        ("counters", ctypes.POINTER(CCounters)),
        ("traffic", ctypes.POINTER(ctypes.c_uint64)),
    )


@dataclass(frozen=True, slots=True)
class Mode:
    """How to emulate: in order, or drawn from `seed`; `checked`: every load and store."""

    seed: int | None = None
    checked: bool = False


def grid(arguments: Sequence[Any], threads: Any, group_size: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Threads and group size as the real call understands them, checked as it checks them."""
    if threads is None:
        first = next((a for a in arguments if isinstance(a, torch.Tensor)), None)
        threads = None if first is None else first.numel()
    total = _sizes(threads, "threads")
    if group_size is None:
        group = (min(total[0], MAX_THREADS), *(1,) * (len(total) - 1))
    else:
        group = _sizes(group_size, "group_size")
        if len(group) != len(total):
            raise RuntimeError(f"group_size {group} has not as many numbers as threads {total}")
    product = torch.Size(group).numel()
    if product > MAX_THREADS:
        raise ValueError(f"a threadgroup of {product} threads {group}; this kernel can have {MAX_THREADS}")
    if min(*total, *group) < 1:
        raise ValueError(f"threads {total} in groups of {group}: nothing to dispatch")
    return total, group


def _sizes(value: Any, name: str) -> tuple[int, ...]:
    sizes = (value,) if isinstance(value, int) else tuple(value or ())
    if not 1 <= len(sizes) <= 3:
        raise RuntimeError(f"Number of {name} is undefined or has wrong dimension: {value}")
    return sizes


def dispatch(
    library: ctypes.CDLL,
    kernel: Kernel,
    arguments: tuple[Any, ...],
    threads: tuple[int, ...],
    group: tuple[int, ...],
    casts: str | dict[int, str] | None,
    mode: Mode,
    group_buffers: Sequence[int] = (),
) -> Report:
    """Emulates the dispatch, copies results back, returns the report with its faults (raises none)."""
    bound = bind(arguments, casts)
    _match(library, kernel, bound)
    count = max(1, len(bound))
    pointers = (ctypes.c_void_p * count)(*(a.address for a in bound))
    buffers = (_Buffer * count)()
    for buffer, argument in zip(buffers, bound, strict=False):
        buffer.start, buffer.bytes = argument.address, argument.size
        buffer.inside = None if argument.inside is None else argument.inside.ctypes.data
    counters, faults = CCounters(), (CFault * MAX_FAULTS)()
    traffic = (ctypes.c_uint64 * (count * 4))()
    params = _Params(
        entry=ctypes.cast(library.msl_entry, ctypes.c_void_p).value,
        grid=(ctypes.c_uint32 * 3)(*threads, *(1,) * (3 - len(threads))),
        group=(ctypes.c_uint32 * 3)(*group, *(1,) * (3 - len(group))),
        arguments=pointers,
        buffers=buffers,
        buffer_count=len(bound),
        shuffled=mode.seed is not None,
        seed=(mode.seed or 0) + 1,
        checked=mode.checked,
        max_faults=MAX_FAULTS,
        group_buffer_bytes=(ctypes.c_uint64 * max(1, len(group_buffers)))(*group_buffers),
        group_buffer_count=len(group_buffers),
        group_limit=GROUP_BYTES,
        faults=faults,
        counters=ctypes.pointer(counters),
        traffic=traffic,
    )
    library.msl_run(ctypes.byref(params))
    found = [fault.read(str(library._name)) for fault in faults[: min(counters.faults, MAX_FAULTS)]]
    found += [Fault(kind, buffer=index, write=True) for index, kind in give_back(bound)]
    rows = [Traffic(*traffic[i * 4 : i * 4 + 4]) for i in range(len(bound))] if mode.checked else []
    return Report(
        kernel.host_name,
        threads,
        group,
        counters.groups,
        counters.barriers,
        counters.simd_ops,
        counters.matrix_ops,
        counters.divergent,
        counters.atomics,
        counters.group_bytes,
        tuple(found),
        tuple(rows),
    )


def _match(library: ctypes.CDLL, kernel: Kernel, bound: list[Argument]) -> None:
    """The emulator's own strictness: the real call checks neither number nor type of what it binds."""
    parameters = (_Parameter * 64)()
    library.msl_parameters(parameters)
    wanted = {index: parameters[at] for at, (source, index) in enumerate(kernel.bindings) if source == BUFFER}
    if sorted(wanted) != list(range(len(bound))):
        raise EmulatorError(
            f"{kernel.host_name} has arguments {sorted(wanted)}, the call brings {len(bound)} from 0 on"
        )
    for index, parameter in wanted.items():
        argument, element = bound[index], parameter.element.decode()
        name = f"{kernel.host_name}, argument {index}"
        if parameter.kind == 2 and argument.size < parameter.bytes:
            raise EmulatorError(f"{name}: {argument.size} bytes, the kernel reads {parameter.bytes}")
        integers = argument.letter.isdigit() and element.isdigit() and parameter.kind == 2
        if element not in ("?", argument.letter) and not integers:
            raise EmulatorError(f"{name}: elements of type {argument.letter}, the kernel reads {element}")
