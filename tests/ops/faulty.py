"""An op whose implementations are wrong on purpose, each in its own way; the last two are sound."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from clearway.ops.contract import Case, op
from clearway.ops.state import BuildError


def cases() -> Iterator[tuple[str, Case]]:
    generator = torch.Generator().manual_seed(0)
    yield "wide", (torch.randn(3, 64, generator=generator),)
    yield "ragged", (torch.randn(5, 33, generator=generator),)
    yield "transposed", (torch.randn(7, 4, generator=generator).t(),)


def refusals() -> Iterator[tuple[str, str, Case]]:
    yield "takes_all", "one axis", (torch.ones(3),)


@op(cases=cases, refusals=refusals, compile="inline")
def faulty_double(x: Tensor) -> Tensor:
    """Twice x."""
    return x * 2


@faulty_double.implementation("aborts", device="cpu")
def _aborts(x: Tensor) -> Tensor:
    os.abort()


@faulty_double.implementation("hangs", device="cpu")
def _hangs(x: Tensor) -> Tensor:
    if os.environ.get("CLEARWAY_SELFTEST"):
        time.sleep(3600)
    return x * 2


@faulty_double.implementation("leaves_quietly", device="cpu")
def _leaves_quietly(x: Tensor) -> Tensor:
    os._exit(0)


@faulty_double.implementation("green", device="cpu")
def _green(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@faulty_double.implementation("leaves_a_tail", device="cpu")
def _leaves_a_tail(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[..., :-1] = x[..., :-1] * 2
    return out


@faulty_double.implementation("changes_inputs", device="cpu")
def _changes_inputs(x: Tensor) -> Tensor:
    return x.mul_(2).clone()


@faulty_double.implementation("other_layout", device="cpu")
def _other_layout(x: Tensor) -> Tensor:
    return (x * 2).t().contiguous().t()


@faulty_double.implementation("does_not_build", device="cpu")
def _does_not_build(x: Tensor) -> Tensor:
    raise BuildError("the compiler says no")


@faulty_double.implementation("takes_all", device="cpu")
def _takes_all(x: Tensor) -> Tensor:
    return x * 2


@faulty_double.implementation("sound", device="cpu")
def _sound(x: Tensor) -> Tensor:
    return x + x


@faulty_double.implementation(
    "single", device="cpu", refuse=lambda x: None if x.dtype == torch.float32 else f"x is {x.dtype}"
)
def _single(x: Tensor) -> Tensor:
    return x + x
