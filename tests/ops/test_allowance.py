"""Self-tests and a model share one GPU: together they never take more than it has, and want of memory is
never held against an implementation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from clearway import device, home
from clearway.device import CONTEXT_BYTES, Device, Memory
from clearway.ops import _allowance, discover, state, verdicts
from clearway.ops._allowance import CASES_BYTES, MOST, SHARE, WORKER_BYTES
from clearway.ops._workers import Crew, Job
from clearway.ops.contract import Implementation
from ops.faulty import faulty_double

CUDA = Device("cuda", 0)
ALL = list(faulty_double.implementations)
SOUND = next(one for one in ALL if one.name == "sound")
ARGS = (torch.ones(2, 3),)
SIZES = [0.0, 0.4, 0.99, 1.0, 2.5, 3.9, 4.0, 8.1, 40.0, 400.0]  # of a worker's bytes


class Gpu:
    """A GPU's memory: a model's, and what self-tests take, a context from a while after their start on."""

    def __init__(self, free_bytes: float) -> None:
        self.model, self.total = 2**33, 2**33 + int(free_bytes)
        self.taken = self.peak = self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def memory(self, where: Device) -> Memory:
        assert where == CUDA
        return Memory(self.total, max(self.total - self.model - self.taken, 0))

    def take(self, size: int) -> bool:
        with self.lock:
            if self.model + self.taken + size > self.total:
                return False
            self.taken += size
            self.peak = max(self.peak, self.taken)
            return True

    def give(self, size: int) -> None:
        with self.lock:
            self.taken -= size


class Fake:
    """A worker without a process: it takes its memory at its first job and gives it back at its end."""

    gpu: Gpu
    answers: dict[str, Callable[[Job], None]]

    def __init__(self) -> None:
        self.jobs = self.held = 0
        with self.gpu.lock:
            self.gpu.at_once += 1
            self.gpu.most_at_once = max(self.gpu.most_at_once, self.gpu.at_once)

    def run(self, job: Job) -> None:
        self.jobs += 1
        job.lines, job.end, job.scarce = [], None, None
        time.sleep(0.002)
        for size in (CONTEXT_BYTES, CASES_BYTES) if not self.held else ():
            if not self.gpu.take(size):
                job.scarce = "memory"
                return
            self.held += size
        answer = self.answers.get(job.content["implementation"])
        if answer is not None:
            answer(job)
        if job.end is None and job.scarce is None and not job.lines:
            dtype = job.content["dtype"]
            job.lines = [{"case": f"wide {dtype}", "dtype": dtype, "problem": ""}]

    def close(self) -> None:
        time.sleep(0.002)
        self.gpu.give(self.held)
        self.held = 0
        with self.gpu.lock:
            self.gpu.at_once -= 1


@pytest.fixture
def share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Gpu]]:
    """Makes the GPU on which so many workers' bytes are free beside a model."""
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    monkeypatch.setattr(verdicts, "_candidates", lambda name, kind: ALL)
    monkeypatch.setattr(verdicts, "_expected", {})
    monkeypatch.setattr(verdicts, "_held", {})
    monkeypatch.setattr(verdicts, "_crew", Crew(Fake))
    monkeypatch.setattr(_allowance, "cores", lambda: 32)
    monkeypatch.setattr(device, "release_memory", lambda where: None)
    Fake.answers = {}
    state.forget()

    def made(workers: float) -> Gpu:
        Fake.gpu = Gpu(workers * WORKER_BYTES)
        monkeypatch.setattr(device, "memory", Fake.gpu.memory)
        return Fake.gpu

    yield made
    verdicts._crew.wait()
    state.forget()


def prepared() -> int:
    return verdicts.prepare(("faulty_double",), "cuda", torch.float16)


def known(one: Implementation = SOUND, dtype: torch.dtype = torch.float16) -> state.Verdict | None:
    return state.known(one, "cuda", dtype)


@pytest.mark.parametrize("size", SIZES)
def test_begun_ahead_they_take_a_share_or_are_one(share: Callable[[float], Gpu], size: float) -> None:
    gpu = share(size)
    begun = prepared()
    verdicts._crew.wait()
    assert begun == (len(ALL) if size >= 1 else 0)
    assert gpu.peak <= (max(size / SHARE, 1) if size >= 1 else 0) * WORKER_BYTES
    assert gpu.most_at_once <= MOST and gpu.taken == gpu.at_once == 0
    assert all((known(one) is not None) == (size >= 1) for one in ALL)
    assert verdicts.held_back("cuda") == (size < 1)


@pytest.mark.parametrize("size", SIZES)
def test_settled_they_take_what_is_free_and_leave_nothing(share: Callable[[float], Gpu], size: float) -> None:
    """The whole device may be used, since who planned for it waits; then each verdict is known, and what had
    no room is said and not kept."""
    gpu = share(size)
    prepared()
    verdicts.settle("cuda")
    assert gpu.peak <= size * WORKER_BYTES and gpu.taken == gpu.at_once == 0
    assert verdicts.claimed_bytes(CUDA) == 0 and not verdicts.held_back("cuda")
    for one in ALL:
        found = known(one)
        assert found is not None and found.sound == found.tested == (size >= 1)
    assert (home.path("verdicts").exists()) == (size >= 1)
    assert len(state.losses()) == (0 if size >= 1 else len(ALL))


@pytest.mark.parametrize("spare", [0, WORKER_BYTES - 1, WORKER_BYTES, 9 * WORKER_BYTES, None])
def test_in_a_generation_they_take_what_its_plan_leaves(
    share: Callable[[float], Gpu], spare: int | None
) -> None:
    gpu = share(100)
    with verdicts.leaving(spare):
        room = verdicts.has_room("cuda")
        found = verdicts.found(SOUND, "cuda", ARGS)
        prepared()
        verdicts._crew.wait()
    assert room == found.sound == (spare is None or spare >= WORKER_BYTES)
    assert spare is None or gpu.peak <= spare
    assert verdicts.has_room("cuda")  # afterwards as before


def test_on_the_cpu_cores_alone_are_counted(
    share: Callable[[float], Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    share(0)
    with verdicts.leaving(0):
        assert _allowance.most("cpu") == MOST and not _allowance.short("cpu")
    monkeypatch.setattr(_allowance, "cores", lambda: 1)
    assert _allowance.most("cpu") == 1
    share(100)
    assert _allowance.most("cuda") == 1 and _allowance.most("cuda", 1) == 1


def test_within_a_limit_the_limit_is_the_device(
    share: Callable[[float], Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what `device.memory` says within it, which the threads of workers do not see."""
    gpu, limited = share(100), Memory(2**33, 2 * WORKER_BYTES)
    main = threading.get_ident()
    monkeypatch.setattr(
        device, "memory", lambda where: limited if threading.get_ident() == main else gpu.memory(where)
    )
    assert (_allowance.most("cuda"), _allowance.most("cuda", 1)) == (1, 2)
    prepared()
    verdicts.settle("cuda")
    assert gpu.most_at_once <= 2 and all(known(one) for one in ALL)


def test_what_had_no_room_is_not_used_and_tested_when_there_is(share: Callable[[float], Gpu]) -> None:
    gpu = share(0.5)
    found = verdicts.found(SOUND, "cuda", ARGS)
    assert not found.sound and not found.tested
    assert found.sentence().startswith("its self-test could not run: there was no memory for it")
    assert state.ruled_out(SOUND, "cuda", torch.float32) == found.sentence()
    assert len(state.losses()) == 1 and not home.path("verdicts").exists()
    assert verdicts.found(SOUND, "cuda", ARGS) == found and gpu.most_at_once == 0  # not asked for again
    assert verdicts.claimed_bytes(CUDA) == WORKER_BYTES
    gpu.model = 0
    before = state.version()
    verdicts.settle("cuda")
    assert known(dtype=torch.float32).sound and state.losses() == () and state.version() != before
    assert verdicts.claimed_bytes(CUDA) == 0


def test_what_cannot_be_tested_even_so_is_not_tried_for_ever(share: Callable[[float], Gpu]) -> None:
    share(0.5)
    prepared()
    verdicts.settle("cuda")
    said = state.losses()
    assert len(said) == len(ALL) and prepared() == 0
    verdicts.settle("cuda")
    assert verdicts.claimed_bytes(CUDA) == 0 and state.losses() == said


def test_one_begun_ahead_that_the_model_left_no_memory_is_tested_when_it_is_needed(
    share: Callable[[float], Gpu],
) -> None:
    """The model comes in while the workers start: all of them are told that memory is scarce."""
    gpu = share(100)
    come = threading.Event()

    def hungry(job: Job) -> None:
        come.wait(60)
        job.scarce = None if gpu.model < 2**34 else "memory"

    Fake.answers = dict.fromkeys((one.name for one in ALL), hungry)
    prepared()
    gpu.model += 2**34
    come.set()
    verdicts._crew.wait()
    assert known() is None and state.losses() == () and verdicts.held_back("cuda")
    gpu.model -= 2**34
    assert verdicts.found(SOUND, "cuda", (ARGS[0].half(),)).sound
    verdicts.settle("cuda")
    assert all(known(one).sound for one in ALL)


FAILURES = {
    "memory": lambda job: setattr(job, "scarce", "memory"),
    "killed by the system": lambda job: setattr(job, "end", "died (signal 9)"),
    "segfault": lambda job: setattr(job, "end", "died (signal 11)"),
    "exit": lambda job: setattr(job, "end", "died (exit code 1, CUBLAS_STATUS_NOT_INITIALIZED)"),
    "silence": lambda job: setattr(job, "end", "was silent for 60 s"),
    "raised": lambda job: job.lines.append(
        {"case": "wide", "dtype": job.content["dtype"], "problem": "it raised RuntimeError: cuDNN error"}
    ),
}


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("asked", ["ahead", "in need"])
@pytest.mark.parametrize("full", [True, False])
def test_no_failure_on_a_full_device_is_kept(
    share: Callable[[float], Gpu], what: str, asked: str, full: bool
) -> None:
    """Another program fills it while the test is at work; where it is not full, a fault is a fault."""
    gpu = share(2)

    def fails(job: Job) -> None:
        gpu.model += int(1.5 * WORKER_BYTES) if full and gpu.model == 2**33 else 0
        FAILURES[what](job)

    Fake.answers = {"sound": fails}
    if asked == "ahead":
        prepared()
        verdicts.settle("cuda")
        found = known()
    else:
        found = verdicts.found(SOUND, "cuda", (ARGS[0].half(),))
    believed = not full and what not in ("memory", "killed by the system")
    assert found is not None and not found.sound and found.tested == believed
    kept = home.path("verdicts").glob("faulty_double-sound-*")
    assert len(list(kept)) == int(believed)
    assert [said for said in state.losses() if "/sound" in said] == [
        f"faulty_double/sound is not used in float16: {found.sentence()}"
    ]


def test_what_they_claim_is_of_the_device_they_run_on(share: Callable[[float], Gpu]) -> None:
    share(12)
    go = threading.Event()
    Fake.answers = dict.fromkeys((one.name for one in ALL), lambda job: go.wait(60))
    assert verdicts.claimed_bytes(CUDA) == 0
    prepared()
    claimed = [
        verdicts.claimed_bytes(Device(*one)) for one in (("cuda", 0), ("cuda",), ("cuda", 1), ("cpu",))
    ]
    workers = verdicts._crew.at_work
    go.set()
    assert claimed == [workers * WORKER_BYTES] * 2 + [0, 0] and 1 <= workers <= 3
    verdicts._crew.wait()
    assert verdicts.claimed_bytes(CUDA) == 0


@pytest.mark.cuda
@pytest.mark.parametrize("spare", [WORKER_BYTES, None])
def test_on_a_device_they_take_no_more_than_they_are_counted_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int | None
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    state.forget()
    torch.zeros(1, device="cuda")  # this process has its own context from now on
    before = lowest = torch.cuda.mem_get_info()[0]
    with verdicts.leaving(spare):
        assert verdicts.prepare(tuple(discover()), "cuda", torch.float16) > 5
    claimed = verdicts.claimed_bytes(CUDA)
    while verdicts._crew.at_work:
        lowest = min(lowest, torch.cuda.mem_get_info()[0])
        time.sleep(0.005)
    assert before - lowest <= claimed and (spare is None or claimed == spare)
    assert torch.cuda.mem_get_info()[0] >= before - 2**26  # given back
    assert not verdicts.held_back("cuda") and state.losses() == ()
    state.forget()
