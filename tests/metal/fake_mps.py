"""A drop-in for torch.mps.compile_shader that records every dispatch and executes it through the emulator.

So an op's launch code is tested on Linux as it ships, on CPU tensors that stand for MPS ones:

    fake = FakeMps()
    fake.install(monkeypatch)            # torch.mps.compile_shader is now fake.compile_shader
    out = the_op(x)
    assert [d.kernel for d in fake.dispatches] == ["softmax_half_4"]

What it cannot show: that a tensor was on the device (the real call takes a CPU tensor only if it is 0-dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from metal.emulator import Library, Report, compile_shader
from metal.emulator.launch import grid


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as an argument: what the real call binds, and what it does not check."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A number or a list of numbers as an argument, with its type on the device."""

    values: tuple[int | float, ...]
    type: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One call of a kernel. `report` is None where nothing was executed."""

    kernel: str
    arguments: tuple[Tensor | Constant, ...]
    threads: tuple[int, ...]
    group_size: tuple[int, ...]
    report: Report | None


class FakeMps:
    """`dispatches` in order, over all libraries; `sources` that were compiled."""

    def __init__(self, *, seed: int | None = None, checked: bool = False, execute: bool = True) -> None:
        self.dispatches: list[Dispatch] = []
        self.sources: list[str] = []
        self._mode = {"seed": seed, "checked": checked}
        self._execute = execute

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts compile_shader in the place of torch's for the test."""
        monkeypatch.setattr(torch.mps, "compile_shader", self.compile_shader)

    def compile_shader(self, source: str) -> FakeLibrary:
        """As torch.mps.compile_shader(source)."""
        source.encode("ascii")
        self.sources.append(source)
        return FakeLibrary(self, compile_shader(source, **self._mode) if self._execute else None)


class FakeLibrary:
    """Kernels by name; any name where nothing is executed."""

    def __init__(self, fake: FakeMps, library: Library | None) -> None:
        self._fake = fake
        self._library = library

    def __dir__(self) -> list[str]:
        return [] if self._library is None else dir(self._library)

    def __getattr__(self, name: str) -> FakeKernel:
        return FakeKernel(self._fake, name, None if self._library is None else getattr(self._library, name))


class FakeKernel:
    """Called as the real kernel is: positional arguments, and keywords for the rest."""

    max_threads_per_threadgroup = 1024
    thread_execution_width = 32

    def __init__(self, fake: FakeMps, name: str, kernel: Any) -> None:
        self._fake = fake
        self._name = name
        self._kernel = kernel

    def __call__(
        self,
        *arguments: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | dict[int, str] | None = None,
    ) -> None:
        total, group = grid(arguments, threads, group_size)
        report = None
        if self._kernel is not None:
            report = self._kernel(*arguments, threads=total, group_size=group, arg_casts=arg_casts)
        recorded = tuple(_record(index, value, arg_casts) for index, value in enumerate(arguments))
        self._fake.dispatches.append(Dispatch(self._name, recorded, total, group, report))


def _record(index: int, value: Any, casts: str | dict[int, str] | None) -> Tensor | Constant:
    if isinstance(value, torch.Tensor):
        return Tensor(value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    cast = casts.get(index) if isinstance(casts, dict) else casts
    return Constant(values, cast or ("int64" if isinstance(values[0], int) else "float32"))
