"""Verdicts are found in other processes, side by side, before they are needed; and the program goes on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clearway import home
from clearway.ops import _allowance, _workers, discover, state, verdicts
from clearway.ops._workers import Crew, Job
from clearway.ops.contract import Implementation, recording
from ops.faulty import faulty_double

EXPECTED = {
    "aborts": "signal 6",
    "hangs": "was silent for",
    "leaves_quietly": "exit code 0",
    "green": "is allowed",
    "leaves_a_tail": "not written",
    "changes_inputs": "changed its inputs",
    "other_layout": "strides",
    "does_not_build": "the compiler says no",
    "takes_all": "should have refused",
}


def named(name: str) -> Implementation:
    return next(i for i in faulty_double.implementations if i.name == name)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty state folder, and a process that knows nothing."""
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    state.forget()
    yield tmp_path
    state.forget()


@pytest.fixture
def on_a_gpu(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The faulty implementations taken for kernels of a GPU with room for three workers."""
    monkeypatch.setattr(verdicts, "_candidates", lambda name, kind: list(faulty_double.implementations))
    monkeypatch.setattr(_allowance, "most", lambda kind, share=4: 3)
    monkeypatch.setattr(verdicts, "SILENCE_S", 1.5)
    monkeypatch.setattr(verdicts, "_expected", {})
    monkeypatch.setattr(verdicts, "_held", {})
    monkeypatch.setattr(verdicts, "ON_DEMAND", ())
    return fresh


def finished() -> None:
    for job in list(verdicts._pending.values()):
        assert job.done.wait(120)


def test_whatever_is_wrong_is_disabled_and_the_program_goes_on(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verdicts, "SILENCE_S", 1.5)
    routes: dict[str, int] = {}
    x = torch.arange(6.0).reshape(2, 3)
    with recording(routes):
        assert torch.equal(faulty_double(x), x * 2)
        assert torch.equal(faulty_double(x), x * 2)
    assert routes == {"faulty_double/sound": 2}
    for name, words in EXPECTED.items():
        verdict = state.known(named(name), "cpu", torch.float32)
        assert verdict is not None and not verdict.sound and words in verdict.reason, (name, verdict)
        assert state.known(named(name), "cpu", torch.float16) is None
    said = capsys.readouterr().err
    assert [said.count(f"faulty_double/{name} is not used in float32") for name in EXPECTED] == [1] * 9
    assert len(state.losses()) == len(EXPECTED)
    decisions = {d.implementation: d for d in faulty_double.explain(x)}
    assert decisions["sound"].taken and "self-test" in decisions["aborts"].reason
    state.forget()  # another process on this machine: it believes the verdicts, and tests nothing
    monkeypatch.setattr(verdicts, "found", None)
    assert faulty_double.route(x).name == "sound"
    assert "signal 6" in state.known(named("aborts"), "cpu").reason


def test_all_are_tested_at_once_and_a_crash_is_the_one_that_had_begun(on_a_gpu: Path) -> None:
    """Eleven implementations by three processes: those that end theirs are named, the others are judged."""
    assert verdicts.prepare(("faulty_double",), "cpu", torch.float32) == 11
    assert verdicts.prepare(("faulty_double",), "cpu", torch.float32) == 0  # under way
    finished()
    for name, words in EXPECTED.items():
        verdict = state.known(named(name), "cpu", torch.float32)
        assert verdict is not None and not verdict.sound and words in verdict.reason, (name, verdict)
    assert state.known(named("sound"), "cpu", torch.float32).sound
    assert verdicts.prepare(("faulty_double",), "cpu", torch.float32) == 0  # known
    assert verdicts.times()["checks_s"]["faulty_double/sound float32"] > 0


def test_nothing_is_begun_on_the_cpu_and_in_a_self_test(
    on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "_crew", None)
    monkeypatch.setattr(verdicts, "ON_DEMAND", ("cpu",))
    assert verdicts.prepare(("faulty_double", "no op"), "cpu", torch.float32) == 0
    assert list(verdicts._expected) == ["faulty_double"]
    monkeypatch.setattr(verdicts, "ON_DEMAND", ())
    monkeypatch.setenv(state.INSIDE, "1")
    assert verdicts.prepare(("faulty_double",), "cpu", torch.float32) == 0


class Fake:
    """A worker without a process: says of each job what `answers` has for it."""

    made: list[Fake]
    answers: dict[str, Callable[[Fake, Job], None]]

    def __init__(self) -> None:
        self.jobs = 0
        self.closed = False
        Fake.made.append(self)

    def run(self, job: Job) -> None:
        self.jobs += 1
        job.lines, job.end, job.scarce = [], None, None
        answer = Fake.answers.get(job.content["implementation"])
        if answer is not None:
            answer(self, job)
        if job.end is None and job.scarce is None and not job.lines:
            job.lines = [{"case": "wide float32", "dtype": "float32", "problem": ""}]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.made, Fake.answers = [], {}
    monkeypatch.setattr(verdicts, "_crew", Crew(Fake))
    return Fake


def test_a_failure_after_other_jobs_is_believed_only_from_a_fresh_process(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first leaves the process in ruins; the second dies of it, the third is wrong by itself."""
    ruined: list[Fake] = []

    def ruin(worker: Fake, job: Job) -> None:
        ruined.append(worker)

    def dies_of_it(worker: Fake, job: Job) -> None:
        if worker in ruined:
            job.end = "died (signal 11)"

    def wrong(worker: Fake, job: Job) -> None:
        job.lines = [{"case": "wide float32", "dtype": "float32", "problem": "it is 3 from float64"}]

    fake.answers = {"aborts": ruin, "hangs": dies_of_it, "green": wrong}
    monkeypatch.setattr(_allowance, "most", lambda kind, share=4: 1)
    verdicts.prepare(("faulty_double",), "cpu", torch.float32)
    finished()
    sound = {
        one.name for one in faulty_double.implementations if not state.ruled_out(one, "cpu", torch.float32)
    }
    assert sound == {one.name for one in faulty_double.implementations} - {"green"}
    deadline = time.monotonic() + 60
    while not all(worker.closed for worker in fake.made) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(worker.closed for worker in fake.made)


def test_a_wait_is_for_one_verdict_and_it_comes_first(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker, stuck in its first job: who needs one of the last waits for that first one alone."""
    go, order = threading.Event(), list[str]()

    def stuck(worker: Fake, job: Job) -> None:
        go.wait(60)

    def note(worker: Fake, job: Job) -> None:
        order.append(job.content["implementation"])

    fake.answers = {one.name: note for one in faulty_double.implementations} | {"aborts": stuck}
    monkeypatch.setattr(_allowance, "most", lambda kind, share=4: 1)
    verdicts.prepare(("faulty_double",), "cpu", torch.float32)
    found: list[state.Verdict] = []
    args = (torch.ones(2, 3),)
    threads = [
        threading.Thread(target=lambda: found.append(verdicts.found(named("sound"), "cpu", args)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while verdicts._crew._queue[0].content["implementation"] != "sound" and time.monotonic() < deadline:
        time.sleep(0.01)
    go.set()
    for thread in threads:
        thread.join(60)
    assert [one.sound for one in found] == [True, True] and order[0] == "sound"
    finished()
    assert order.count("sound") == 1 and verdicts.times()["waited_s"] > 0


def test_what_was_expected_is_tested_with_the_first_that_is_needed(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "ON_DEMAND", ("cpu",))
    verdicts.prepare(("faulty_double",), "cpu", torch.float32, {"faulty_double": (2, 3)})
    assert not fake.made
    monkeypatch.setattr(verdicts, "ON_DEMAND", ())
    verdicts.found(named("sound"), "cpu", (torch.ones(2, 3),))
    finished()
    assert all(state.known(one, "cpu", torch.float32) for one in faulty_double.implementations)


def test_want_of_memory_says_nothing_of_the_implementation(fake: type[Fake], fresh: Path) -> None:
    def scarce(worker: Fake, job: Job) -> None:
        job.scarce = "memory"

    fake.answers = {"sound": scarce}
    verdict = verdicts.found(named("sound"), "cpu", (torch.ones(2, 3),))
    assert not verdict.sound and "memory" in verdict.reason
    assert not home.path("verdicts").exists()


def test_a_dtype_of_which_it_takes_nothing_is_refused_and_not_lost(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked, where in (("float64", "float64"), (None, "any dtype")):
        job = Job({"dtype": asked, "op": "faulty_double"}, 1.0)
        job.lines = [{"case": "building its kernels", "dtype": asked or "", "begin": True}]
        verdict = verdicts._concluded(named("sound"), "cpu", job)
        assert not verdict.sound and verdict.sentence() == verdicts.NOTHING + where
        assert state.losses() == () and capsys.readouterr().err == ""
    assert state.ruled_out(named("sound"), "cpu", torch.float64) == verdicts.NOTHING + "any dtype"


def test_what_was_expected_is_refused_in_a_dtype_that_others_have_asked_for(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own process: what refuses float64 is begun with what takes it."""
    monkeypatch.setattr(verdicts, "_expected", {})
    monkeypatch.setattr(verdicts, "ON_DEMAND", ())
    monkeypatch.setattr(verdicts, "_candidates", lambda name, kind: [named("single")])
    verdicts.prepare(("faulty_double",), "cpu", torch.float64)
    finished()
    assert "none of the cases" in state.ruled_out(named("single"), "cpu", torch.float64)
    assert state.losses() == () and state.known(named("single"), "cpu") is None


def test_wrong_in_one_dtype_is_used_in_the_others(fake: type[Fake]) -> None:
    def wrong(worker: Fake, job: Job) -> None:
        dtype = job.content["dtype"]
        problem = "it is 3 from float64" if dtype == "bfloat16" else ""
        job.lines = [{"case": f"wide {dtype}", "dtype": dtype, "problem": problem}]

    fake.answers = {"sound": wrong}
    for dtype, sound in ((torch.bfloat16, False), (torch.float16, True), (torch.float32, True)):
        verdict = verdicts.found(named("sound"), "cpu", (torch.ones(2, 3, dtype=dtype),))
        assert verdict.sound is sound
    summary = state.known(named("sound"), "cpu")
    assert summary.sound and summary.dtypes == ("float16", "float32") and "in bfloat16" in summary.reason
    assert state.ruled_out(named("sound"), "cpu") is None


def test_a_crash_in_one_dtype_is_that_ones(fresh: Path) -> None:
    job = Job({"dtype": None, "op": "faulty_double"}, 1.0, end="died (signal 11)")
    job.lines = [
        {"case": "wide float32", "dtype": "float32", "problem": ""},
        {"case": "wide float16", "dtype": "float16", "begin": True},
    ]
    verdict = verdicts._concluded(named("sound"), "cpu", job)
    assert not verdict.sound and verdict.dtypes == ("float16",) and "'wide float16'" in verdict.reason
    assert state.known(named("sound"), "cpu", torch.float32) is None  # it did not come to its end


def test_the_case_that_killed_it_is_named(fresh: Path) -> None:
    verdict = verdicts.isolated(named("aborts"), "cpu")
    assert "'wide float32'" in verdict.reason


def test_a_sound_one_is_sound_in_the_dtypes_that_were_tested(fresh: Path) -> None:
    like = (torch.ones(2, 33, dtype=torch.bfloat16),)
    assert verdicts.isolated(named("sound"), "cpu", like=like) == state.known(named("sound"), "cpu")
    assert state.known(named("sound"), "cpu").dtypes == ("bfloat16",)
    assert state.known(named("sound"), "cpu", torch.float16) is None


def test_a_process_that_cannot_be_started_says_so_and_is_not_believed_tomorrow(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(fresh / "no-python"))
    verdict = verdicts.isolated(named("sound"), "cpu")
    assert not verdict.sound and "could not be started" in verdict.reason
    assert not (home.path("verdicts")).exists()


def test_processes_side_by_side_agree_and_leave_whole_files(fresh: Path) -> None:
    found: list[state.Verdict] = []
    threads = [
        threading.Thread(target=lambda: found.append(verdicts.isolated(named("sound"), "cpu")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(verdict.sound for verdict in found)
    assert len(list(home.path("verdicts").glob("*.json"))) == 3  # a dtype each
    state.forget()
    assert state.known(named("sound"), "cpu").sound


@pytest.mark.cuda
def test_on_a_device_all_ops_are_tested_side_by_side(fresh: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    names = tuple(discover())
    begun = verdicts.prepare(names, "cuda", torch.float16)
    wanted = [one for name in names for one in verdicts._candidates(name, "cuda")]
    assert begun == len(wanted) > 5
    finished()
    verdict = {f"{one.op}/{one.name}": state.known(one, "cuda", torch.float16) for one in wanted}
    assert {name: str(one) for name, one in verdict.items() if one is None or not one.sound} == {}


def test_one_that_is_tested_alone_is_tested_by_a_process_started_afresh(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a fork finds wrong is never believed, nor heard of."""
    asked: list[str] = []
    monkeypatch.setattr(_workers.forks, "forked", lambda module, environment: asked.append(module))
    heard: list[Any] = []
    found = verdicts.isolated(named("sound"), "cpu", on_line=lambda *line: heard.append(line))
    assert found.sound and heard and not asked
    worker = _workers.Worker()  # as others are: she is asked first
    worker.close()
    assert asked == ["clearway.ops.selftest"]
