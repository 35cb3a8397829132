"""C++ compiled here: who cannot, what is kept, whose files are loaded."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clearway import home
from clearway.ops import _cpp, attention_native, state
from clearway.ops.attention import attention

needs_compiler = pytest.mark.skipif(_cpp.absent() is not None, reason=f"not here: {_cpp.absent()}")


@pytest.fixture(autouse=True)
def _anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CXX", raising=False)
    caches = _cpp.absent, _cpp.library, _cpp.compiler
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were compiled."""
    names: list[str] = []
    compile_, source = _cpp._compile, _cpp.HERE

    def noted(given: Path, target: Path) -> None:
        names.append(given.name)
        compile_(given, target)

    monkeypatch.setattr(_cpp, "_compile", noted)
    assert (source / "attention.cpp").is_file()
    return names


def kept() -> list[Path]:
    return sorted(home.path("compiled").glob("*"))


@needs_compiler
def test_it_is_compiled_once_and_kept(compiled: list[str]) -> None:
    assert _cpp.library("attention").attention
    assert [path.suffix for path in kept()] == [".so"] and os.lstat(kept()[0].parent).st_mode & 0o077 == 0
    _cpp.library.cache_clear()
    assert _cpp.library("attention").attention
    assert compiled == ["attention.cpp"]


@needs_compiler
def test_another_source_is_compiled_anew(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cpp, "HERE", tmp_path)
    for number in (1, 2):
        (tmp_path / "one.cpp").write_text(f'extern "C" int number() {{ return {number}; }}')
        _cpp.library.cache_clear()
        assert _cpp.library("one").number() == number
    assert len(compiled) == len(kept()) == 2


@needs_compiler
def test_a_damaged_library_is_replaced(compiled: list[str]) -> None:
    """Cut short, or with a hole in it, it would end the process that loads it."""
    _cpp.library("attention")
    whole = kept()[0].read_bytes()
    for number, broken in enumerate(
        (b"no library", whole[:12000], whole[:8192] + bytes(len(whole) - 8192), b"")
    ):
        path = kept()[0]
        path.unlink()  # not the memory of the one that is loaded here
        path.write_bytes(broken)
        path.chmod(0o700)
        _cpp.library.cache_clear()
        assert _cpp.library("attention").attention
        assert len(compiled) == number + 2 and kept() == [path] and path.read_bytes() == whole


@needs_compiler
def test_one_of_another_compiler_is_not_taken(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cpp.library("attention")
    before, hashed = _cpp.compiler(), attention_hash()
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {_cpp._compiler()[0]} "$@"\n')
    wrapper.chmod(0o700)
    monkeypatch.setenv("CXX", f"{wrapper} -ffast-math")
    _cpp.library.cache_clear()
    _cpp.compiler.cache_clear()
    assert _cpp.compiler() != before and attention_hash() != hashed
    _cpp.library("attention")
    assert len(compiled) == len(kept()) == 2


def attention_hash() -> str:
    return next(one for one in attention.implementations if one.name == "native").source_hash()


@needs_compiler
def test_what_passes_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a self-test a compiler that was killed, or a full disk, is want of memory; to others no kernel."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(
        "#!/bin/sh\necho 'fatal error: Killed signal terminated program cc1plus' >&2\nexit 1\n"
    )
    wrapper.chmod(0o700)
    monkeypatch.setenv("CXX", str(wrapper))
    with pytest.raises(state.BuildError, match="Killed"):
        _cpp.library("attention")
    monkeypatch.setenv(state.INSIDE, "1")
    with pytest.raises(MemoryError, match="Killed"):
        _cpp.library("attention")
    wrapper.write_text("#!/bin/sh\necho 'error: no such flag' >&2\nexit 1\n")
    with pytest.raises(state.BuildError, match="no such flag"):
        _cpp.library("attention")


@needs_compiler
def test_without_a_folder_for_temporary_files_it_is_a_build_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object, **options: object) -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(_cpp.tempfile, "TemporaryDirectory", none)
    with pytest.raises(state.BuildError, match="no folder to compile"):
        _cpp.library("attention")


@needs_compiler
def test_where_nothing_may_be_run_from_the_temporary_folder_the_kept_one_is(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, tried = ctypes.CDLL, list[str]()

    def refuse(name: str) -> ctypes.CDLL:
        tried.append(name)
        if "clearway-" in Path(name).parent.name:
            raise OSError("failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(_cpp.ctypes, "CDLL", refuse)
    assert _cpp.library("attention").attention
    assert [Path(name) for name in tried] == kept()


@needs_compiler
def test_a_library_without_the_function_is_a_build_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpp, "library", lambda stem: ctypes.CDLL(None))
    attention_native._function.cache_clear()
    with pytest.raises(state.BuildError, match="no function of its name"):
        attention_native.ready()
    attention_native._function.cache_clear()


@needs_compiler
@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_what_others_may_have_written_is_not_loaded(compiled: list[str], what: str) -> None:
    _cpp.library("attention")
    path = kept()[0]
    if what == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    else:
        os.chmod(path if what == "file" else path.parent, 0o777)
    _cpp.library.cache_clear()
    _cpp.library("attention")
    assert len(compiled) == 2


@needs_compiler
def test_without_a_folder_to_keep_it_in_it_runs(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "file"))
    assert _cpp.library("attention").attention and compiled == ["attention.cpp"]


@needs_compiler
def test_the_compilers_own_words_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpp, "HERE", tmp_path)
    (tmp_path / "bad.cpp").write_text("no such thing;")
    with pytest.raises(state.BuildError, match=r"could not compile bad\.cpp \(.*error"):
        _cpp.library("bad")
    with pytest.raises(state.BuildError, match=r"nothing\.cpp could not be read"):
        _cpp.library("nothing")


def test_a_compiler_that_hangs_is_a_build_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(_cpp, "_compiler", lambda: ["c++"])
    with pytest.raises(state.BuildError, match="timed out"):
        _cpp.library("attention")


def test_who_cannot_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        _cpp.absent.cache_clear()
        return _cpp.absent() or ""

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(_cpp.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(_cpp, "_compiler", lambda: ["c++"])
    monkeypatch.setattr(_cpp, "parallel", lambda: 1)
    assert reason() == ""
    monkeypatch.setattr(_cpp, "parallel", lambda: None)
    assert "GOMP_parallel" in reason()
    monkeypatch.setattr(_cpp, "_compiler", lambda: None)
    assert "no C++ compiler" in reason()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "DEFAULT" in reason()
    monkeypatch.setattr(_cpp.platform, "machine", lambda: "aarch64")
    assert "x86-64" in reason()


def test_a_compiler_is_named_by_cxx_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpp.shutil, "which", lambda name: None if name == "none" else f"/bin/{name}")
    assert _cpp._compiler() == ["/bin/c++"]
    monkeypatch.setenv("CXX", "ccache g++-12")
    assert _cpp._compiler() == ["ccache", "g++-12"]
    for named in ("none", "g++ 'x", ""):
        monkeypatch.setenv("CXX", named)
        assert _cpp._compiler() == ["/bin/c++"]
    monkeypatch.setattr(_cpp.shutil, "which", lambda name: None)
    assert _cpp._compiler() is None
    with pytest.raises(state.BuildError, match="no C\\+\\+ compiler"):
        _cpp._compile(Path("a.cpp"), Path("a.so"))
