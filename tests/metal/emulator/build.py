"""Compiles transformed kernels, each to a shared object of its own that is kept by content."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

CPP = Path(__file__).parent / "cpp"
COMPILERS = (*(f"clang++-{version}" for version in range(22, 14, -1)), "clang++", "g++")
_STUBS = (
    *(
        "stdlib",
        "array",
        "atomic",
        "common",
        "compute",
        "config",
        "geometric",
        "integer",
        "limits",
        "logging",
    ),
    *("math", "matrix", "numeric", "pack", "relational", "simdgroup", "simdgroup_matrix", "types"),
)


def find_compiler() -> str | None:
    """CLEARWAY_EMULATOR_CXX, or the first of COMPILERS that is here; None without any."""
    named = os.environ.get("CLEARWAY_EMULATOR_CXX")
    return next((name for name in (named, *COMPILERS) if name and shutil.which(name)), None)


def absent() -> str | None:
    """Why nothing can be emulated here, in a sentence; None where it can."""
    if platform.system() != "Linux":
        return "Metal kernels are emulated on Linux only"
    if find_compiler() is None:
        return "Metal kernels are emulated through a C++ compiler, and neither clang++ nor g++ is here"
    return None


@functools.cache
def cache() -> Path:
    """CLEARWAY_EMULATOR_CACHE (kept), or a temporary folder of this process."""
    named = os.environ.get("CLEARWAY_EMULATOR_CACHE")
    if named:
        folder = Path(named)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix="metal-emulator-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def preprocess(source: str, defines: Sequence[str] = ()) -> str:
    """`source` preprocessed. Apple's headers are empty; c10/metal is torch's own, as in the real call."""
    stubs = cache() / "stubs"
    if not (stubs / f"metal_{_STUBS[-1]}").exists():
        stubs.mkdir(exist_ok=True)
        for name in _STUBS:
            (stubs / f"metal_{name}").touch()
    flags = [
        *("-E", "-x", "c++", "-std=c++17", "-nostdinc"),
        *("-D__METAL__=1", "-D__METAL_VERSION__=310", "-D__HAVE_BFLOAT__=1"),
        *(f"-D{define}" for define in defines),
        *(f"-I{folder}" for folder in (stubs, Path(torch.__file__).parent / "include")),
    ]
    return _run([_compiler(), *flags, "-"], source)


def build(text: str, *, checked: bool, defines: Sequence[str] = ()) -> Path:
    """The shared object of a C++ text with msl_entry; compiled once per content, mode and compiler.

    Raises SyntaxError with the compiler's own words.
    """
    runtime = _object((CPP / "runtime.cpp").read_text(), ("-O2",))
    kernel = _object(f'#include "msl.h"\n{text}', (*_flags(checked), *(f"-D{define}" for define in defines)))
    program = kernel.with_suffix(".so")
    if not program.exists():
        command = [
            _compiler(),
            "-shared",
            "-Wl,-Bsymbolic",
            str(kernel),
            str(runtime),
            "-o",
            _new(program),
        ]
        _run(command)
        os.replace(_new(program), program)
    return program


def _flags(checked: bool) -> tuple[str, ...]:
    clang = "clang" in _compiler()
    flags = ("-O2", "-w", "-fno-math-errno", "-ffp-contract=off")
    if clang:
        flags += ("-Xclang", "-ffloat16-excess-precision=none")
    if not checked:
        return flags
    # The call-outs see accesses of up to 16 bytes, so nothing may be vectorised to wider ones. A variable
    # that the source leaves without a value gets a pattern, which is a NaN in half.
    flags += ("-O1", "-fsanitize=thread", "-fsanitize=bounds", "-ftrivial-auto-var-init=pattern")
    if clang:
        return (
            *flags,
            "-fno-vectorize",
            "-fno-slp-vectorize",
            "-mllvm",
            "-tsan-instrument-func-entry-exit=0",
        )
    return (*flags, "-fno-tree-vectorize", "--param", "tsan-instrument-func-entry-exit=0")


def _object(text: str, flags: Sequence[str]) -> Path:
    flags = ("-std=c++17", "-g1", "-fPIC", "-march=native", f"-I{CPP}", *flags)
    content = repr((text, flags, _version(_compiler()), _headers()))
    target = cache() / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}.o"
    if not target.exists():
        _run([_compiler(), *flags, "-x", "c++", "-c", "-", "-o", _new(target)], text)
        os.replace(_new(target), target)
    return target


def _new(target: Path) -> str:
    """Where this process writes `target` first: others may share the cache."""
    return f"{target}.{os.getpid()}"


def _compiler() -> str:
    reason = absent()
    if reason:
        raise RuntimeError(reason)
    found = find_compiler()
    assert found is not None
    return found


@functools.cache
def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


@functools.cache
def _headers() -> str:
    return "".join(path.read_text() for path in sorted(CPP.rglob("*.h")))


def _run(command: Sequence[str], given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SyntaxError(f"program_source: {done.stderr[:8000].strip()}")
    return done.stdout
