"""Processes forked from one that has read PyTorch: as ones started afresh, whatever becomes of either."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
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


IGNORED = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
BLOCKED = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})"


def _script(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, with a minute to end in."""
    return subprocess.run(
        [sys.executable, "-P", "-c", "import os, signal, sys\n" + text, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("before", ["pass", IGNORED, BLOCKED])
def test_each_fork_is_told_of_and_what_became_of_it(before: str) -> None:
    done = _script(
        f"{before}\n"
        "from clearway.ops.forks import each\n"
        "tasks = [lambda: 1 / 0, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: False, lambda: True]\n"
        "print(sorted(each(tasks * 2, 2)))\n"
    )
    expected = [(number, number % 4 == 3) for number in range(8)]
    assert (done.returncode, done.stdout.strip()) == (0, str(expected))


@pytest.mark.parametrize("before", [IGNORED, BLOCKED])
def test_whatever_a_program_does_with_its_signals_it_ends(before: str) -> None:
    done = _script(
        f"{before}\n"
        "from clearway.ops import forks\n"
        "from clearway.ops._workers import Worker\n"
        "forks.expect()\n"
        "one, left = [Worker({'CUDA_VISIBLE_DEVICES': ''}) for _ in range(2)]\n"
        "one.close()\n"
        "print(one.forked, one.alive(), left.alive())\n"
    )
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "True False True")


def test_a_program_that_forks_itself_leaves_them_to_the_first() -> None:
    """Its own child ends at once, ends nothing of them, and forks nothing from her."""
    done = _script(
        "from clearway.ops import forks\n"
        "from clearway.ops._workers import Worker\n"
        "forks.expect()\n"
        "worker = Worker({'CUDA_VISIBLE_DEVICES': ''})\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(forks.there() or forks.forked('clearway.ops.selftest', {}) is not None)\n"
        "print(os.waitpid(child, 0)[1], worker.alive(), Worker().forked)\n"
    )
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "0 True True")


def _stand_in(monkeypatch: pytest.MonkeyPatch) -> tuple[forks.Mother, socket.socket]:
    """A mother's program side, and the end of the line at which nobody is yet."""
    line, hers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = object.__new__(forks.Mother)
    made._line, made._answered, made._ready = line, threading.Condition(), threading.Event()
    made._numbers, made._asked, made._children, made.gone = itertools.count(), {}, {}, False
    made._process = subprocess.Popen([sys.executable, "-c", ""])
    made._process.wait()
    made._ready.set()
    threading.Thread(target=made._listen, daemon=True).start()
    return made, hers


def _request(hers: socket.socket) -> int:
    """The number of the next request; its streams are closed."""
    data, streams, _, _ = socket.recv_fds(hers, forks.LARGEST, 3)
    for one in streams:
        os.close(one)
    number: int = json.loads(data)["number"]
    return number


def _answer(hers: socket.socket, **said: Any) -> None:
    hers.send(json.dumps(said).encode())


def _shut(child: Any) -> None:
    for stream in (child.stdin, child.stdout, child.stderr):
        stream.close()


@pytest.mark.parametrize("late", [False, True])
def test_one_who_dies_as_she_answers_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Whichever is heard first: that a child began, or that nobody is there any more."""
    made, hers = _stand_in(monkeypatch)

    def work() -> None:
        number = _request(hers)
        if not late:
            _answer(hers, began=made._process.pid, number=number)
        hers.close()

    threading.Thread(target=work, daemon=True).start()
    child = made.fork("becomes", {})
    assert (child is None) == late
    if child is not None:  # she may be heard to be gone later
        ended = child.wait(20)
        _shut(child)
        assert ended == 1
    assert made.gone


def test_answers_are_told_apart_by_number_and_one_too_late_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, hers = _stand_in(monkeypatch)
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: made.fork(name, {})})) for name in "ab"
    ]
    numbers = []
    for one in threads:
        one.start()
        numbers.append(_request(hers))
    _answer(hers, began=71, number=numbers[1])
    _answer(hers, began=70, number=numbers[0])
    for one in threads:
        one.join(20)
    assert (found["a"].pid, found["b"].pid) == (70, 71)
    _answer(hers, ended=71, code=-9)
    assert found["b"].wait(20) == -9 and found["a"].poll() is None
    _answer(hers, ended=70, code=0)
    assert found["a"].wait(20) == 0
    monkeypatch.setattr(forks, "READY_S", 0.05)
    assert made.fork("c", {}) is None and made.gone  # she is asked for no more
    _answer(hers, began=72, number=_request(hers))
    _answer(hers, ended=72, code=0)
    assert made.fork("d", {}) is None
    hers.close()
    for child in found.values():
        _shut(child)


def test_one_who_reads_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "READY_S", 0.2)
    for large in (False, True):
        made, hers = _stand_in(monkeypatch)
        began = time.monotonic()
        threads = [
            threading.Thread(target=made.fork, args=("becomes", {"LONG": "x" * 100_000 * large}))
            for _ in range(4)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(20)
        assert not any(one.is_alive() for one in threads) and time.monotonic() - began < 20
        hers.close()


def test_a_fork_of_a_program_begins_anew_with_its_own_self_tests() -> None:
    """What another thread held or had begun when it forked is the first one's."""
    done = _script(
        "import threading, time\n"
        "from clearway import device\n"
        "from clearway.ops import attention_torch, _workers, verdicts, elsewhere\n"
        "from clearway.ops._workers import Crew, Job\n"
        "began, may = threading.Event(), threading.Event()\n"
        "def held():\n"
        "    with attention_torch.only('math'):\n"
        "        began.set(); may.wait(0.5)\n"
        "class Slow:\n"
        "    def run(self, job): time.sleep(30)\n"
        "    def close(self): pass\n"
        "crew = Crew(Slow)\n"
        "crew.give(Job({}, 1.0), 1)\n"
        "verdicts._pending['x'] = Job({}, 1.0)\n"
        "elsewhere._builder = object()\n"
        "before = device.switches()\n"
        "threading.Thread(target=held).start(); began.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    crew.wait()\n"
        "    fresh = not verdicts._pending and elsewhere._builder is None and crew.at_work == 0\n"
        "    os._exit(0 if fresh and device.switches() == before else 1)\n"
        "print(os.waitpid(child, 0)[1], crew.at_work, len(verdicts._pending))\n"
        "verdicts._pending.clear(); elsewhere._builder = None\n"
    )
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "0 1 1")


def test_where_no_more_descriptors_can_be_had_none_is_lost(
    hers: forks.Mother, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, made = os.pipe, []

    def few() -> tuple[int, int]:
        if len(made) == 2:
            raise OSError("too many open files")
        made.append(pipe())
        return made[-1]

    with monkeypatch.context() as changed:
        changed.setattr(os, "pipe", few)
        assert hers.fork("becomes", dict(os.environ)) is None
    for one in [fd for pair in made for fd in pair]:
        with pytest.raises(OSError):
            os.fstat(one)


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
