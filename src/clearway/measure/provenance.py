"""Where a result comes from: device, driver, builds, settings and commit; no host, user or path."""

from __future__ import annotations

import datetime
import functools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from clearway import __version__
from clearway import device as machine
from clearway.device import Device

# settings by environment that change what runs; by name, so that nothing private is swept up
ENVIRONMENT = (
    "CLEARWAY_MPS_FORCE_LEGACY_OPS",
    "CLEARWAY_SELFTEST",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTORCH_MPS_FAST_MATH",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    "PYTORCH_MPS_PREFER_METAL",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def provenance(device: Device, **settings: Any) -> dict[str, Any]:
    """The machine, builds and settings behind a result on `device`, as JSON values.

    `settings` (dtypes, compiler settings) is stored with the environment variables of `ENVIRONMENT` that are
    set. `memory_bytes` is the device's own on CUDA, else the machine's. `commit` and `dirty` are None where
    neither a checkout nor CLEARWAY_COMMIT tells. Date and time are UTC.
    """
    import torch

    about = machine.machine()
    versions = about["versions"]
    commit, dirty = _commit()
    return {
        "machine": slug(device),
        "device": machine.describe(device),
        "kind": device.kind,
        "driver": _driver(device),
        "os": f"macOS {about['macos']}" if about["macos"] else _system(about["system"]),
        "cores": about["cores"],
        "threads": about["threads"],
        "memory_bytes": machine.memory(device).total_bytes,
        "python": versions["python"],
        "torch": torch.__version__,
        "torch_channel": channel(torch.__version__),
        "torch_commit": torch.version.git_version,
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": versions.get("triton"),
        "diffusers": versions.get("diffusers"),
        "transformers": versions.get("transformers"),
        "clearway": __version__,
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "settings": {
            **settings,
            "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        },
    }


def slug(device: Device) -> str:
    """A folder's name for the machine: "nvidia-h200", "apple-m1", "intel-xeon-2-cores"."""
    if device.kind in ("cuda", "xpu"):
        import torch

        return _slug(getattr(torch, device.kind).get_device_name(str(device)))
    about = machine.machine()
    name = re.sub(r"\((R|TM|C)\)|\b(CPU|Processor)\b|@.*", " ", about["processor"], flags=re.IGNORECASE)
    return _slug(name if device.kind == "mps" else f"{name} {about['cores']} cores")


def channel(version: str) -> str:
    """ "release", "candidate", "nightly" or "source", from torch's version.

    A candidate from PyTorch's test index carries the release's own version: only `torch_commit` tells them
    apart.
    """
    public, _, local = version.partition("+")
    if ".dev" in public:
        return "nightly"
    if "rc" in public:
        return "candidate"
    return "source" if re.search(r"\d(a|b)\d", public) or local.startswith("git") else "release"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def _system(name: str) -> str:
    """The system with its release's numbers only: what follows them can name a company or a machine."""
    return re.sub(r"([\d.]*\d).*", r"\1", name)


def _driver(device: Device) -> str | None:
    if device.kind == "cuda":
        return machine.nvidia_driver()
    return f"macOS {machine.machine()['macos']}" if device.kind == "mps" else None


@functools.cache
def _commit() -> tuple[str | None, bool | None]:
    """(commit, whether the package's own files differ from it), where git keeps this very package.

    CLEARWAY_COMMIT, as `git describe --always --dirty` gives it, comes first: a copy of a tree on another
    machine may carry another history.
    """
    told = os.environ.get("CLEARWAY_COMMIT")
    if told:
        return told.removesuffix("-dirty"), told.endswith("-dirty")
    package = Path(machine.__file__).parent
    if _git(package, "ls-files", "--error-unmatch", "device.py") is not None:
        commit, changes = (
            _git(package, "rev-parse", "HEAD"),
            _git(package, "status", "--porcelain", "--", "."),
        )
        if commit:
            return commit, None if changes is None else changes != ""
    return None, None


def _git(folder: Path, *words: str) -> str | None:
    """What git answers; None where it cannot or will not."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
