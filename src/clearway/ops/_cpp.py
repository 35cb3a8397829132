"""C++ compiled on this machine: one shared library a `.cpp` file beside this one, kept in the state folder.

The files need a C++ compiler, no headers but C's, and no OpenMP of their own: they are handed the entry of
the one that PyTorch's own threads are from, so that there is one pool of threads. Their target is fixed (AVX2
with FMA), so that a state folder shared by several machines holds for all of them. A library is loaded only
where file and folder are this user's alone; else it is compiled anew in a folder for temporary files.
Source: `GOMP_parallel` is part of the interface of GCC's libgomp (libgomp.h), which LLVM's libomp has too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from clearway import home
from clearway.errors import one_line
from clearway.ops.state import BuildError

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-mavx2", "-mfma", "-ffp-contract=fast", "-fPIC", "-shared")
COMPILERS = ("c++", "g++", "clang++")
CAPABLE = ("AVX2", "AVX512")
"""What PyTorch says it can do, where the target is within that."""
LIMIT_S = 50.0
"""Within the time after which a self-test is taken to hang."""


@functools.cache
def absent() -> str | None:
    """Why this machine cannot compile and run them; None where it can. Compiles nothing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "it is compiled for Linux on x86-64"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in CAPABLE:
        return f"PyTorch can do {capability} here; it takes {' or '.join(CAPABLE)}"
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
def library(stem: str) -> ctypes.CDLL:
    """The functions of `<stem>.cpp`; BuildError with the compiler's words where it cannot be had."""
    try:
        text = (HERE / f"{stem}.cpp").read_bytes()
    except OSError as error:
        raise BuildError(f"{stem}.cpp could not be read ({one_line(error)})") from error
    kept = home.path("compiled", f"{stem}-{_digest(text)}.so")
    if _private(kept):
        try:
            return ctypes.CDLL(str(kept))
        except OSError:  # damaged, or of a folder that nothing may be run from
            pass
    with tempfile.TemporaryDirectory(prefix="clearway-") as folder:
        made = Path(folder) / f"{stem}.so"
        _compile(HERE / f"{stem}.cpp", made)
        try:
            loaded = ctypes.CDLL(str(made))
        except OSError as error:
            raise BuildError(f"{stem}.cpp was compiled and cannot be loaded ({one_line(error)})") from error
        _keep(made, kept)
    return loaded


def _compiler() -> list[str] | None:
    """The command of a C++ compiler."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named and shutil.which(named[0]):
        return named
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    return None if found is None else [found]


def _compile(source: Path, target: Path) -> None:
    command = _compiler()
    if command is None:
        raise BuildError("there is no C++ compiler")
    try:
        subprocess.run(
            [*command, *FLAGS, str(source), "-o", str(target)],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.CalledProcessError as error:
        said = one_line(next((line for line in error.stderr.splitlines() if "error" in line), error.stderr))
        raise BuildError(f"{command[0]} could not compile {source.name} ({said[:500]})") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{command[0]} could not compile {source.name} ({one_line(error)})") from error


def _digest(text: bytes) -> str:
    return hashlib.sha256(b"\0".join([text, " ".join(FLAGS).encode()])).hexdigest()[:16]


def _private(kept: Path) -> bool:
    """Whether a file is there that nobody but this user (or root) can have put there."""
    try:
        found = [os.lstat(kept), os.lstat(kept.parent)]
    except OSError:
        return False
    return all(one.st_uid in (os.getuid(), 0) and not one.st_mode & 0o022 for one in found) and kept.is_file()


def _keep(made: Path, kept: Path) -> None:
    """Puts a library into the state folder in one move; where the disk does not allow it, goes on without."""
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=kept.parent, prefix=f".{kept.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(made.read_bytes())
            os.chmod(name, 0o700)
            os.replace(name, kept)
        except OSError:
            os.unlink(name)
            raise
    except OSError:
        return
