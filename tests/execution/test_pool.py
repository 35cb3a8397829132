"""Two contexts that take turns have a graph each, so that what is computed from each stays."""

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from clearway.execution.cuda_graph import CudaGraph
from clearway.execution.kept import Kept
from clearway.execution.pool import Pool
from fake_capture import Recorder


class Reader(nn.Module):
    """x + what is kept of the context, counting how often that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kept, self.count = nn.Linear(4, 4, bias=False), Kept(), itertools.count()

    @property
    def made(self) -> int:
        return int(repr(self.count).strip("count()"))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        def compute() -> tuple[Tensor]:
            next(self.count)  # no attribute of it is looked at, as no replay counts
            return (self.inner(context),)

        (read,) = self.kept.get(context, [self.inner.weight], compute)
        return x + read


@pytest.fixture
def reader() -> Reader:
    torch.manual_seed(0)
    return Reader().requires_grad_(False)


def made_by(run: CudaGraph, reader: Reader, contexts: list[Tensor]) -> list[int]:
    """How often something was made from a context in each call; every call is compared."""
    counts = []
    for context in contexts:
        before = reader.made
        x = torch.randn(2, 4)
        found = run(x, context)
        counts.append(reader.made - before)
        torch.testing.assert_close(found, x + reader.inner(context), rtol=0, atol=0)
    return counts


def test_two_that_take_turns_are_made_once(reader: Reader) -> None:
    run = CudaGraph(reader, "unet", Counter(), Pool(Recorder()))
    cond, uncond = torch.randn(2, 4), torch.randn(2, 4)
    counts = made_by(run, reader, [cond, uncond] * 5)
    assert counts[1] == 1 and counts[3:] == [0] * 7  # the third call sees that they take turns
    assert run.pool.made == 2
    other = [torch.randn(2, 4), torch.randn(2, 4)]  # another prompt: into the same two graphs
    assert made_by(run, reader, other * 3) == [1, 1, 0, 0, 0, 0]
    assert run.pool.made == 2


def test_prompts_one_after_the_other_share_a_graph(reader: Reader) -> None:
    run = CudaGraph(reader, "unet", Counter(), Pool(Recorder()))
    prompts = [torch.randn(2, 4) for _ in range(4)]
    counts = made_by(run, reader, [prompt for prompt in prompts for _ in range(3)])
    assert counts[1:] == [0, 0, *[1, 0, 0] * 3]
    assert run.pool.made == 1


def test_a_context_at_another_place_or_changed_in_place_is_another(reader: Reader) -> None:
    run = CudaGraph(reader, "unet", Counter(), Pool(Recorder()))
    context = torch.randn(2, 4)
    made_by(run, reader, [context])
    context.add_(1)
    assert made_by(run, reader, [context, context]) == [1, 0]
    context.data = torch.randn(2, 4)
    assert made_by(run, reader, [context, context]) == [1, 0]
    context.data = context.data.as_strided((2, 4), (1, 2))  # the same memory in another order
    x, before = torch.randn(2, 4), reader.made
    torch.testing.assert_close(run(x, context), x + reader.inner(context))
    assert reader.made == before + 1


def test_an_input_of_which_nothing_is_kept_may_change_unnoticed(reader: Reader) -> None:
    """As where another library, or somebody's own graph, writes where it lies."""
    run = CudaGraph(reader, "unet", Counter(), Pool(Recorder()))
    x, context = torch.randn(2, 4), torch.randn(2, 4)
    for _ in range(3):
        x.data.add_(1)
        assert torch.equal(run(x, context), x + reader.inner(context))
    assert run.pool.made == 1 and reader.made


def test_what_cannot_be_followed_is_computed_within_the_graph(reader: Reader) -> None:
    """Tensors of inference mode: nothing tells whether they are what they were."""
    run = CudaGraph(reader, "unet", Counter(), Pool(Recorder()))
    with torch.inference_mode():
        context = torch.randn(2, 4)
        for _ in range(3):
            made_by(run, reader, [context])
            context.mul_(2)
    (graph,) = run.pool.held.values()
    assert not graph.frame.held


def test_graphs_of_a_module_that_left_its_device_go(reader: Reader) -> None:
    recorder = Recorder()
    run = CudaGraph(reader, "unet", Counter(), Pool(recorder))
    made_by(run, reader, [torch.randn(2, 4)])
    assert len(run.pool.held) == 1
    reader.double()  # as moved: its weights lie elsewhere
    recorder.absent = lambda device: "it is no longer there"  # type: ignore[method-assign]
    run(torch.randn(2, 4).double(), torch.randn(2, 4).double())
    assert not run.pool.held


def test_what_is_changed_before_each_call_is_not_captured_for_ever(reader: Reader) -> None:
    """As a VAE that Diffusers raises to float32 for each picture and lowers again."""
    run = CudaGraph(reader, "vae", Counter(), Pool(Recorder()))
    for _ in range(5):
        reader.double()
        made_by(run, reader.float(), [torch.randn(2, 4)])
    assert run.pool.made == 1 and run.routes == {"vae/cuda_graph": 1, "vae/eager": 4}
    assert list(run.pool.reasons) == ["it was moved or changed before its last graph was used twice"]
    for _ in range(4):  # left as it is: captured at the second look
        made_by(run, reader, [torch.randn(2, 4)])
    assert run.pool.made == 2 and run.routes["vae/eager"] == 4
    reader.double()  # changed once in a while: captured at once
    made_by(run, reader.float(), [torch.randn(2, 4)])
    assert run.pool.made == 3 and run.routes["vae/eager"] == 4
