"""Processes forked from one that has read PyTorch: as ones started afresh, whatever becomes of either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clearway.ops import forks
from clearway.ops._workers import Crew, Job, Worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")

MODULE = """
import json, os, sys, time

def process():
    for text in sys.stdin:
        job = json.loads(text)
        if job.get("do") == "abort": os.abort()
        if job.get("do") == "raise": raise ValueError("no such kernel")
        if job.get("do") == "leave": return 3
        line = {"case": "one", "pid": os.getpid(), "group": os.getpgid(0), "said": os.environ.get("SAID"),
                "read": sorted(name for name in ("torch", "clearway.ops.attention") if name in sys.modules),
                "problem": job.get("problem", "")}
        print(json.dumps(line), flush=True)
        print(json.dumps({"end": True}), flush=True)
    return 0

if __name__ == "__main__":
    sys.exit(process())
"""
COMMAND = ("-P", "-m", "becomes")


@pytest.fixture(scope="module")
def mother(tmp_path_factory: pytest.TempPathFactory) -> Iterator[forks.Mother]:
    folder = tmp_path_factory.mktemp("forked")
    (folder / "becomes.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        made = forks.Mother()
        yield made
        made.close()
    assert made._process.wait(30) == 0


@pytest.fixture
def hers(mother: forks.Mother, monkeypatch: pytest.MonkeyPatch) -> forks.Mother:
    """Workers are forked from her."""
    monkeypatch.setattr(forks, "_mother", mother)
    return mother


def _done(worker: Worker, **content: Any) -> Job:
    job = Job(content, 20.0)
    worker.run(job)
    return job


def test_a_fork_is_a_worker_like_any_other(hers: forks.Mother) -> None:
    worker = Worker({"SAID": "yes"}, COMMAND)
    first, second = _done(worker), _done(worker, problem="wrong")
    assert worker.forked and worker.alive()
    (line,) = first.lines
    assert line["said"] == "yes" and line["read"] == ["clearway.ops.attention", "torch"]
    assert line["pid"] == line["group"] == worker._process.pid
    assert (first.end, first.failed(), second.failed()) == (None, False, True)
    worker.close()
    assert not worker.alive()
    with pytest.raises(ProcessLookupError):
        os.kill(line["pid"], 0)


@pytest.mark.parametrize(
    "what, words",
    [("abort", f"signal {signal.SIGABRT:d}"), ("raise", "no such kernel"), ("leave", "exit code 3")],
)
def test_how_it_ended_is_said(hers: forks.Mother, what: str, words: str) -> None:
    worker = Worker(None, COMMAND)
    assert words in (_done(worker, do=what).end or "")
    worker.close()


def test_one_that_ends_when_its_input_does(hers: forks.Mother) -> None:
    child = hers.fork("becomes", dict(os.environ))
    assert child is not None and child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.stdin.close()
    assert child.wait(20) == 0 == child.poll()
    assert child.stdout.read() == "" == child.stderr.read()
    child.stdout.close()
    child.stderr.close()


def test_many_at_once_are_each_told_apart(hers: forks.Mother) -> None:
    made: list[Worker] = []
    threads = [threading.Thread(target=lambda: made.append(Worker(None, COMMAND))) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    jobs = [_done(one) for one in made]
    assert len({job.lines[0]["pid"] for job in jobs}) == 6 and all(one.forked for one in made)
    for one in made:
        one.close()


def test_a_failure_in_a_fork_is_believed_only_from_a_process_started_afresh(
    hers: forks.Mother, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Worker] = []

    def start() -> Worker:
        started.append(Worker(None, COMMAND))
        return started[-1]

    lost: list[str] = []

    def distrust() -> None:
        lost.append("trust")
        forks._mother = None

    monkeypatch.setattr(forks, "distrust", distrust)
    crew, job = Crew(start), Job({"do": "leave"}, 20.0)
    crew.give(job, 1)
    job.done.wait(60)
    crew.wait()
    assert lost == ["trust"]
    assert [one.forked for one in started] == [True, False] and "exit code 3" in (job.end or "")


def test_scripts_and_programs_without_a_mother_start_afresh(
    hers: forks.Mother, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "becomes.py"
    script.write_text(MODULE)
    worker = Worker(None, (str(script),))
    assert not worker.forked and _done(worker).end is None
    worker.close()
    monkeypatch.setattr(forks, "_mother", None)
    worker = Worker(None, COMMAND)
    assert not worker.forked and _done(worker).end is None
    worker.close()


def test_an_environment_that_is_too_large_starts_afresh(hers: forks.Mother) -> None:
    assert hers.fork("becomes", {"LONG": "x" * forks.LARGEST}) is None
    child = hers.fork("becomes", dict(os.environ))  # and the next goes on
    assert child is not None
    child.stdin.close()
    assert child.wait(20) == 0
    child.stdout.close()
    child.stderr.close()


def test_one_that_is_killed_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, mother: forks.Mother
) -> None:
    made = forks.Mother()
    monkeypatch.setattr(forks, "_mother", made)
    left, gone = Worker(None, COMMAND), Worker(None, COMMAND)
    os.kill(made._process.pid, signal.SIGKILL)
    made._process.wait(20)
    for _ in range(1000):
        if made.gone:
            break
        time.sleep(0.01)
    assert forks.forked("becomes", {}) is None
    assert _done(left).end is None
    gone.close()
    left.close()
    assert not left.alive() and not gone.alive()


def test_closed_she_waits_for_what_was_forked_and_then_ends(
    monkeypatch: pytest.MonkeyPatch, mother: Any
) -> None:
    made = forks.Mother()
    monkeypatch.setattr(forks, "_mother", made)
    worker = Worker(None, COMMAND)
    assert worker.forked
    forks.distrust()
    assert not forks.there() and forks.forked("becomes", {}) is None
    assert _done(worker).end is None
    assert made._process.poll() is None
    assert "exit code 3" in (_done(worker, do="leave").end or "")
    worker.close()
    assert made._process.wait(20) == 0


def test_a_program_that_ends_ends_her_and_all_of_them() -> None:
    text = (
        "from clearway.ops import forks\n"
        "from clearway.ops._workers import Worker\n"
        "forks.expect()\n"
        "workers = [Worker({'CUDA_VISIBLE_DEVICES': ''}) for _ in range(2)]\n"
        "assert all(one.forked for one in workers)\n"
        "print(forks._mother._process.pid, *[one._process.pid for one in workers])\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", text], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    for pid in map(int, done.stdout.split()):
        for _ in range(500):
            if _gone(pid):
                break
            time.sleep(0.01)
        assert _gone(pid)


def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def test_a_fork_that_dies_or_fails_is_told_of_like_any_other() -> None:
    text = (
        "import os, signal\n"
        "from clearway.ops.forks import each\n"
        "tasks = [lambda: 1 / 0, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: None] * 3\n"
        "print(sorted(each(tasks, 2)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", text], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(list(range(9))))


def test_she_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(forks, "_mother", None)
    monkeypatch.setattr(forks, "Mother", lambda: made.append(1) or made)
    assert forks.expect() and not forks.expect() and made == [1]
    monkeypatch.setattr(forks, "_mother", None)

    def fails() -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(forks, "Mother", fails)
    assert not forks.expect() and not forks.there()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not forks.expect()


def test_what_has_opened_a_device_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearway.ops import _mother

    assert not _mother.touches_a_device()
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidia0")
    assert _mother.touches_a_device()
