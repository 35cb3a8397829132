"""C++ compiled on this machine: one shared library a `.cpp` file beside this one, kept in the state folder.

The files need a C++ compiler, no headers but C's, and no OpenMP of their own: they are handed the entry of
the one that PyTorch's own threads are from, so that there is one pool of threads. They are compiled for AVX2
or AVX-512, as PyTorch says that it can do, each kept under its own name, so that a state folder shared by
several machines holds for all of them. A library is kept by the compiler that made it and under a name that
says what is in it. It is loaded where that is still so and file and folder are this user's alone; else it is
compiled anew.
Source: `GOMP_parallel` is part of the interface of GCC's libgomp (libgomp.h), which LLVM's libomp has too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from clearway import home
from clearway.errors import one_line
from clearway.ops import state
from clearway.ops.state import BuildError

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fno-fast-math", "-ffp-contract=fast", "-fPIC", "-shared")
TARGETS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": (
        *("-mavx2", "-mfma", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw"),
        "-mprefer-vector-width=512",
    ),
}
"""What is compiled for, by what PyTorch says it can do here (aten/src/ATen/native/DispatchStub.cpp)."""
COMPILERS = ("c++", "g++", "clang++")
PASSING = ("No space left", "Killed", "Cannot allocate memory", "out of memory")
"""What a compiler says of a failure that is not the source's."""
LIMIT_S = 50.0
"""Within the time after which a self-test is taken to hang."""


@functools.cache
def absent() -> str | None:
    """Why this machine cannot compile and run them; None where it can. Compiles nothing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "it is compiled for Linux on x86-64"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in TARGETS:
        return f"PyTorch can do {capability} here; it takes {' or '.join(TARGETS)}"
    if _compiler() is None:
        return f"there is no C++ compiler ($CXX, {', '.join(COMPILERS)})"
    return None if parallel() is not None else "PyTorch's OpenMP has no GOMP_parallel"


@functools.cache
def parallel() -> ctypes.c_void_p | None:
    """PyTorch's own GOMP_parallel(function, argument, threads, flags), as an address."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None


@functools.cache
def compiler() -> str:
    """What tells this machine's compiler from another: its command, and the files that this names, with their
    sizes and times; "" without one."""
    told = []
    for word in _compiler() or ():
        found = shutil.which(word)
        told.append(word)
        if found is not None:
            with contextlib.suppress(OSError):
                real = os.path.realpath(found)
                about = os.stat(real)
                told.append(f"{real} {about.st_size} {about.st_mtime_ns}")
    return "\n".join(told)


@functools.cache
def library(stem: str) -> ctypes.CDLL:
    """The functions of `<stem>.cpp`; BuildError with the compiler's words where it cannot be had."""
    try:
        text = (HERE / f"{stem}.cpp").read_bytes()
    except OSError as error:
        raise BuildError(f"{stem}.cpp could not be read ({one_line(error)})") from error
    name = f"{stem}-{_digest(text)}"
    for kept in _kept(name):
        with contextlib.suppress(OSError):  # of a folder that nothing may be run from
            return ctypes.CDLL(str(kept))
    try:
        with tempfile.TemporaryDirectory(prefix="clearway-") as folder:
            made = Path(folder) / f"{stem}.so"
            _compile(HERE / f"{stem}.cpp", made)
            _keep(made, name)
            for place in (*_kept(name), made):
                try:
                    return ctypes.CDLL(str(place))
                except OSError as error:
                    said = one_line(error)
    except OSError as error:
        raise _failure(f"there is no folder to compile {stem}.cpp in ({one_line(error)})", True) from error
    raise BuildError(f"{stem}.cpp was compiled and cannot be loaded ({said})")


def _compiler() -> list[str] | None:
    """The command of a C++ compiler."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quote that does not end
        named = []
    if named and shutil.which(named[0]):
        return named
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    return None if found is None else [found]


def flags() -> tuple[str, ...]:
    """What the compiler is told on this machine."""
    return *FLAGS, *TARGETS.get(torch.backends.cpu.get_cpu_capability(), ())


def maker() -> str:
    """What tells one library of a source from another: the compiler and what it is told."""
    return "\n".join((compiler(), *flags()))


def _compile(source: Path, target: Path) -> None:
    command = _compiler()
    if command is None:
        raise BuildError("there is no C++ compiler")
    try:
        subprocess.run(
            [*command, *flags(), str(source), "-o", str(target)],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.CalledProcessError as error:
        said = one_line(next((line for line in error.stderr.splitlines() if "error" in line), error.stderr))
        passing = error.returncode < 0 or any(sign in error.stderr for sign in PASSING)
        raise _failure(f"{command[0]} could not compile {source.name} ({said[:500]})", passing) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise _failure(f"{command[0]} could not compile {source.name} ({one_line(error)})", True) from error


def _failure(sentence: str, passing: bool) -> Exception:
    """What to raise. A self-test does not take what passes for a fault of the kernel's: to it that is want of
    memory, which is no verdict."""
    return MemoryError(sentence) if passing and os.environ.get(state.INSIDE) else BuildError(sentence)


def _digest(text: bytes) -> str:
    return _short(b"\0".join([text, maker().encode()]))


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _kept(name: str) -> list[Path]:
    """The libraries of this name that are what they were when they were kept, and that nobody but this user
    (or root) can have put there."""
    found = []
    for path in sorted(home.path("compiled").glob(f"{name}-*.so")):
        with contextlib.suppress(OSError):
            about = [os.lstat(path), os.lstat(path.parent)]
            private = all(one.st_uid in (os.getuid(), 0) and not one.st_mode & 0o022 for one in about)
            if (
                private
                and stat.S_ISREG(about[0].st_mode)
                and path.stem == f"{name}-{_short(path.read_bytes())}"
            ):
                found.append(path)
    return found


def _keep(made: Path, name: str) -> None:
    """Puts a library into the state folder in one move; where the disk does not allow it, goes on without."""
    with contextlib.suppress(OSError):
        content = made.read_bytes()
        kept = home.path("compiled", f"{name}-{_short(content)}.so")
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, moved = tempfile.mkstemp(dir=kept.parent, prefix=f".{kept.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(moved, 0o700)
            os.replace(moved, kept)
        except OSError:
            os.unlink(moved)
            raise
