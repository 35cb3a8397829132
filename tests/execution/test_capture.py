"""What captures: where it cannot, how far a replay may be off, and a failure that leaves no trace."""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearway.execution import capture as capturing
from clearway.execution.capture import APART, TorchCapture, agrees
from fake_capture import FakeCuda


def test_a_replay_may_differ_by_rounding_and_by_no_more() -> None:
    whole = torch.randn(64, generator=torch.Generator().manual_seed(0))
    largest = whole.abs().max()
    assert agrees((whole + 0.9 * APART * largest, None, 3), (whole, None, 3))
    off = whole.clone()
    off[5] += 1.1 * APART * largest
    assert not agrees([off], [whole])
    assert not agrees(torch.zeros(64), whole)
    assert not agrees(whole[:32], whole) and not agrees(whole.double(), whole)
    broken = whole.clone()
    broken[3] = float("nan")
    assert not agrees(broken, whole) and agrees(broken, broken.clone())
    assert agrees(torch.arange(3), torch.arange(3)) and not agrees(torch.arange(3), torch.ones(3).long())
    assert agrees(torch.empty(0), torch.empty(0)) and agrees(torch.zeros(2), torch.zeros(2))


def test_elsewhere_than_on_cuda_nothing_is_captured() -> None:
    assert TorchCapture().absent(torch.device("cpu")) == "CUDA graphs are for CUDA devices, this is cpu"
    assert TorchCapture().lock is TorchCapture().lock  # one memory, one lock


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(capturing, "_memories", {})
    made = FakeCuda()
    made.put(monkeypatch)
    return made


def failing(fake: FakeCuda, how: str) -> Callable[[], Any]:
    """A run that fails, in one of the ways in which one does."""

    def run() -> None:
        fake.multiply()
        if how == "forbidden":
            fake.forbidden()
        if how == "interrupted":
            fake.broken = True
            raise KeyboardInterrupt
        raise ValueError("its own")

    return run


WAYS = {"forbidden": RuntimeError, "interrupted": KeyboardInterrupt, "its own": ValueError}


@given(st.lists(st.sampled_from([*WAYS, "sound", "sound", "drop"]), max_size=12))
def test_after_any_failures_captures_go_on(steps: list[str]) -> None:
    """And older graphs keep what they read, none of which is kept for longer than they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "_memories", {})
        fake, graphs = FakeCuda(), list[Any]()
        fake.put(patch)
        backend = TorchCapture()
        for step in steps:
            if step in WAYS:
                with pytest.raises(WAYS[step]) as found:
                    backend.capture(failing(fake, step))
                assert "previous error" not in str(found.value)  # but what it was
                del found
            elif step == "sound":
                graphs.append(backend.capture(fake.multiply)[0])
                graphs[-1]()
            elif graphs:
                del graphs[0]
            assert fake.sound() and fake.stream == "the user's"
        assert sum(fake.uses.values()) == len(graphs)
        graphs.clear()
        assert not any(fake.uses.values())


def test_a_capture_after_a_failure_shares_memory_with_those_that_follow(fake: FakeCuda) -> None:
    backend = TorchCapture()
    old = backend.capture(fake.multiply)
    (first,) = fake.uses
    with pytest.raises(RuntimeError, match="operation not permitted"):
        backend.capture(failing(fake, "forbidden"))
    new = [backend.capture(fake.multiply) for _ in range(2)]
    (second,) = fake.uses.keys() - {first}
    assert fake.uses == {first: 1, second: 2}
    assert fake.workspaces == {capturing._memory().capturing: second}
    del old
    assert fake.uses[first] == 0 and fake.sound()
    del new


def test_a_pool_that_its_graphs_have_left_is_not_entered_while_older_graphs_live(fake: FakeCuda) -> None:
    backend = TorchCapture()
    old = backend.capture(fake.multiply)
    with pytest.raises(RuntimeError, match="not permitted"):
        backend.capture(fake.forbidden)
    newer = backend.capture(fake.multiply)
    del newer
    for _ in range(2):
        newest = backend.capture(fake.multiply)
        newest[0]()
    old[0]()
    assert fake.sound()


def test_a_capture_that_cannot_begin_is_undone_too(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TorchCapture()
    begin = fake.begin

    def refused(pool: Any) -> None:
        begin(pool)
        raise RuntimeError("no stream for it")

    fake.begin = refused  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no stream"):
        backend.capture(fake.multiply)
    fake.begin = begin  # type: ignore[method-assign]
    assert fake.sound() and fake.stream == "the user's" and not any(fake.uses.values())
    backend.capture(fake.multiply)


def test_a_torch_that_cannot_end_a_pool_goes_on_with_another(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    backend = TorchCapture()
    with pytest.raises(RuntimeError, match="operation not permitted"):
        backend.capture(failing(fake, "forbidden"))
    backend.capture(fake.multiply)[0]()


def test_a_failure_holds_nothing_of_what_was_made(fake: FakeCuda) -> None:
    """Its error is let go without the garbage collector, since what it made lies in a device's memory."""

    class Made:
        count = 0

        def __init__(self) -> None:
            Made.count += 1

        def __del__(self) -> None:
            Made.count -= 1

    def run() -> None:
        made = Made()
        fake.forbidden()
        del made

    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            TorchCapture().capture(run)
        assert Made.count == 0
    finally:
        gc.enable()


class Generator:
    """A CUDA generator's state: one that waits for a capture's end draws nothing."""

    device = torch.device("cpu")

    def __init__(self, stuck: bool) -> None:
        self.stuck, self.offset, self.states = stuck, 8, 1

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def draw(self) -> None:
        if self.stuck:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.offset += 4

    def clone_state(self) -> str:
        return "another"

    def graphsafe_set_state(self, state: str) -> None:
        self.stuck, self.states = False, self.states + 1


@pytest.mark.parametrize("stuck", [False, True])
def test_a_generator_gets_another_state_only_where_its_own_draws_nothing(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    """Somebody else's graph that draws follows the state that it was captured with."""
    generator = Generator(stuck)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda tensor, generator: generator.draw())
    with pytest.raises(RuntimeError, match="not permitted"):
        TorchCapture().capture(failing(fake, "forbidden"))
    assert (generator.states, generator.stuck, generator.offset) == (1 + stuck, False, 8)


@pytest.fixture
def capture() -> Iterator[TorchCapture]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = TorchCapture()
    with made.lock:
        yield made


@pytest.mark.cuda
def test_a_failure_leaves_the_stream_and_random_numbers_as_they_were(capture: TorchCapture) -> None:
    x = torch.randn(8, device="cuda")
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        capture.capture(lambda: (torch.randn(8, device="cuda"), float(x.sum())))
    assert torch.cuda.current_stream() == before
    torch.cuda.manual_seed(3)
    drawn = torch.randn(8, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(drawn, torch.randn(8, device="cuda"))
    replay, output = capture.capture(lambda: x * 2)
    replay()
    assert torch.equal(output, x * 2)


@pytest.mark.cuda
def test_a_failure_beside_older_graphs_leaves_them_and_later_ones_sound(capture: TorchCapture) -> None:
    left, right = (torch.randn(512, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    x = torch.randn(2**20, device="cuda")

    def work() -> torch.Tensor:
        return left @ right.t()

    def wrong() -> float:
        return float((work() + x[0]).repeat(64).sum())

    def failed() -> int:
        with pytest.raises(RuntimeError):
            capture.capture(wrong)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    expected = capture.warm_up(work, 2)
    graphs = []
    for _ in range(3):
        graphs.append(capture.capture(work))
        failed()
    for _ in range(3):
        kept = graphs.pop(0)
        graphs.append(capture.capture(work))
        del kept
        for replay, output in graphs:
            replay()
            torch.testing.assert_close(output, expected, rtol=1e-2, atol=0.5)
    graphs.clear()
    after = [failed() for _ in range(6)]
    assert max(after[2:]) <= after[1] + 2**22, after  # none keeps a memory of its own


@pytest.mark.cuda
def test_graphs_share_their_memory(capture: TorchCapture) -> None:
    """What two graphs need is what the larger needs, beside what they give."""
    x = torch.randn(2**22, device="cuda")

    def work() -> torch.Tensor:
        y = x
        for _ in range(4):
            y = (y.repeat(4) * 1.5)[: 2**22].clone()
        return y[:8].clone()

    def reserved() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    kept = []
    sizes = [reserved()]
    for _ in range(3):
        kept.append(capture.capture(work))
        sizes.append(reserved())
    first, *others = (after - before for before, after in itertools.pairwise(sizes))
    assert first > 2**26 and all(other <= 2**21 for other in others)
    for replay, output in reversed(kept):
        replay()
        assert torch.equal(output, work())


@pytest.mark.cuda
def test_another_stream_waits(capture: TorchCapture) -> None:
    x = torch.zeros(2**24, device="cuda")
    buffers = [x]
    capture.enter(lambda: buffers)
    for _ in range(50):
        x.add_(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        capture.enter(lambda: buffers)
        assert float(x.mean()) == 50
    capture.enter(lambda: buffers)


@pytest.mark.cuda
def test_a_graph_outlives_the_workspaces_of_cublas(capture: TorchCapture) -> None:
    """torch.compile's own graphs have them freed: what is allocated afterwards must not be written to."""
    left, right = (torch.randn(512, 8192, device="cuda", dtype=torch.float16) for _ in range(2))

    def work() -> torch.Tensor:
        return left @ right.t()  # few tiles, a long sum: split, with partial sums in the workspace

    expected = capture.warm_up(work, 2)
    replay, output = capture.capture(work)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    others = [torch.full((2**20,), 7.0, device="cuda") for _ in range(64)]
    for _ in range(3):
        replay()
    assert all(bool((other == 7.0).all()) for other in others)
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=0.5)
