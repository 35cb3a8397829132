"""Processes that take job after job: whose a crash, a hang or silence is, and that the others are done."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from clearway.ops import _workers
from clearway.ops._workers import Crew, Job, Worker

SCRIPT = """
import json, os, sys, time
for text in sys.stdin:
    job = json.loads(text)
    print("a library says something without being asked")
    print(json.dumps({"case": job["name"], "begin": True}), flush=True)
    if job["name"] == "aborts": os.abort()
    if job["name"] == "hangs": time.sleep(3600)
    if job["name"] == "leaves": print("no such kernel", file=sys.stderr); os._exit(3)
    line = {"case": job["name"], "problem": job.get("problem", ""), "pid": os.getpid()}
    print(json.dumps(line), flush=True)
    print(json.dumps({"end": True, **job.get("more", {})}), flush=True)
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.py"
    file.write_text(SCRIPT)
    monkeypatch.setattr(_workers, "COMMAND", (str(file),))


def job(name: str, **more: Any) -> Job:
    return Job({"name": name, **more}, 2.0)


def pid(done: Job) -> int:
    found: int = next(line["pid"] for line in done.lines if "pid" in line)
    return found


def test_one_process_takes_job_after_job_and_then_ends() -> None:
    worker = Worker()
    first, second = job("one"), job("two", more={"scarce": "memory"})
    worker.run(first)
    worker.run(second)
    assert pid(first) == pid(second) and (first.end, second.end) == (None, None)
    assert (first.failed(), second.failed(), second.scarce) == (False, True, "memory")
    assert [line["case"] for line in first.lines] == ["one", "one"] and first.seconds > 0
    worker.close()
    assert worker._process.poll() is not None and worker not in _workers._alive


@pytest.mark.parametrize(
    "name, words",
    [
        ("aborts", "died (signal 6)"),
        ("hangs", "was silent for 2 s"),
        ("leaves", "died (exit code 3, no"),
    ],
)
def test_how_it_ended_is_said_and_the_next_job_of_a_dead_one_fails(name: str, words: str) -> None:
    worker = Worker()
    worker.run(job("one"))
    bad = job(name)
    worker.run(bad)
    assert words in str(bad.end) and bad.lines[-1] == {"case": name, "begin": True}
    worker.close()
    assert worker._process.poll() is not None
    after = job("two")
    worker.run(after)
    assert after.end is not None and not after.lines


def test_the_rest_of_a_list_is_done_by_a_fresh_process() -> None:
    """One worker at a time: each crash is its own job's, told by a fresh process, and the others are done."""
    jobs = [job(name) for name in ("one", "aborts", "two", "leaves", "three", "four")]
    jobs.append(job("five", problem="it is 3 from float64"))
    crew = Crew(Worker)
    for one in jobs:
        crew.give(one, 1)
    for one in jobs:
        assert one.done.wait(60)
    assert [one.end and one.end[:6] for one in jobs] == [None, "died (", None, "died (", None, None, None]
    assert [one.failed() for one in jobs] == [False, True, False, True, False, False, True]
    assert pid(jobs[0]) != pid(jobs[2]) != pid(jobs[4]) == pid(jobs[5]) != pid(jobs[6])


def test_as_many_at_once_as_allowed() -> None:
    at_work, most, lock, go = 0, 0, threading.Lock(), threading.Barrier(3)

    class Slow:
        jobs = 0

        def run(self, job: Job) -> None:
            nonlocal at_work, most
            with lock:
                at_work += 1
                most = max(most, at_work)
            go.wait(60)
            with lock:
                at_work -= 1

        def close(self) -> None:
            pass

    crew, jobs = Crew(Slow), [job(str(number)) for number in range(9)]
    for one in jobs:
        crew.give(one, 3)
    for one in jobs:
        assert one.done.wait(60)
    assert most == 3


def test_who_waits_goes_on_whatever_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    told: list[str | None] = []
    one = job("one")
    one.then = lambda done: told.append(done.end)
    crew = Crew(Worker)
    crew.give(one, 1)
    assert one.done.wait(60) and "could not be started" in str(told[0])


def test_a_crew_out_of_work_takes_more() -> None:
    crew = Crew(Worker)
    for name in ("one", "two"):
        one = job(name)
        crew.give(one, 1)
        assert one.done.wait(60) and not one.failed()


def test_a_bug_in_what_follows_leaves_nobody_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    def bug(done: Job) -> None:
        raise LookupError("a bug")

    jobs = [job("one"), job("two")]
    jobs[0].then = bug
    crew = Crew(Worker)
    for one in jobs:
        crew.give(one, 1)
    assert all(one.done.wait(60) for one in jobs) and not jobs[1].failed()
    assert "a bug" in capsys.readouterr().err


class Ending:
    """A worker without a process that takes its time to end."""

    jobs = 0
    made: list[Ending]
    go: threading.Event

    def __init__(self) -> None:
        self.ended = False
        Ending.made.append(self)

    def run(self, job: Job) -> None:
        job.lines = [{"case": job.content["name"], "problem": ""}]

    def close(self) -> None:
        Ending.go.wait(60)
        self.ended = True


@pytest.fixture
def ending() -> type[Ending]:
    Ending.made, Ending.go = [], threading.Event()
    return Ending


def test_a_worker_is_at_work_until_its_process_is_gone(ending: type[Ending]) -> None:
    """What it holds of a device is held till then; a job that comes meanwhile is done by a fresh one."""
    crew, waited = Crew(ending), threading.Event()
    first, second = job("one"), job("two")
    assert crew.give(first, 1) and first.done.wait(60)
    thread = threading.Thread(target=lambda: (crew.wait(), waited.set()))
    thread.start()
    assert not waited.wait(0.05) and crew.at_work == 1
    assert crew.give(second, 1) and not second.done.wait(0.05)
    ending.go.set()
    assert second.done.wait(60) and waited.wait(60) and crew.at_work == 0
    assert [one.ended for one in ending.made] == [True, True]
    thread.join()


def test_without_room_for_one_a_job_is_taken_only_by_who_is_at_work(ending: type[Ending]) -> None:
    crew, first, second = Crew(ending), job("one"), job("two")
    assert not crew.give(first, 0) and not first.done.is_set() and not ending.made
    assert crew.give(first, 1) and first.done.wait(60)
    assert crew.give(second, 0)
    ending.go.set()
    crew.wait()
    assert second.done.is_set()


def test_more_are_hired_for_what_waits() -> None:
    at_work, go = threading.Semaphore(0), threading.Event()

    class Slow(Ending):
        def run(self, job: Job) -> None:
            at_work.release()
            go.wait(60)

    Ending.made, Ending.go = [], go
    crew, jobs = Crew(Slow), [job(str(number)) for number in range(4)]
    for one in jobs:
        crew.give(one, 1)
    assert at_work.acquire(timeout=60)
    crew.hire(0)
    crew.hire(3)
    assert all(at_work.acquire(timeout=60) for _ in range(2)) and crew.at_work == 3
    crew.hire(9)
    assert at_work.acquire(timeout=60) and crew.at_work == 4  # no more than there are jobs
    go.set()
    crew.wait()
    assert all(one.done.is_set() for one in jobs) and all(one.ended for one in Ending.made)


def test_a_bug_in_what_follows_leaves_no_process_behind(
    ending: type[Ending], capsys: pytest.CaptureFixture[str]
) -> None:
    def bug(done: Job) -> None:
        raise LookupError("a bug")

    ending.go.set()
    crew, one = Crew(ending), job("one")
    one.then = bug
    crew.give(one, 1)
    crew.wait()
    assert [worker.ended for worker in ending.made] == [True] and "a bug" in capsys.readouterr().err
