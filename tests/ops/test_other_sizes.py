"""What other sizes need is told from calls at one, and built by a process without a device."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clearway.ops import _on_paper, _triton, ahead, layer_norm, other_sizes
from clearway.ops._workers import Job, Worker
from clearway.ops.ahead import Shaped

ROOT = Path(__file__).parents[2]
BASE, TO = (128, 128), (104, 152)


def shaped(*shape: int, last: bool = False) -> Shaped:
    made = torch.empty(shape, dtype=torch.float16, device="meta")
    return Shaped.of(made.contiguous(memory_format=torch.channels_last) if last else made)


@pytest.mark.parametrize("level", [0.125, 0.25, 0.5, 1, 2, 8])
def test_an_image_of_any_level_becomes_one_of_the_other_size(level: float) -> None:
    side, to = int(BASE[0] * level), [int(side * level) for side in TO]
    for last in (False, True):
        given = shaped(2, 320, side, side, last=last), shaped(320)
        made = other_sizes.resized("residual_add", given, BASE, TO)
        assert made == (shaped(2, 320, *to, last=last), shaped(320))


def test_tokens_do_and_words_and_weights_do_not() -> None:
    normed = shaped(2, 4096, 640), None, shaped(640), shaped(640), 1e-5
    made = other_sizes.resized("layer_norm", normed, BASE, TO)
    assert made == (shaped(2, 52 * 76, 640), *normed[1:])
    q, words = shaped(2, 4096, 10, 64), shaped(2, 77, 10, 64)
    views = [one._replace(shape=(2, 10, one.shape[1], 64), strides=_swapped(one)) for one in (q, words)]
    made = other_sizes.resized("attention", (views[0], views[1], views[1]), BASE, TO)
    assert made is not None and made[0].shape == (2, 10, 3952, 64) and made[1:] == (views[1], views[1])
    assert other_sizes.resized("convolution", (shaped(320, 320, 3, 3), shaped(2, 77, 640)), BASE, TO) is None
    (groups,) = other_sizes.resized("group_norm_silu", (shaped(1, 512, 16384),), BASE, TO) or ()
    assert groups.shape == (1, 512, 15808)


def _swapped(one: Shaped) -> tuple[int, ...]:
    batch, row, head, lane = one.strides
    return batch, head, row, lane


def test_gaps_between_rows_stay() -> None:
    whole = torch.empty(2, 4096, 1920, dtype=torch.float16, device="meta")
    q, _, v = (part.view(2, 4096, 10, 64).transpose(1, 2) for part in whole.chunk(3, dim=-1))
    wanted = torch.empty(2, 3952, 1920, dtype=torch.float16, device="meta")
    to = wanted.chunk(3, dim=-1)[2].view(2, 3952, 10, 64).transpose(1, 2)
    for given in (q, v, q.expand_as(q)):
        (made,) = other_sizes.resized("attention", (Shaped.of(given),), BASE, TO) or ()
        assert (made.shape, made.strides) == (tuple(to.shape), to.stride())
    once = q[:1].expand(2, -1, -1, -1)
    (made,) = other_sizes.resized("attention", (Shaped.of(once),), BASE, TO) or ()
    assert made.strides[0] == 0


def test_a_stand_in_lies_as_what_it_stands_for() -> None:
    whole = torch.empty(2, 64, 96, dtype=torch.float16)
    for given in (whole, whole[:, 1:, 8:24], whole.flatten()[1:33], whole.transpose(1, 2)):
        like = Shaped.of(given)
        made = _on_paper.tensor(like)
        assert (made.shape, made.stride(), made.dtype) == (given.shape, given.stride(), given.dtype)
        assert (made.data_ptr() - given.data_ptr()) % 16 == 0 and Shaped.of(made) == like
        assert other_sizes.heard(other_sizes._told(like)) == like


def test_sizes_are_those_of_the_same_kind_of_model() -> None:
    large, small = (set(sizes) for sizes in other_sizes.SIZES)
    small, large = sorted((small, large), key=lambda sizes: min(high * wide for high, wide in sizes))
    assert {(8 * high, 8 * wide) for high, wide in other_sizes.others((128, 128))} == large - {(1024, 1024)}
    assert {(8 * high, 8 * wide) for high, wide in other_sizes.others((64, 96))} == small - {(512, 768)}
    assert other_sizes.others((8, 8)) == [] == other_sizes.others((512, 512))


def test_calls_are_taken_down_once_and_only_where_asked_for() -> None:
    x, calls = torch.zeros(2, 3, 8), ahead.Calls()
    args = x, None, None, None, 1e-5

    def run() -> None:
        for _ in range(2):
            layer_norm.layer_norm(*args)
        layer_norm.layer_norm.route(x[:1], None, None, None, 1e-5)

    ahead.build(run, calls=calls)
    assert [(op, told[0].shape) for op, told in calls] == [
        ("layer_norm", (2, 3, 8)),
        ("layer_norm", (1, 3, 8)),
    ]
    ahead.build(run)
    layer_norm.layer_norm(x[:, :2], *args[1:])
    assert len(calls) == 2


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """The jobs that were begun, on a machine that seems to have a GPU; each is done at once."""
    jobs: list[Job] = []

    def give(job: Job, most: int) -> None:
        assert most == 1
        jobs.append(job)
        job.then(job)

    folder = {"folder": str(tmp_path)}
    monkeypatch.delenv(other_sizes.VARIABLE, raising=False)
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    monkeypatch.setattr(other_sizes, "_begun", set())
    monkeypatch.setattr(other_sizes, "_crew", SimpleNamespace(give=give))
    monkeypatch.setattr(other_sizes, "_folder", lambda: folder)
    monkeypatch.setattr(_triton, "absent", lambda: None)
    monkeypatch.setattr(other_sizes.state, "identity", lambda kind: "a GPU")
    monkeypatch.setattr(other_sizes, "_job", _told)
    return jobs


def _told(base: Any, sizes: Any, calls: ahead.Calls, index: int) -> dict[str, Any]:
    told = [[op, [other_sizes._told(arg) for arg in args]] for op, args in calls]
    return {"base": base, "sizes": sizes, "calls": told, "ready": {"layer_norm": ["triton"]}}


def _input(height: int, width: int, cuda: bool = True) -> Any:
    where = torch.device("cuda" if cuda else "cpu")
    return SimpleNamespace(dim=lambda: 4, device=where, shape=(2, 4, height, width), get_device=lambda: 0)


def _calls(*shapes: tuple[int, ...]) -> ahead.Calls:
    return dict.fromkeys(("layer_norm", (shaped(*shape), 1e-5)) for shape in shapes)


def test_it_is_begun_once_for_all_sizes_and_not_again_once_it_is_on_disk(given: list[Job]) -> None:
    assert other_sizes.begin([_input(128, 128)], _calls((2, 4096, 640)))
    assert not other_sizes.begin([_input(128, 128)], _calls((2, 4096, 640)))
    assert not other_sizes.begin([_input(104, 152)], _calls((2, 3952, 640)))
    assert other_sizes.begin([_input(128, 128)], _calls((2, 1024, 1280)))
    assert other_sizes.begin([_input(128, 128)], _calls((1, 4096, 640)))
    assert len(given) == 3
    other_sizes._begun.clear()  # as another process
    assert not other_sizes.begin([_input(104, 152)], _calls((2, 3952, 640)))


def test_a_job_that_failed_is_tried_by_the_next_process(
    given: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(job: Job, most: int) -> None:
        given.append(job)
        job.end = "died (signal 9)"
        job.then(job)

    monkeypatch.setattr(other_sizes, "_crew", SimpleNamespace(give=give))
    for _ in range(2):
        other_sizes._begun.clear()
        assert other_sizes.begin([_input(128, 128)], _calls((2, 4096, 640)))


def test_nothing_is_begun_where_it_is_off_or_of_no_use(
    given: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _calls((2, 4096, 640))
    assert not other_sizes.begin([_input(128, 128, cuda=False)], calls)
    assert not other_sizes.begin([torch.zeros(2, 77, 768)], calls)
    assert not other_sizes.begin([_input(8, 8)], calls)
    assert not other_sizes.begin([_input(128, 128)], {})
    with monkeypatch.context() as changed:
        changed.setenv(other_sizes.VARIABLE, "0")
        assert not other_sizes.begin([_input(128, 128)], calls)
    with monkeypatch.context() as changed:
        changed.setattr(_triton, "absent", lambda: "triton is not installed")
        assert not other_sizes.begin([_input(128, 128)], calls)
    with monkeypatch.context() as changed:
        changed.setenv(other_sizes.state.INSIDE, "1")
        assert not other_sizes.begin([_input(128, 128)], calls)
    assert not given


class _Process:
    """In place of a worker's process."""

    ended, there, back = 0, True, 0

    def step_back(self) -> None:
        self.back += 1

    def alive(self) -> bool:
        return self.there

    def close(self) -> None:
        self.ended += 1


@pytest.fixture
def started(given: list[Job], monkeypatch: pytest.MonkeyPatch) -> list[_Process]:
    """The processes that were started, on such a machine."""
    made: list[_Process] = []

    def start(*args: Any) -> _Process:
        made.append(_Process())
        return made[-1]

    monkeypatch.setattr(other_sizes, "Worker", start)
    monkeypatch.setattr(other_sizes, "_spare", [])
    monkeypatch.setattr(other_sizes, "_expected", False)
    monkeypatch.setattr(other_sizes, "SPARE_S", 3600.0)
    return made


def test_the_process_is_started_once_before_it_is_wanted_and_taken_then(started: list[_Process]) -> None:
    assert [other_sizes.expect(kind) for kind in ("cpu", "mps", "cuda", "cuda")] == [
        False,
        False,
        True,
        False,
    ]
    assert len(started) == 1
    assert other_sizes._worker() is started[0]
    assert other_sizes._worker() is started[1]
    other_sizes.dismiss()
    assert [(one.ended, one.back) for one in started] == [(0, 1), (0, 1)]


def test_one_that_died_meanwhile_is_replaced(started: list[_Process]) -> None:
    other_sizes.expect("cuda")
    started[0].there = False
    assert other_sizes._worker() is started[1]
    assert (started[0].ended, started[1].ended) == (1, 0)


def test_none_is_started_where_something_was_built_before(started: list[_Process]) -> None:
    other_sizes.begin([_input(128, 128)], _calls((2, 4096, 640)))
    assert not other_sizes.expect("cuda")
    assert not started


def test_one_that_finds_nothing_to_do_is_ended(started: list[_Process]) -> None:
    other_sizes.expect("cuda")
    other_sizes.begin([torch.zeros(2, 77, 768)], _calls((2, 77, 768)))  # a text encoder says nothing of it
    assert started[0].ended == 0
    other_sizes._begun.clear()
    for _ in range(2):
        other_sizes.begin([_input(128, 128)], _calls((2, 4096, 640)))
    assert started[0].ended == 1


def test_none_is_started_where_it_is_off_or_cannot_be(
    started: list[_Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setenv(other_sizes.VARIABLE, "0")
        assert not other_sizes.expect("cuda")
    with monkeypatch.context() as changed:
        changed.setattr(_triton, "absent", lambda: "triton is not installed")
        assert not other_sizes.expect("cuda")

    def fails(*args: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(other_sizes, "Worker", fails)
    assert not other_sizes.expect("cuda")
    assert not started


def test_it_is_known_what_is_called_before_all_is_built() -> None:
    x, calls, told = torch.zeros(2, 3, 8), ahead.Calls(), []
    run = lambda: layer_norm.layer_norm(x, None, None, None, 1e-5)  # noqa: E731
    ahead.build(run, calls=calls, known=lambda: told.append((len(calls), ahead.gathering())))
    assert told == [(1, None)]

    def fails() -> None:
        run()
        raise ValueError("of the values that it was given")

    ahead.build(fails, known=lambda: told.append(()))
    assert len(told) == 2

    def breaks() -> None:
        raise RuntimeError("a fault of the device")

    with pytest.raises(RuntimeError, match="a fault"):
        ahead.build(breaks, known=lambda: told.append(()))
    assert len(told) == 2
    ahead.build(run, known=breaks)  # what somebody else begins is not worth the call


def _job() -> dict[str, Any]:
    """What an H100's process would be told of a norm, whose kernel serves all sizes, and of attention, whose
    last tile is full at the first size alone."""
    norm = [shaped(2, 4096, 640), None, shaped(640), shaped(640), 1e-5]
    heads = [shaped(2, 20, 1024, 64) for _ in range(3)]
    return {
        "base": BASE,
        "sizes": [TO, (112, 144)],
        "calls": [
            [name, [other_sizes._told(arg) for arg in args]]
            for name, args in (("layer_norm", norm), ("attention", [*heads, None, False, None]))
        ],
        "ready": {"layer_norm": ["triton"], "attention": ["tiled"]},
        "tuned": {},
        "named": {},
        "target": ["cuda", 90, 32],
        "capability": [9, 0],
        "processors": 132,
    }


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_process_builds_into_tritons_cache_without_a_device(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    worker = Worker({**other_sizes.ENVIRONMENT, "TRITON_CACHE_DIR": str(cache)}, other_sizes.COMMAND)
    first, second = Job(_job(), 120.0), Job(_job(), 120.0)
    try:
        worker.run(first)
        built = sorted(cache.glob("*/*.cubin"))
        worker.run(second)
    finally:
        worker.close()
    assert (first.end, second.end, first.failed()) == (None, None, False)
    assert [line["case"] for line in first.lines if "case" in line] == ["104x152", "112x144"]
    assert len(built) == 1 and sorted(cache.glob("*/*.cubin")) == built
    assert "attention" in built[0].with_suffix(".ttir").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform == "win32", reason="processes are looked for as POSIX has them")
def test_a_program_that_ends_meanwhile_ends_it_quietly(tmp_path: Path) -> None:
    text = (
        "import json, sys, time\n"
        "from clearway.ops import other_sizes, _workers\n"
        "from clearway.ops._workers import Job\n"
        "jobs = [Job(json.loads(sys.argv[1]), 60.0) for _ in range(2)]\n"
        "[other_sizes._crew.give(job, 1) for job in jobs]\n"
        "while not len(_workers._alive): time.sleep(0.01)\n"
        "print(*[worker._process.pid for worker in _workers._alive])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, json.dumps(_job())],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "TRITON_CACHE_DIR": str(tmp_path),
        },
    )
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
