"""C++ compiled here: who cannot, what is kept, whose files are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clearway import home
from clearway.ops import _cpp, state

needs_compiler = pytest.mark.skipif(_cpp.absent() is not None, reason=f"not here: {_cpp.absent()}")


@pytest.fixture(autouse=True)
def _anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CXX", raising=False)
    caches = _cpp.absent, _cpp.library
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
    _cpp.library("attention")
    kept()[0].write_bytes(b"no library")
    _cpp.library.cache_clear()
    assert _cpp.library("attention").attention
    _cpp.library.cache_clear()
    _cpp.library("attention")
    assert len(compiled) == 2


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
    monkeypatch.setenv("CXX", "none")
    assert _cpp._compiler() == ["/bin/c++"]
    monkeypatch.setattr(_cpp.shutil, "which", lambda name: None)
    assert _cpp._compiler() is None
    with pytest.raises(state.BuildError, match="no C\\+\\+ compiler"):
        _cpp._compile(Path("a.cpp"), Path("a.so"))
