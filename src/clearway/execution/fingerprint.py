"""What a captured graph has baked in of a module: its code, the addresses of its tensors, its adapters.

A graph reads weights where they lay at capture. So it holds while every module, forward and processor is the
same object and every weight lies where it lay; a change of weights in place is seen by it. Adapters put
numbers (scales, which are on) into the graph, hence a state of their own.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor, nn

Fingerprint = tuple[Any, ...]
_ADAPTER_FACTS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "use_dora")


def fingerprint(module: nn.Module | None) -> Fingerprint:
    """Equal for as long as a graph captured over `module` is sound; reads no values."""
    if module is None:
        return ()
    marks: list[Any] = []
    stack: list[nn.Module] = [module]
    while stack:
        held = stack.pop().__dict__
        marks.append(id(held))
        marks.append(held["training"])
        for name in ("forward", "processor", "_compiled_call_impl"):
            if name in held:
                marks.append(id(held[name]))
        marks.extend(map(_address, held["_parameters"].values()))
        marks.extend(map(_address, held["_buffers"].values()))
        stack.extend(child for child in held["_modules"].values() if child is not None)
    return tuple(marks)


def _address(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor class without memory of its own
        return id(tensor)


def adapter_state(module: nn.Module | None) -> str:
    """A hash of which adapters are on, at which scales and what of them is merged; "" without adapters."""
    if module is None:
        return ""
    digest = None
    for name, part in module.named_modules():
        if "scaling" in part.__dict__:
            digest = digest or hashlib.sha256()
            facts = [repr(part.__dict__.get(fact)) for fact in _ADAPTER_FACTS]
            digest.update("\0".join((name, *facts)).encode())
    return digest.hexdigest()[:16] if digest else ""
