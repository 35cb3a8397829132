"""What captures: where it cannot, how far a replay may be off, and a failure that leaves no trace."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from clearway.execution.capture import APART, TorchCapture, agrees


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
