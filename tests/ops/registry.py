"""The registry as tests loop over it, naming no op."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearway.ops import discover, selftest
from clearway.ops._implementation import Case, Implementation, refused, tensors
from clearway.ops.contract import OPS, Op

discover()
NAMES = sorted(name for name, op in OPS.items() if op.module.startswith("clearway."))


def small(op: Op) -> Iterator[tuple[str, Case]]:
    """The cases that are not large, every argument filled in."""
    for name, given in op.cases():
        if not callable(given):
            yield name, selftest.made(op, given)


def with_implementation(name: str) -> list[str]:
    """The ops that have an implementation called `name`."""
    return [op for op in NAMES if any(i.name == name for i in OPS[op].implementations)]


TRITON_TOO = (("attention", "gemm"), ("attention", "tiled"))
"""Implementations of other names that launch Triton kernels; they may refuse some small cases."""

PRODUCTS = ("grouped_linear",)
"""Ops whose "triton" has matrix products, which the interpreter gets wrong in bfloat16."""

GLUON = (("convolution", "gluon"), ("geglu_linear", "gluon"), ("upsample_conv", "gluon"))
"""Those in Gluon, for Hopper alone: compiled, never interpreted."""


def named(op: Op, name: str) -> Implementation:
    """The implementation called `name`."""
    return next(i for i in op.implementations if i.name == name)


def in_dtype(args: Case, dtype: torch.dtype) -> Case:
    """The arguments with every floating tensor in `dtype`, strides kept."""
    return selftest._on(args, "cpu", dtype)


def outputs(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What an op gives, as a tuple."""
    return out if isinstance(out, tuple) else (out,)


__all__ = [
    "GLUON",
    "NAMES",
    "OPS",
    "PRODUCTS",
    "TRITON_TOO",
    "in_dtype",
    "named",
    "outputs",
    "refused",
    "small",
    "tensors",
    "with_implementation",
]
