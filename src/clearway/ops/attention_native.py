"""Attention on the CPU in C++ (attention.cpp), compiled on this machine where there is a compiler.

PyTorch's flash kernel for the CPU splits its work into products by MKL, a softmax and copies between them; in
small heads most of the time is the exponentials and what lies between. Here both products and the softmax of
a tile of queries are one function, whose scores stay in the first-level cache, with an exponential of a dozen
instructions.
Sources: those of attention.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from clearway.ops import _cpp, attention_torch, state

WIDEST = 256
"""The largest head: what a piece of work keeps then is about 1 MB."""
QUICKER_CAPABILITY, QUICKER_SIZE, QUICKER_SCORES = ("AVX2", "AVX512"), 80, 64 * 77
"""Preferred on such processors, in heads up to this size and from so many scores a head on. float32, torch
2.13.0+cpu, two threads, 2026-12-01, ms, sdpa and native. AMD EPYC, AVX2: 2x4x1024x1024x16 11.5, 6.5;
2x4x1024x77x16 1.13, 0.61; 2x4x64x64x24 0.088, 0.085; 2x8x1024x1024x40 35.5, 22.8; 2x8x256x256x80 5.4, 3.7.
Intel Xeon, AVX-512: 2.9, 2.0; 0.64, 0.23; 0.033, 0.034; 10.3, 8.3; 1.11, 1.10
(bench/results/<machine>/attention_cpu.jsonl)."""

_library = torch.library.Library("clearway", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("attention_native(Tensor q, Tensor k, Tensor v, float scale) -> Tensor")  # type: ignore[no-untyped-call]


def refuse(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> str | None:
    """What it does not take; metadata only."""
    reason = attention_torch.restricted_keys(q, k, v, is_causal, mask)
    if reason is not None:
        return reason
    if q.dtype != torch.float32:
        return f"inputs are {q.dtype}; it takes float32"
    if k.shape[3] != q.shape[3] or v.shape[2] != k.shape[2]:
        return "q and k, or k and v, do not belong together"
    if not k.shape[2]:
        return "there are no keys"
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"heads of {max(q.shape[3], v.shape[3])}; it takes up to {WIDEST}"
    return None


def preferred(q: Tensor, k: Tensor) -> bool:
    """Whether it was measured quicker than PyTorch's on processors like this one."""
    return (
        q.shape[-1] <= QUICKER_SIZE
        and q.shape[-2] * k.shape[-2] >= QUICKER_SCORES
        and torch.backends.cpu.get_cpu_capability() in QUICKER_CAPABILITY
    )


def run(q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None) -> Tensor:
    """The op, for what it does not refuse: one operation of PyTorch's dispatcher, which recorders see."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out: Tensor = torch.ops.clearway.attention_native.default(q, k, v, factor)
    return out


def ready() -> None:
    """Compiles or loads the kernel, once; BuildError where it cannot be had."""
    _function()


@functools.cache
def _function() -> Any:
    try:
        function = _cpp.library("attention").attention
    except AttributeError as error:
        raise state.BuildError("what attention.cpp was compiled to has no function of its name") from error
    function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_float)
    function.restype = ctypes.c_int
    return function


_Numbers = ctypes.c_int64 * 22


def _launch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Calls the kernel; MemoryError without any for its tiles, BuildError where it cannot be built."""
    function = _function()
    same = v.shape[3] == q.shape[3]
    out = torch.empty_like(q) if same else q.new_empty(*q.shape[:3], v.shape[3])
    q, k, v = (one if one.stride(3) == 1 else one.contiguous() for one in (q, k, v))
    made = out if out.stride(3) == 1 else q.new_empty(out.shape)
    tensors = q, k, v, made
    given = _Numbers(
        *(one.data_ptr() for one in tensors),
        *(*q.shape[:3], k.shape[2], q.shape[3], v.shape[3]),
        *(stride for one in tensors for stride in one.stride()[:3]),
    )
    if function(_cpp.parallel(), torch.get_num_threads(), given, scale * math.log2(math.e)):
        raise MemoryError("there was no memory for attention's tiles")
    return out if made is out else out.copy_(made)


_library.impl("attention_native", _launch, "CPU")  # type: ignore[no-untyped-call]
