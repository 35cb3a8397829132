"""compile_shader as torch.mps has it: a library whose kernels are called by name."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import build
from .kernels import Kernel
from .launch import MAX_THREADS, Mode, dispatch, grid
from .report import EmulatorError, Report
from .transform import Program, transform


@functools.lru_cache(maxsize=64)
def _program(
    source: str, defines: tuple[str, ...], constants: tuple[tuple[int, bool | int | float], ...]
) -> Program:
    return transform(build.preprocess(source, defines), dict(constants))


class Library:
    """Kernels by host name. `reports` has one Report for each dispatch, in order."""

    def __init__(
        self, source: str, mode: Mode, constants: Mapping[int, bool | int | float], defines: Sequence[str]
    ) -> None:
        self.mode = mode
        self.reports: list[Report] = []
        self._defines = tuple(defines)
        self._program = _program(source, tuple(defines), tuple(constants.items()))
        self._kernels = {kernel.host_name: kernel for kernel in self._program.kernels}
        self._callables: dict[str, EmulatedKernel] = {}

    def __dir__(self) -> list[str]:
        return list(self._kernels)

    def __getattr__(self, name: str) -> EmulatedKernel:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._kernels:
            raise AttributeError(f"the source has no kernel {name}; it has {', '.join(self._kernels)}")
        if name not in self._callables:
            self._callables[name] = EmulatedKernel(self, self._kernels[name])
        return self._callables[name]

    def build(self, kernel: Kernel) -> Path:
        """The shared object of one kernel, compiled if it has not been."""
        text = f"{self._program.text}\n{self._program.entry(kernel)}"
        return build.build(text, checked=self.mode.checked, defines=self._defines)


class EmulatedKernel:
    """One kernel, compiled at its first use (torch compiles all at once, pipelines at first use)."""

    max_threads_per_threadgroup = MAX_THREADS
    thread_execution_width = 32

    def __init__(self, library: Library, kernel: Kernel) -> None:
        self._library = library
        self._kernel = kernel
        # PyDLL keeps Python's lock: the runtime's state is global.
        self._program = ctypes.PyDLL(str(library.build(kernel)))

    def __call__(
        self,
        *arguments: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | dict[int, str] | None = None,
        group_buffers: Sequence[int] = (),
        raise_on_fault: bool = True,
    ) -> Report:
        """The report of the emulated dispatch.

        `group_buffers`: bytes of [[threadgroup(i)]] arguments, which torch cannot give. Raises EmulatorError
        for the faults found, unless `raise_on_fault` is off.
        """
        total, group = grid(arguments, threads, group_size)
        report = dispatch(
            *(self._program, self._kernel, arguments, total, group, arg_casts),
            *(self._library.mode, group_buffers),
        )
        self._library.reports.append(report)
        if report.faults and raise_on_fault:
            raise EmulatorError(str(report), report)
        return report


def compile_shader(
    source: str,
    *,
    seed: int | None = None,
    checked: bool = False,
    constants: Mapping[int, bool | int | float] | None = None,
    defines: Sequence[str] = (),
) -> Library:
    """The library of `source`, to be called as torch.mps.compile_shader's is.

    Emulator only: `seed` shuffles threadgroups, simdgroups and lanes (None: in order); `checked` follows
    every load and store; `constants` are function constants by index; `defines` go to the preprocessor.
    Raises UnicodeEncodeError for signs outside ASCII and SyntaxError for source that does not preprocess;
    a kernel's own errors raise SyntaxError when it is first named.
    """
    source.encode("ascii")
    return Library(source, Mode(seed, checked), constants or {}, defines)
