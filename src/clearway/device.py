"""The machine: which device, how much memory, how to wait for it. No other file asks torch about it."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearway.errors import RequestError, UnavailableError
from clearway.types import MIXED, Precision

if TYPE_CHECKING:
    import torch

KINDS = ("cuda", "mps", "xpu", "cpu")
DTYPES = ("float32", "float16", "bfloat16")
MPS_MINIMUM = (2, 13)  # scaled_dot_product_attention(is_causal=True) is wrong on MPS before
CONTEXT_BYTES = 8 * 2**30 // 10
"""What a process takes of a CUDA device beside its tensors: context, kernels, libraries. 0.77 GiB were
measured on an H200 (torch 2.11, cu130; bench/results/nvidia-h200/memory.jsonl, `outside_allocator_bytes`)."""

_limit: ContextVar[int | None] = ContextVar("clearway_memory_limit", default=None)


@dataclass(frozen=True, slots=True)
class Device:
    """One device; `str()` gives torch's name for it, which every torch call takes."""

    kind: str
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; on the CPU and on MPS of the machine, on CUDA of the device."""

    total_bytes: int
    available_bytes: int


def pick(name: str | None = None) -> Device:
    """The device called `name` ("cuda", "cuda:1", "mps", "cpu"; None or "auto": the best one here).

    Raises RequestError for a name that is none, UnavailableError for a device this machine lacks.
    """
    if name in (None, "auto"):
        for kind in KINDS:
            if absent(kind) is None:
                return Device(kind, 0 if kind == "cuda" else None)
    assert name is not None
    kind, _, number = name.partition(":")
    if kind not in KINDS or (number and not number.isdigit()):
        raise RequestError(f"device {name!r} is not known; it is one of auto, {', '.join(KINDS)} (or cuda:1)")
    reason = absent(kind)
    if reason:
        raise UnavailableError(
            f"device {name} was asked for and cannot be used: {reason}; --device cpu works"
        )
    index = int(number) if number else (0 if kind == "cuda" else None)
    if kind == "cuda":
        import torch

        count = torch.cuda.device_count()
        if index is not None and index >= count:
            raise UnavailableError(
                f"device {name} was asked for and this machine has {count} CUDA device(s), counted from 0"
            )
    return Device(kind, index)


def absent(kind: str) -> str | None:
    """Why this machine has no usable device of `kind`; None where it has one."""
    import torch

    if kind == "cpu":
        return None
    if kind == "cuda":
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} was built without CUDA"
        return None if torch.cuda.is_available() else "no CUDA device or driver answers"
    if kind == "mps":
        if not torch.backends.mps.is_built():
            return f"torch {torch.__version__} was built without MPS (Apple silicon)"
        if not torch.backends.mps.is_available():
            return "MPS needs Apple silicon and macOS 14 or later"
        if torch_version() < MPS_MINIMUM:
            return (
                f"MPS needs torch 2.13 or later (causal attention is wrong before), found {torch.__version__}"
            )
        return None
    if not (hasattr(torch, "xpu") and torch.xpu.is_available()):
        return "no Intel GPU answers"
    return None


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


def default_precision(device: Device) -> Precision:
    """The dtypes that are safe and quick on `device`: half precision on GPUs, with a float32 VAE."""
    if device.kind == "cuda":
        import torch

        half = "float16" if torch.cuda.get_device_capability(device.index or 0) >= (7, 0) else "float32"
        return Precision(unet=half, text_encoder=half, vae="float32", sampling="float32")
    if device.kind == "mps":  # no sampling upcast by default: a trade-off, hence recorded in the picture
        return Precision(unet="float16", text_encoder="float16", vae="float32", sampling="float16")
    if device.kind == "xpu":
        return Precision(unet="float16", text_encoder="float16", vae="float32", sampling="float32")
    return Precision()


def dtype(name: str) -> torch.dtype:
    """torch's dtype called `name`; RequestError where it is none of the supported ones."""
    import torch

    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    found = names.get(name, name)
    if found not in DTYPES:
        raise RequestError(f"dtype {name!r} is not known; it is one of {', '.join(DTYPES)}")
    value: torch.dtype = getattr(torch, found)
    return value


def dtype_for(part: str, name: str) -> str:
    """torch's own name of a part's dtype ("fp16" is "float16"), for a VAE "mixed" too.

    `part` is a field of Precision. Raises RequestError for a name that this part does not take.
    """
    if name == MIXED and part == "vae":
        return name
    if name == MIXED:
        raise RequestError(
            f"dtype 'mixed' is the VAE's alone; {_PARTS[part]} takes {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
        )
    return str(dtype(name)).removeprefix("torch.")


_PARTS = {"unet": "the UNet", "text_encoder": "a text encoder", "sampling": "the sampling loop"}


def memory(device: Device) -> Memory:
    """What the device has and has free now, in bytes; within `capped` no more than its limit leaves."""
    if device.kind == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device.index or 0)
        limit = _limit.get()
        if limit is None:
            return Memory(total, free)
        left = max(limit - CONTEXT_BYTES - held(device).reserved_bytes, 0)
        return Memory(min(total, limit), min(free, left))
    try:
        import psutil
    except ImportError:
        page = os.sysconf("SC_PAGE_SIZE")
        return Memory(page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES"))
    now = psutil.virtual_memory()
    return Memory(now.total, now.available)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that torch's allocator has of the device, and those of them that tensors use."""

    reserved_bytes: int = 0
    allocated_bytes: int = 0


def held(device: Device) -> Held:
    """What this process's tensors and allocator hold of a CUDA device now; nothing on others."""
    if device.kind != "cuda":
        return Held()
    import torch

    try:
        found = torch.cuda.memory_stats_as_nested_dict(device.index)
        return Held(found["reserved_bytes"]["all"]["current"], found["allocated_bytes"]["all"]["current"])
    except KeyError:  # before anything was allocated
        return Held()


def room(device: Device) -> int:
    """Bytes that tensors made from now on may take: what is free, and what the allocator keeps unused.

    Negative where a cap is below what tensors hold already.
    """
    if device.kind != "cuda":
        return memory(device).available_bytes
    import torch

    now, index = held(device), device.index or 0
    found = torch.cuda.mem_get_info(index)[0] + now.reserved_bytes
    limit, fraction = _limit.get(), torch.cuda.get_per_process_memory_fraction(index)
    if limit is not None:
        found = min(found, limit - CONTEXT_BYTES)
    if fraction < 1:  # somebody's own cap, which the driver does not tell
        total = torch.cuda.get_device_properties(index).total_memory
        found = min(found, int(total * fraction))
    return found - now.allocated_bytes


@contextmanager
def capped(device: Device, limit_bytes: int | None) -> Iterator[None]:
    """Within it a CUDA device is one of `limit_bytes`: `memory` says so, and torch's allocator keeps to it.

    The limit is this process's, its context of about 0.8 GiB included. None, or another kind of device,
    changes nothing.
    """
    if limit_bytes is None or device.kind != "cuda":
        yield
        return
    import torch

    index = device.index or 0
    total = torch.cuda.get_device_properties(index).total_memory
    before = torch.cuda.get_per_process_memory_fraction(index)
    fraction = min(max(limit_bytes - CONTEXT_BYTES, 0) / total, before)
    token = _limit.set(limit_bytes)
    torch.cuda.set_per_process_memory_fraction(fraction, index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, index)
        _limit.reset(token)


def synchronize(device: Device) -> None:
    """Waits until the device has done what was asked of it. Never call this inside the sampling loop."""
    import torch

    if device.kind == "cuda":
        torch.cuda.synchronize(device.index)
    elif device.kind == "mps":
        torch.mps.synchronize()
    elif device.kind == "xpu":
        torch.xpu.synchronize()


def mark(device: Device) -> Any:
    """This point in what a CUDA device has been asked to do, for `between`."""
    import torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(str(device)))
    return event


def between(first: Any, last: Any) -> float:
    """Seconds that the device took from one mark to a later one; waits until it has come to that."""
    last.synchronize()
    milliseconds: float = first.elapsed_time(last)
    return milliseconds / 1000


def to_device(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    """A CPU tensor on `device`; on CUDA by way of pinned memory, for which the host does not wait."""
    if device.kind == "cuda":
        return tensor.pin_memory().to(str(device), non_blocking=True)
    return tensor.to(str(device))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in ordinary host memory; on CUDA by way of pinned memory, and the host waits for this copy.

    What is given keeps no pinned memory.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    import torch

    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.device(tensor.device):
        pinned.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        arrived.synchronize()
    return pinned.clone()


def release_memory(device: Device) -> None:
    """Gives cached, unused device memory back to the system."""
    import torch

    if device.kind == "cuda":
        torch.cuda.empty_cache()
    elif device.kind == "mps":
        torch.mps.empty_cache()


def noise_device(device: Device, rng: str) -> str:
    """Where noise is made: the WebUI's "GPU" is the device itself, but the CPU on MPS; "NV" is the CPU, as an
    NVIDIA GPU would make it."""
    if rng == "NV":
        return "philox"
    return "cpu" if rng == "CPU" or device.kind == "mps" else str(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a torch error (or MemoryError) says that memory ran out."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in (
            "out of memory",
            "can't allocate memory",
            "not enough memory",
            "invalid buffer size",
            "status_alloc_failed",  # cuBLAS, cuDNN
            "allocation_failed",  # cuDNN from 9 on
        )
    )


@contextmanager
def tf32(device: Device, allowed: bool) -> Iterator[None]:
    """Within it CUDA float32 matmuls and convolutions may (or may not) use TF32; afterwards as before."""
    if device.kind != "cuda":
        yield
        return
    import torch

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


SWITCHING = threading.RLock()
"""Held while attention's backends, which are the process's, are other than the caller's for one call; and
while the program forks, whose copy would have them so for good."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=SWITCHING.acquire, after_in_parent=SWITCHING.release, after_in_child=SWITCHING.release
    )


def switches() -> tuple[Any, ...]:
    """What of PyTorch decides which kernels run: TF32, sums in half precision, determinism, cuDNN, the
    library of products, attention's backends and their order, and its attention itself (others put theirs in
    its place).

    A captured graph has them baked in. About 10 µs.
    """
    import torch

    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    with SWITCHING:
        backends = (
            cuda.cudnn_sdp_enabled(),
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
        )
    return (
        cuda.matmul.fp32_precision == "tf32",  # allow_tf32 raises where somebody used the newer switches
        cudnn.conv.fp32_precision == "tf32",
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        getattr(cuda.matmul, "allow_fp16_accumulation", None),
        torch._C._get_blas_preferred_backend(),
        torch.are_deterministic_algorithms_enabled(),
        cudnn.enabled,
        cudnn.deterministic,
        *backends,
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        tuple(torch._C._get_sdp_priority_order()),
        torch.nn.functional.scaled_dot_product_attention,
    )


def machine() -> dict[str, Any]:
    """What `doctor` and evidence say of the machine: names and versions, nothing private."""
    import importlib.metadata as metadata

    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("diffusers", "transformers", "safetensors", "tokenizers", "torchsde", "triton"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    now = memory(Device("cpu"))
    return {
        "system": f"{platform.system()} {platform.release()}",
        "macos": platform.mac_ver()[0] or None,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": now.total_bytes,
        "versions": versions,
    }


def describe(device: Device) -> str:
    """The device's product name with its memory."""
    if device.kind == "cuda":
        import torch

        card = torch.cuda.get_device_properties(device.index or 0)
        return f"{card.name}, {card.total_memory / 2**30:.0f} GiB, compute {card.major}.{card.minor}"
    return f"{_processor()}, {memory(Device('cpu')).total_bytes / 2**30:.0f} GiB"


def _processor() -> str:
    if sys.platform == "linux":
        try:
            with open("/proc/cpuinfo", encoding="utf-8") as file:
                for line in file:
                    if line.startswith("model name"):
                        return line.split(":", 1)[1].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()


def identity(kind: str) -> str:
    """Device, driver, torch and kernel language: what a kernel's verdict on this machine depends on."""
    import importlib.util

    import torch

    parts = [kind, f"torch {torch.__version__}"]
    if kind == "cuda" and torch.cuda.is_available():
        import importlib.metadata as metadata

        parts.append(torch.cuda.get_device_name(0))
        parts.append(f"driver {nvidia_driver()}")
        if importlib.util.find_spec("triton"):
            parts.append(f"triton {metadata.version('triton')}")
    elif kind == "mps":
        parts += [_processor(), f"macOS {platform.mac_ver()[0]}"]
    else:
        parts.append(_processor())
    return ", ".join(parts)


def nvidia_driver() -> str:
    """The NVIDIA driver's version ("580.159.04") from the driver's own management library; else "unknown"."""
    import ctypes

    text = ctypes.create_string_buffer(96)
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        failed = library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text))
    except (OSError, AttributeError):
        return "unknown"
    return "unknown" if failed else text.value.decode("ascii", "replace")
