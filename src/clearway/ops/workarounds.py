"""What older PyTorch and macOS get wrong on MPS, the versions that need a way round it, and where that is
reported.

CLEARWAY_MPS_FORCE_LEGACY_OPS=1 (or the WebUI's A1111_MPS_FORCE_LEGACY_OPS=1) turns every one of them on
again. "No fix known" means that none was found in reports up to torch 2.15. Numbers are issues of
pytorch/pytorch unless another repository is named. None of this has run on a Mac yet.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearway import device, home

if TYPE_CHECKING:
    from torch import Tensor

FORCE = ("CLEARWAY_MPS_FORCE_LEGACY_OPS", "A1111_MPS_FORCE_LEGACY_OPS")
ENVIRONMENT = ("PYTORCH_MPS_PREFER_METAL", "PYTORCH_MPS_FAST_MATH")
"""What a measurement on this machine may set for torch, in environment.json of the tuned folder."""


@dataclass(frozen=True, slots=True)
class Workaround:
    """One fault and the way round it. Versions are torch's (major, minor): from `since` (None: always) up to
    but without `fixed` (None: no fix known); `macos` likewise the first macOS without it."""

    name: str
    symptom: str
    instead: str
    source: str
    since: tuple[int, int] | None = None
    fixed: tuple[int, int] | None = None
    macos: tuple[int, int] | None = None

    def applies(self, torch_version: tuple[int, int], macos_version: tuple[int, int] | None) -> bool:
        """Whether these versions need it; an unknown macOS counts as an old one."""
        old_torch = (self.since is None or torch_version >= self.since) and (
            self.fixed is None or torch_version < self.fixed
        )
        old_macos = self.macos is None or macos_version is None or macos_version < self.macos
        return old_torch and old_macos

    def versions(self) -> str:
        """The versions in words."""
        parts = []
        if self.since is not None:
            parts.append(f"from {self.since[0]}.{self.since[1]}")
        parts.append(f"before {self.fixed[0]}.{self.fixed[1]}" if self.fixed else "no fix known")
        if self.macos is not None:
            parts.append(f"macOS before {self.macos[0]}.{self.macos[1]}")
        return "torch " + ", ".join(parts)


TABLE = (
    Workaround(
        "causal attention",
        "is_causal in float16 and bfloat16 masks by four rows: later tokens leak",
        "refused; streaming or an explicit mask",
        "#195910, #174861",
        fixed=(2, 13),
    ),
    Workaround(
        "permuted attention",
        "wrong values for q, k and v that are permuted views, from heads of 64 on",
        "copied to contiguous ones",
        "#181133, fixed by #181151; before it #163597",
        fixed=(2, 13),
    ),
    Workaround(
        "attention with other values",
        "wrong shape where values are of another size than queries",
        "refused",
        "#176767, fixed by #176843",
        fixed=(2, 12),
    ),
    Workaround(
        "broadcast attention",
        "an error where q, k and v differ in batch or heads",
        "refused",
        "#189631 (open when read)",
    ),
    Workaround(
        "sigmas as tensors",
        "mps_tensor * cpu_table[i] reads element 0",
        "sigmas are Python numbers on every device",
        "#187117, #191929, #193057, fixed by #187229",
        fixed=(2, 14),
    ),
    Workaround(
        "layer_norm in float32",
        "wrong for float16 inputs with float32 weights, and for rows of small variance",
        "computed in float32 and converted back",
        "#190054, #190491, fixed by #190492",
        since=(2, 13),
        fixed=(2, 14),
    ),
    Workaround(
        "narrow with a copy",
        "what reads a slice ignores its storage offset",
        "the slice is cloned",
        "#94753, #131750, #133520 (2022 to 2024); the WebUI clones on every version",
        fixed=(2, 6),
    ),
    Workaround(
        "int64 cumsum on the CPU",
        "missing or wrong for int64",
        "computed on the CPU",
        "modules/mac_specific.py of AUTOMATIC1111/stable-diffusion-webui",
        macos=(13, 3),
    ),
    Workaround(
        "padding of rank 5",
        "constant padding of rank 5 with 65536 inner elements or more gives garbage",
        "the constant_pad op",
        "#194922, #194944, #195147",
        since=(2, 13),
        fixed=(2, 15),
    ),
    Workaround(
        "copies of gappy tensors",
        "a copy to the CPU between equal strides with gaps writes to wrong places",
        "made contiguous first",
        "#189961",
        since=(2, 13),
        fixed=(2, 14),
    ),
    Workaround(
        "2^31 elements",
        "an attention matrix of 2^31 elements or more is silently wrong",
        "refused; metal or streaming",
        "Comfy-Org/ComfyUI#14837, #197636, #149261",
    ),
    Workaround(
        "lerp with infinities",
        "NaN where an operand is infinite (the KDPM2 and IPNDM schedulers)",
        "sigmas are Python numbers on every device",
        "#111374, huggingface/diffusers#14368",
    ),
)
_BY_NAME = {entry.name: entry for entry in TABLE}


def forced() -> bool:
    """Whether the user turned every workaround on."""
    return any(os.environ.get(name, "") not in ("", "0") for name in FORCE)


def needed(name: str) -> bool:
    """Whether this machine's versions (or the user) call for the workaround; KeyError where there is none
    such."""
    return _applies(name) or forced()


@functools.cache
def _applies(name: str) -> bool:
    return _BY_NAME[name].applies(device.torch_version(), macos_version())


def macos_version() -> tuple[int, int] | None:
    """(major, minor) of macOS; None elsewhere."""
    parts = platform.mac_ver()[0].split(".")
    if not parts[0].isdigit():
        return None
    return int(parts[0]), int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0


def layer_norm(x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch.nn.functional.layer_norm, on MPS through float32 where that is needed."""
    from torch.nn import functional as F

    if x.device.type != "mps" or not needed("layer_norm in float32"):
        return F.layer_norm(x, shape, weight, bias, eps)
    weight, bias = (None if tensor is None else tensor.float() for tensor in (weight, bias))
    return F.layer_norm(x.float(), shape, weight, bias, eps).to(x.dtype)


def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """torch.narrow, on MPS a copy of its own where that is needed."""
    part = x.narrow(dim, start, length)
    return part.clone() if x.device.type == "mps" and needed("narrow with a copy") else part


def cumsum(x: Tensor, dim: int) -> Tensor:
    """torch.cumsum, on MPS through the CPU for whole numbers where that is needed."""
    if x.device.type == "mps" and not x.is_floating_point() and needed("int64 cumsum on the CPU"):
        return x.cpu().cumsum(dim).to(x.device)
    return x.cumsum(dim)


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Sets for torch what was measured faster on this machine; gives what it set.

    Only on Apple silicon, only before torch is imported (it reads these once), only names in ENVIRONMENT, and
    never over the user's own value. The measurement (environment.json in the tuned folder) names its torch.
    """
    if "torch" in sys.modules or platform.system() != "Darwin" or platform.machine() != "arm64":
        return {}
    found = home.read_json("tuned", "environment.json")
    values: Any = found.get("values")
    if not isinstance(values, dict) or found.get("torch") != _installed("torch"):
        return {}
    made = {
        name: value
        for name, value in values.items()
        if name in ENVIRONMENT and isinstance(value, str) and name not in environment
    }
    environment.update(made)
    return made


def _installed(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
