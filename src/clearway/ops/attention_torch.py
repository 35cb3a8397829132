"""PyTorch's own attention: its choice, and each backend alone with its real limits.

A caller's own choice of backends (torch.nn.attention.sdpa_kernel, or torch.backends.cuda's switches) is kept:
a backend that is switched off is refused, and what is not PyTorch's steps back. What PyTorch makes of NaN is
its own: its flash kernel for the CPU (2.13.0) gives zeros for a query that holds one, where math and
`streaming` give NaN.
Sources: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h; the issues named below.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda as switches
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from clearway import device
from clearway.ops import workarounds

HALF = (torch.float16, torch.bfloat16)
INT32 = 2**31
MPS_OWN_SIZES = (32, 64, 72, 80, 96, 128, 256)
"""Heads with a Metal kernel of PyTorch's own from 2.13 on; others go through MPSGraph, which holds the
scores."""

CUDNN_MASK = "there is a mask, where cuDNN gives values to rows that read nothing (torch 2.11, H200)"
"""0.988 instead of 0 in the case "a row without keys", float16 and bfloat16: bench/results/nvidia-h200."""

PADDED: dict[tuple[str, int], int] = {}
"""(backend, head size) -> the size it is padded to with zeros, for heads that the backend refuses. An entry
needs a measurement in which padding beats every implementation that takes the size as it is; there is none
yet."""

_SWITCHES: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "cudnn": (switches.cudnn_sdp_enabled, switches.enable_cudnn_sdp),
    "flash": (switches.flash_sdp_enabled, switches.enable_flash_sdp),
    "efficient": (switches.mem_efficient_sdp_enabled, switches.enable_mem_efficient_sdp),
    "math": (switches.math_sdp_enabled, switches.enable_math_sdp),
}
_flash_is_on, _efficient_is_on, _math_is_on = (_SWITCHES[name][0] for name in ("flash", "efficient", "math"))
_CAN_USE = {
    "cudnn": switches.can_use_cudnn_attention,
    "flash": switches.can_use_flash_attention,
    "efficient": switches.can_use_efficient_attention,
}


def run(q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None) -> Tensor:
    """PyTorch's own choice."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)


def refuse(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> str | None:
    """What PyTorch does not take on any device."""
    if is_causal and mask is not None:
        return "a mask together with is_causal; PyTorch takes one of them"
    return None


def refuse_cuda(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> str | None:
    """What PyTorch's own choice on CUDA would give to cuDNN and gets wrong there, unless the caller chose."""
    if mask is not None and q.is_cuda and not is_causal and not restricted():
        choice = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
        if choice == SDPBackend.CUDNN_ATTENTION.value:
            return f"PyTorch would take cuDNN, and {CUDNN_MASK}"
    return refuse(q, k, v, scale, is_causal, mask)


def run_mps(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> Tensor:
    """PyTorch's own choice on MPS, past what its older versions get wrong."""
    if workarounds.needed("permuted attention"):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return run(q, k, v, scale, is_causal, mask)


def refuse_mps(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> str | None:
    """What PyTorch gets wrong on MPS, silently."""
    if is_causal and workarounds.needed("causal attention"):
        return "causal attention leaks later tokens on MPS before torch 2.13 (pytorch#195910)"
    if v.shape[-1] != q.shape[-1] and workarounds.needed("attention with other values"):
        return "values of another size than queries get a wrong shape before torch 2.12 (pytorch#176767)"
    if q.shape[:-2] != k.shape[:-2] and workarounds.needed("broadcast attention"):
        return "q, k and v differ in batch or heads, which MPS does not broadcast (pytorch#189631)"
    scores = q.numel() // max(q.shape[-1], 1) * k.shape[-2]
    if scores >= INT32 and materialises_mps(q, k, v, scale, is_causal, mask):
        return "its scores would have 2^31 elements or more, which MPS corrupts (Comfy-Org/ComfyUI#14837)"
    return refuse(q, k, v, scale, is_causal, mask)


def materialises(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> bool:
    """Whether PyTorch would take its math backend, which holds the scores; not where the caller chose it."""
    if restricted():
        return False
    if q.device.type == "meta":  # to explain a shape for a device that may not be here
        return q.dtype not in (*HALF, torch.float32) or q.shape[-1] % 4 != 0
    choice = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    return choice == SDPBackend.MATH.value


def materialises_mps(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> bool:
    """Whether PyTorch would go through MPSGraph, which holds the scores."""
    if restricted():
        return False
    fused = q.shape[-1] in MPS_OWN_SIZES and v.shape[-1] == q.shape[-1]
    return not (fused and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1) or _needs_gradient(q, k, v)


def restricted() -> str | None:
    """Says that the caller chose among PyTorch's backends itself."""
    if _flash_is_on() and _efficient_is_on() and _math_is_on():
        return None
    return "the caller chose PyTorch's backends (sdpa_kernel)"


def unequal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why q, k and v do not go together for a kernel that neither broadcasts nor converts."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} axes; it takes (B, N, L, E)"
    if not (q.dtype == k.dtype == v.dtype):
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; it takes one dtype"
    if q.shape[:2] != k.shape[:2] or q.shape[:2] != v.shape[:2]:
        return "q, k and v differ in batch or heads (grouped queries, or a batch that is not expanded)"
    return None


def restricted_keys(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None) -> str | None:
    """Why a kernel of ours that reads every key does not take these: a mask, `restricted` or `unequal`."""
    if mask is not None or is_causal:
        return "there is a mask" if mask is not None else "it is causal; it reads every key"
    return restricted() or unequal(q, k, v)


def capability(tensor: Tensor) -> tuple[int, int] | None:
    """Compute capability of the CUDA device a tensor lies on; None on others."""
    return _capability(tensor.get_device()) if tensor.is_cuda and torch.version.hip is None else None


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@contextmanager
def switched(choose: Callable[[dict[str, bool]], dict[str, bool]]) -> Iterator[None]:
    """Within it PyTorch has those backends that `choose` makes, by name, of the ones that are on. The same
    switches as sdpa_kernel, at a fifth of its time; they are the process's, so one thread at a time."""
    with device.SWITCHING:
        before = {name: is_on() for name, (is_on, _) in _SWITCHES.items()}
        for name, on in choose(before).items():
            _SWITCHES[name][1](on)
        try:
            yield
        finally:
            for name, (_, switch) in _SWITCHES.items():
                switch(before[name])


def only(backend: str) -> AbstractContextManager[None]:
    """Within it PyTorch has one backend."""
    return switched(lambda on: {name: name == backend for name in on})


def _without_cudnn(on: dict[str, bool]) -> dict[str, bool]:
    others = any(on[name] for name in on if name != "cudnn")
    return {**on, "cudnn": on["cudnn"] and not others}


class WithoutCudnn(TorchFunctionMode):
    """Within it attention that this thread asks PyTorch for is not cuDNN's, where the caller left other
    backends: for a few tokens, for which it takes long to make ready."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One of PyTorch's functions, as it is called."""
        if function is not F.scaled_dot_product_attention or torch.compiler.is_compiling():
            return function(*args, **(kwargs or {}))
        with switched(_without_cudnn):
            return function(*args, **(kwargs or {}))


def _alone(backend: str) -> Callable[..., Tensor]:
    def run_backend(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
    ) -> Tensor:
        size, value_size = q.shape[-1], v.shape[-1]
        padded = PADDED.get((backend, size))
        if padded is not None:
            scale = 1 / math.sqrt(size) if scale is None else scale
            q, k = F.pad(q, (0, padded - size)), F.pad(k, (0, padded - size))
            v = F.pad(v, (0, padded - value_size))
        with only(backend):
            out = run(q, k, v, scale, is_causal, mask)
        return out if padded is None else out[..., :value_size]

    return run_backend


def _limits(backend: str) -> Callable[..., str | None]:
    is_on = _SWITCHES[backend][0]
    limits = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient}.get(backend)

    def refuse_backend(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
    ) -> str | None:
        if not is_on():
            return f"PyTorch's {backend} backend is switched off by the caller"
        reason = refuse(q, k, v, scale, is_causal, mask)
        if reason or limits is None:
            return reason
        reason = unequal(q, k, v)
        if reason:
            return reason
        size = PADDED.get((backend, q.shape[-1]), q.shape[-1])
        if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
            return "the last axis of q, k or v is not contiguous"
        reason = limits(q, v, size, is_causal, mask)
        if reason or not q.is_cuda or size != q.shape[-1]:
            return reason
        params = switches.SDPAParams(q, k, v, mask, 0.0, is_causal, False)
        return None if _CAN_USE[backend](params) else f"PyTorch says its {backend} backend cannot take these"

    return refuse_backend


def _flash(q: Tensor, v: Tensor, size: int, is_causal: bool, mask: Tensor | None) -> str | None:
    if q.dtype not in HALF:
        return f"inputs are {_name(q)}, it takes float16 or bfloat16"
    if mask is not None:
        return "there is a mask"
    if v.shape[-1] != q.shape[-1] or size > 256:
        return f"heads of {q.shape[-1]} and {v.shape[-1]}; it takes equal ones up to 256"
    return _older_than(q, (8, 0))


def _cudnn(q: Tensor, v: Tensor, size: int, is_causal: bool, mask: Tensor | None) -> str | None:
    if q.dtype not in HALF:
        return f"inputs are {_name(q)}, it takes float16 or bfloat16"
    if mask is not None:
        return CUDNN_MASK
    if size % 8 or v.shape[-1] % 8 or size > 256:
        return f"heads of {q.shape[-1]} and {v.shape[-1]}; it takes a multiple of 8 up to 128 (on Hopper 256)"
    if _needs_gradient(q, v):
        return "a gradient is needed, and its gradients can be NaN since torch 2.11 (pytorch#196678)"
    found = capability(q)
    if found is not None and found[0] == 10:
        return "it is silently wrong on compute capability 10 (pytorch#193893)"
    return _older_than(q, (8, 0))


def _efficient(q: Tensor, v: Tensor, size: int, is_causal: bool, mask: Tensor | None) -> str | None:
    if q.dtype not in (*HALF, torch.float32):
        return f"inputs are {_name(q)}, it takes float32, float16 or bfloat16"
    multiple = 8 if q.dtype in HALF else 4
    if size % multiple or v.shape[-1] % multiple:
        return f"heads of {q.shape[-1]} and {v.shape[-1]}; it takes a multiple of {multiple} in {_name(q)}"
    return _older_than(q, (8, 0)) if q.dtype == torch.bfloat16 else None


def _older_than(q: Tensor, needed: tuple[int, int]) -> str | None:
    found = capability(q)
    if found is None or found >= needed:
        return None
    return f"this device has compute capability {found[0]}.{found[1]}, it needs {needed[0]}.{needed[1]}"


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


REFUSE = {name: _limits(name) for name in _SWITCHES}
RUN = {name: _alone(name) for name in _SWITCHES}
