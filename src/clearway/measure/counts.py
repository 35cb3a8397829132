"""Counts the arithmetic of a generation: FLOPs, bytes, operations and scalar reads, each where it ran.

FLOPs are those of torch's own formulas (`torch.utils.flop_counter`: a multiply-add is two) and of Clearway's
own operations. Bytes are what every operation must read and write at least once, were nothing kept in a
cache: views move nothing. Counting slows a run down, so what it counts is never what it times.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from clearway.measure.stages import patched
from clearway.ops.contract import Op

if TYPE_CHECKING:
    from clearway.measure.stages import Recorder

READ = "aten::_local_scalar_dense"
"""The operation that hands a number to the host, which on an accelerator waits for all work before it."""

ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_attention_math_for_mps",
)
"""Fused attention that torch's table of formulas lacks."""


@contextmanager
def counting(recorder: Recorder, kind: str) -> Iterator[Counting]:
    """Within it all that runs on a device of `kind` is added to the recorder's innermost span.

    On CUDA torch itself is asked for the operations that wait for the device; its setting and Python's
    warnings are as before afterwards. Elsewhere scalar reads and copies to the host are counted.
    """
    counts = Counting(recorder, kind)
    with patched(Op, "_run", counts.own), counts, _waits(recorder, kind):
        yield counts


@contextmanager
def _waits(recorder: Recorder, kind: str) -> Iterator[None]:
    """On CUDA: torch's own warnings of operations that wait for the device, counted as reads."""
    if kind != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():

        def heard(message: Warning | str, *_: Any, **__: Any) -> None:
            if recorder.stack and "synchroniz" in str(message):
                recorder.stack[-1].reads += 1

        warnings.simplefilter("always")
        warnings.showwarning = heard
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode beneath `counting`; `unknown` names foreign operations that have no formula."""

    watches = True  # changes nothing: networks run as they would without it

    def __init__(self, recorder: Recorder, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._kind = kind
        self._inside_own = False
        self.unknown: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside_own:
            return func(*args, **kwargs)
        packet, name = func._overloadpacket, func._schema.name
        if packet not in flop_registry and name not in ATTENTION and func.namespace == "aten":
            with self:  # linear, conv2d, attention …: what they are made of comes back here
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        span = self._recorder.stack[-1] if self._recorder.stack else None
        if span is None:
            return out
        if self._kind != "cuda" and (name == READ or self._kind != "cpu"):
            span.reads += _on(self._kind, args) and (name == READ or _on("cpu", out))
        moved = _moved(func, args, kwargs, out)
        span.bytes_moved += moved
        span.ops += moved > 0
        if packet in flop_registry:
            span.flops += int(flop_registry[packet](*args, **kwargs, out_val=out))
        elif name in ATTENTION:
            span.flops += _attention(*args[:3])
        elif func.namespace not in ("aten", "clearway") and moved:
            self.unknown[name] += 1
        return out

    def own(self, inner: Any) -> Any:
        """Clearway's own operations count what they state for themselves, whatever they are made of."""

        def run(op: Op, args: Any) -> Any:
            span = self._recorder.stack[-1] if self._recorder.stack else None
            if span is None or self._inside_own or op.flops is None or op.bytes_moved is None:
                return inner(op, args)
            span.flops += int(op.flops(*args))
            span.bytes_moved += int(op.bytes_moved(*args))
            span.ops += 1
            self._inside_own = True
            try:
                return inner(op, args)
            finally:
                self._inside_own = False

        return run


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """The two products of attention: q (…, L, E), k (…, S, E), v (…, S, D)."""
    return 2 * q[..., 0, 0].numel() * q.shape[-2] * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes read and written; 0 for a view, which is known by its sharing an input's memory."""
    given = _tensors(args) + _tensors(list(kwargs.values()))
    kept = {tensor.untyped_storage()._cdata for tensor in given}
    fresh = [tensor for tensor in _tensors(out) if tensor.untyped_storage()._cdata not in kept]
    in_place = func._schema.is_mutable
    if not fresh and not in_place:
        return 0
    written = fresh or _tensors(out)
    return sum(tensor.numel() * tensor.element_size() for tensor in given + written)


def _on(kind: str, value: Any) -> bool:
    """Whether the first tensor in `value` is on a device of `kind`."""
    found = _tensors(value)
    return bool(found) and found[0].device.type == kind
