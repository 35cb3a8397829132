"""What an implementation of an op is, and the questions that are asked of it; see contract.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearway.ops import budget

_PLAIN = (Tensor, torch.nn.Parameter)
_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", bool)
_transformed: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)

Case = tuple[Any, ...]
"""Positional arguments of an op."""

Given = Case | Callable[[], Case]
"""A case as `cases()` gives it: arguments, or for large ones a function that makes them."""


@dataclass(frozen=True, slots=True)
class Promise:
    """How close to float64 an implementation stays: `factor` times eager's own error plus two ulps of the
    largest value (eager is exact where softmax has one key; a kernel that divides by its sum is not); or,
    where lower precision is the point, (rtol, atol) by dtype name."""

    factor: float = 3.0
    tolerances: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def able(*_: Any) -> None:
    return None


def always(*_: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Implementation:
    """One way to compute an op on devices of kind `device` ("any": all). `stock` ones are PyTorch itself,
    which needs no self-test. `made_by()` tells what builds it on this machine (a compiler) where a verdict
    holds for that alone. `peak(*args)` is what it may hold at most in bytes beside its output where that
    is worth a budget, and `materialises(*args)` whether it really does."""

    op: str
    name: str
    device: str
    run: Callable[..., Any]
    absent: Callable[[], str | None] = able
    refuse: Callable[..., str | None] = able
    stock: bool = False
    differentiable: bool = False
    peak: Callable[..., float] | None = None
    materialises: Callable[..., bool] = always
    sources: tuple[Path, ...] = ()
    made_by: Callable[[], str] = str

    def source_hash(self) -> str:
        """Changes whenever a file this implementation is made of does, or what it is made by."""
        digest = hashlib.sha256(self.made_by().encode())
        for path in self.sources:
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one implementation for one set of arguments; `reason` says why not, or on which
    condition."""

    implementation: str
    taken: bool
    reason: str


def tensors(args: Case) -> Iterator[Tensor]:
    """The tensors among the arguments, those in lists too."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list):
            yield from (one for one in arg if isinstance(one, Tensor))


def changed(arg: Any, change: Callable[[Tensor], Any]) -> Any:
    """An argument with `change` applied to what tensors there are in it."""
    if isinstance(arg, list):
        return [changed(one, change) for one in arg]
    return change(arg) if isinstance(arg, Tensor) else arg


def needs_gradient(args: Case) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors(args))


def refused(implementation: Implementation, args: Case) -> str | None:
    """Why an implementation cannot take these arguments: the rules for every kernel of our own, then its
    own."""
    if not implementation.stock:
        if _transformed() or forward_ad._current_level >= 0:
            return "a transform of torch.func or forward differentiation is at work"
        if _autocast():
            return "torch.autocast is at work, which chooses dtypes operation by operation"
        device = args[0].device
        gradient = torch.is_grad_enabled() and not implementation.differentiable
        for tensor in tensors(args):
            if type(tensor) not in _PLAIN:
                return f"{type(tensor).__name__} is a tensor class of its own"
            if gradient and tensor.requires_grad:
                return "a gradient is needed and it gives none"
            if tensor.device != device:
                return f"the arguments lie on {device} and {tensor.device}"
            if not tensor.numel():
                return "an argument is empty"
    return implementation.refuse(*args)


def over_budget(implementation: Implementation, args: Case, device: torch.device) -> str | None:
    """Why an implementation would need more memory on `device` than there is for it, if nobody named it."""
    if implementation.peak is None:
        return None
    peak = implementation.peak(*args)
    sample = budget.current(device)
    if peak <= sample.limit_bytes:
        if peak > sample.largest_admitted:
            sample.largest_admitted = peak
        return None
    return sample.sentence(peak) if implementation.materialises(*args) and not sample.admits(peak) else None


def laid_out(out: Any, reference: Callable[..., Any], args: Case) -> Any:
    """`out` with the strides that torch.compile was promised: stock implementations choose their own."""
    signs = (changed(arg, lambda one: (one.shape, one.stride(), one.dtype)) for arg in args)
    key = (reference, *map(repr, signs))
    promised = _promised.get(key)
    if promised is None:
        if len(_promised) >= 1024:
            _promised.clear()
        promised = _promised[key] = reference(*(changed(arg, _meta) for arg in args))
    if isinstance(out, tuple):
        return tuple(_strided(one, like) for one, like in zip(out, promised, strict=True))
    return _strided(out, promised)


_promised: dict[tuple[Any, ...], Any] = {}


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _strided(out: Tensor, like: Tensor) -> Tensor:
    if same_layout(out, like):
        return out
    return torch.empty_strided(like.shape, like.stride(), dtype=out.dtype, device=out.device).copy_(out)


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same strides where it matters: along axes longer than 1."""
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or mine == yours for size, mine, yours in steps) or not one.numel()
