"""Kernels built by a process beside this one: the same as here, and whatever becomes of it all are built."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clearway.ops import _builders, _triton, ahead, elsewhere, forks, residual_add
from clearway.ops._triton import Kernel
from ops.test_ahead import Jit

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

HERE = Kernel(lambda x: None)


class _Builder:
    """Stands for the process: says that all was built, but for what it leaves."""

    def __init__(self, leaves: tuple[int, ...] = (), ready: bool = True, ends: bool = False) -> None:
        self.leaves, self.is_ready, self.ends = leaves, ready, ends
        self.asked: list[list[elsewhere.Launch]] = []

    def ready(self, patience_s: float) -> bool:
        return self.is_ready

    def build(self, launches: list[elsewhere.Launch], then: Callable[[int], None]) -> None:
        self.asked.append(launches)
        if self.ends:
            raise OSError("it is gone")
        for number in range(len(launches)):
            if number not in self.leaves:
                then(number)
                then(number)  # told twice: built once


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Jit:
    made = Jit()
    monkeypatch.setattr(HERE, "_built", made)
    monkeypatch.setattr(ahead, "_under_way", {})
    return made


def _launches(count: int, kernel: Kernel = HERE) -> Callable[[], None]:
    def run() -> None:
        for block in range(count):
            kernel.launch((1,), torch.zeros(64), 640, BLOCK=block)

    return run


@pytest.mark.parametrize(
    "builder",
    [_Builder(), _Builder(leaves=(0, 3)), _Builder(ready=False), _Builder(ends=True), None],
    ids=["all", "some", "never ready", "gone", "none"],
)
def test_every_kernel_is_built_here_once_whatever_the_process_does(
    jit: Jit, monkeypatch: pytest.MonkeyPatch, builder: _Builder | None
) -> None:
    monkeypatch.setattr(elsewhere, "builder", lambda: builder)
    monkeypatch.setattr(elsewhere, "PATIENCE_S", 0.0)
    assert ahead.build(_launches(9)) == 9
    assert len(jit.built) == 9
    if builder is not None and builder.is_ready:
        (asked,) = builder.asked
        assert {one[:2] for one in asked} == {(__name__, "HERE")} and len(asked) == 9
        assert sorted(one[3]["BLOCK"] for one in asked) == list(range(9))
        assert [one[4] for one in asked] == [True, *[False] * 8]  # alike but for a constant


@pytest.mark.parametrize("more", [0, 1, 3])
def test_all_are_built_where_no_more_threads_can_be_had(
    jit: Jit, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    start, started = threading.Thread.start, []

    def few(self: threading.Thread) -> None:
        if len(started) == more:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(elsewhere, "builder", lambda: None)
    monkeypatch.setattr(threading.Thread, "start", few)
    assert ahead.build(_launches(9)) == 9 == len(jit.built)


def test_a_few_are_not_worth_asking_for(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = _Builder()
    monkeypatch.setattr(elsewhere, "builder", lambda: builder)
    assert ahead.build(_launches(ahead.FEW)) == ahead.FEW == len(jit.built)
    assert not builder.asked


def test_a_kernel_that_nobody_else_can_find_is_built_here(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = _Builder()
    monkeypatch.setattr(elsewhere, "builder", lambda: builder)
    hidden = Kernel(lambda x: None)
    hidden._built = Jit()

    def run() -> None:
        _launches(6)()
        _launches(3, hidden)()

    assert ahead.build(run) == 9
    assert (len(jit.built), len(hidden._built.built), len(builder.asked[0])) == (6, 3, 6)


def test_what_one_has_begun_another_waits_for(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    may, order = threading.Event(), []
    warmup = jit.warmup

    def slow(*args: Any, grid: Any, **constants: Any) -> Any:
        may.wait(30)
        order.append("built")
        return warmup(*args, grid=grid, **constants)

    monkeypatch.setattr(jit, "warmup", slow)
    assert ahead.begin(_launches(2)) == 2
    assert not order
    threading.Timer(0.05, may.set).start()
    assert ahead.build(_launches(2)) == 2
    assert order == ["built", "built"]


def test_a_kernel_is_told_of_by_the_name_that_it_has_in_its_module() -> None:
    """Two kernels of one function, one of which only counts: another name, and not the function's."""
    for kernel, name in ((residual_add._forward, "_forward"), (residual_add._forward_last, "_forward_last")):
        launch = ahead._Build(kernel, None, [], {}, None).launch()
        assert launch is not None and launch[:2] == (residual_add.__name__, name)


@pytest.fixture
def on_paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Triton's folder for kernels of an H100 that is not there."""
    from triton import knobs
    from triton.runtime import driver

    folder = tmp_path / "cache"
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(knobs.cache, "dir", str(folder))
    _builders._on_paper.build_for("cuda", 90, 32)
    monkeypatch.setattr(ahead, "_under_way", {})
    return folder


def _residuals() -> None:
    x = torch.zeros(2, 64, 16, 16, dtype=torch.float16)
    pixels, image = 16 * 16, 64 * 16 * 16
    for kernel in (residual_add._forward, residual_add._forward_last):
        kernel.launch(
            (1, 1, 1),
            *(x, x, x, x, 64, pixels, *(image, 1, 64) * 3),
            HAS_BIAS=True, HAS_RESIDUAL=True, BLOCK_C=64, BLOCK_P=32, num_warps=4,
        )  # fmt: skip


def test_a_program_that_is_ending_builds_no_more(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "builder", lambda: None)
    monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    assert ahead.build(_launches(3)) == 3 and not jit.built


@needs_triton
@needs_fork
def test_what_cannot_be_built_is_not_told_of_as_built(
    on_paper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", str(on_paper.parent / "home"))
    built, told = elsewhere.Builder(), list[int]()
    try:
        assert built.ready(120.0)
        built.build([("no.such.module", "kernel", [], {})] * 3, told.append)
        assert not told and built.ready(0.0)
        assert not elsewhere.home.read_json(elsewhere.FOLDER, elsewhere.NAME)
    finally:
        built.close()


@needs_triton
@needs_fork
def test_the_process_builds_what_this_one_would(on_paper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", str(on_paper.parent / "home"))
    monkeypatch.setattr(ahead, "FEW", 0)
    built = elsewhere.Builder()
    monkeypatch.setattr(elsewhere, "builder", lambda: built)
    try:
        assert built.ready(120.0)
        assert ahead.build(_residuals) == 2
        found = sorted(on_paper.glob("*/*.cubin"))
        assert len(found) == 2 and "_forward" in {one.stem for one in found}
        # again, in this process alone: nothing is new under the key that it looks for
        monkeypatch.setattr(elsewhere, "builder", lambda: None)
        monkeypatch.setattr(ahead, "_under_way", {})
        for kernel in (residual_add._forward, residual_add._forward_last):
            monkeypatch.setattr(kernel, "_built", None)
        assert ahead.build(_residuals) == 2
        assert sorted(on_paper.glob("*/*.cubin")) == found
        assert elsewhere.home.read_json(elsewhere.FOLDER, elsewhere.NAME) == elsewhere._record()
        assert built._worker is not None
        os.killpg(built._worker._process.pid, signal.SIGKILL)
        built.build([], lambda number: None)
        assert not built.ready(0.0)
    finally:
        built.close()


def test_none_is_started_where_it_is_of_no_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    started: list[Any] = []

    def start() -> Any:
        started.append(SimpleNamespace(_gone=False))
        return started[-1]

    monkeypatch.setattr(_triton, "absent", lambda: None)
    monkeypatch.setattr(elsewhere, "Builder", start)
    monkeypatch.setattr(elsewhere, "_builder", None)
    monkeypatch.setattr(forks, "key_of_triton", lambda: None)
    monkeypatch.setattr(forks, "expect", lambda: None)
    folder = tmp_path / "kernels of Triton"
    folder.mkdir()
    monkeypatch.setattr(elsewhere, "_record", lambda: {"folder": str(folder)})

    def expect(kind: str = "cuda", cores: int = 16) -> bool:
        monkeypatch.setattr(elsewhere, "_expected", False)
        monkeypatch.setattr(elsewhere, "most", lambda: cores)
        return elsewhere.expect(kind)

    assert not expect("cpu") and not expect("mps") and not expect(cores=2)
    with monkeypatch.context() as changed:
        changed.setattr(_triton, "absent", lambda: "triton is not installed")
        assert not expect()
    with monkeypatch.context() as changed:
        changed.setenv(elsewhere.state.INSIDE, "1")
        assert not expect()
    assert not started
    if hasattr(os, "fork"):
        assert expect() and elsewhere.builder() is started[0]
        assert not elsewhere.expect("cuda")  # once
        started[0]._gone = True
        assert elsewhere.builder() is None
        elsewhere.home.write_json({"folder": str(folder)}, elsewhere.FOLDER, elsewhere.NAME)
        assert not expect()
        folder.rmdir()  # what was built is gone
        assert expect() and len(started) == 2
