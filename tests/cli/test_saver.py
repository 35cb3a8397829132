"""Saving beside drawing: in order, bounded, nothing finished is lost, nothing that went wrong is hidden."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from clearway import Request, Result
from clearway.cli import saver as module
from clearway.cli.saver import AHEAD, Saver
from clearway.errors import UnavailableError


def result(seed: int) -> Result:
    return Result(np.zeros((1, 8, 8, 3), np.uint8), (seed,), ("",), Request())


class Disk:
    """Keeps what it is given, slowly, and refuses some."""

    def __init__(self, refuses: tuple[int, ...] = ()) -> None:
        self.refuses, self.kept, self.threads = refuses, list[int](), set[int]()
        self.open = threading.Event()
        self.open.set()

    def __call__(self, result: Result) -> list[Path]:
        assert self.open.wait(20)
        self.threads.add(threading.get_ident())
        (seed,) = result.seeds
        if seed in self.refuses:
            raise UnavailableError(f"no space is left for {seed}")
        self.kept.append(seed)
        return [Path(f"{seed}.png")]


def test_everything_is_saved_in_order_in_another_thread() -> None:
    disk, told = Disk(), list[Path]()
    with Saver(disk, told.append) as saver:
        for seed in range(7):
            saver.put(result(seed))
    assert disk.kept == list(range(7)) and disk.threads.isdisjoint({threading.get_ident()})
    assert told == saver.paths == [Path(f"{seed}.png") for seed in range(7)]
    assert saver.seconds >= 0


def test_paths_are_told_in_the_thread_that_draws() -> None:
    threads = set()
    with Saver(Disk(), lambda _: threads.add(threading.get_ident())) as saver:
        saver.put(result(1))
    assert threads == {threading.get_ident()}


def test_drawing_does_not_wait_until_too_many_groups_do() -> None:
    disk = Disk()
    disk.open.clear()
    with Saver(disk, lambda _: None) as saver:
        for seed in range(AHEAD + 1):  # one is being saved, AHEAD wait
            saver.put(result(seed))
        assert disk.kept == []
        more = threading.Thread(target=saver.put, args=(result(9),))
        more.start()
        more.join(0.2)
        assert more.is_alive()  # bounded
        disk.open.set()
        more.join(20)
    assert disk.kept == [*range(AHEAD + 1), 9]


def test_what_goes_wrong_is_raised_and_the_rest_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    disk = Disk(refuses=(1, 3))
    disk.open.clear()
    with pytest.raises(UnavailableError, match="for 1"), Saver(disk, lambda _: None) as saver:
        for seed in range(3):
            saver.put(result(seed))
        disk.open.set()
        saver.put(result(3))
    assert disk.kept == [0, 2] and saver.paths == [Path("0.png"), Path("2.png")]
    assert "for 3" in capsys.readouterr().err


def test_an_error_stops_the_drawing_at_the_next_event() -> None:
    disk = Disk(refuses=(0,))
    with pytest.raises(UnavailableError), Saver(disk, lambda _: None) as saver:
        saver.put(result(0))
        until = time.monotonic() + 20
        while time.monotonic() < until:
            saver.collect()
        pytest.fail("nothing was raised")


def test_pictures_that_are_finished_are_kept_when_drawing_ends_early() -> None:
    disk = Disk()
    disk.open.clear()
    with pytest.raises(KeyboardInterrupt), Saver(disk, lambda _: None) as saver:
        saver.put(result(0))
        saver.put(result(1))
        disk.open.set()
        raise KeyboardInterrupt
    assert disk.kept == [0, 1] and len(saver.paths) == 2


def test_ctrl_c_while_it_waits_gives_up_what_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, threads, Timer = Disk(), list[threading.Thread](), threading.Timer
    disk.open.clear()

    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            threads.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(module.threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt), Saver(disk, lambda _: None) as saver:
        saver.put(result(0))
        while saver._waiting.qsize():  # until it is being saved
            time.sleep(0.001)
        saver.put(result(1))
        released = Timer(0.1, disk.open.set)
        released.start()
    super(Interrupted, threads[0]).join(20)
    assert disk.kept == [0] and not threads[0].is_alive()


def test_where_nothing_is_put_no_thread_is_made() -> None:
    before = threading.active_count()
    with Saver(Disk(), lambda _: None) as saver:
        saver.collect()
        assert threading.active_count() == before
    assert saver.paths == []
