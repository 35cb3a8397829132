"""Captured graphs over a stand-in for CUDA's: keys, staleness, eviction, fallback and counts."""

import itertools
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearway.execution.capture import TorchCapture
from clearway.execution.cuda_graph import CudaGraph
from clearway.execution.kept import Kept
from clearway.execution.pool import Pool
from clearway.ops import budget, contract
from clearway.ops.attention import attention
from clearway.ops.geglu import geglu
from fake_capture import Recorder


class Network(nn.Module):
    """x W + what is kept of the context, through one op."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8, bias=False)
        self.kept = Kept()
        self.count = itertools.count()  # no attribute of it is looked at, as no replay counts

    @property
    def projections(self) -> int:
        return int(repr(self.count).strip("count()"))

    def forward(self, x: Tensor, *, context: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        def compute() -> tuple[Tensor]:
            next(self.count)
            return (self.inner(context),)

        (read,) = self.kept.get(context, [self.inner.weight], compute, promised=True)
        return (geglu(self.inner(x) + read),)


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network().requires_grad_(False)


def executor(network: Network, **options: Any) -> CudaGraph:
    pool = options.pop("pool", None) or Pool(Recorder(options.pop("error", None)))
    return CudaGraph(network, "unet", Counter(), pool, **options)


def agree(run: CudaGraph, network: Network, x: Tensor, context: Tensor) -> None:
    """The executor gives what the network gives."""
    expected = geglu(network.inner(x) + network.inner(context))
    torch.testing.assert_close(run(x, context=context)[0], expected, rtol=0, atol=0)


def test_replays_follow_every_input_and_outputs_are_the_callers(network: Network) -> None:
    run = executor(network)
    x, context = torch.randn(2, 4), torch.randn(2, 4)
    first = run(x, context=context)[0]
    before = first.clone()
    agree(run, network, torch.randn(2, 4), context)
    assert torch.equal(first, before)
    context.mul_(2)  # in place: its version says so
    agree(run, network, x, context)
    agree(run, network, x, torch.randn(2, 4))
    assert run.routes == {"unet/cuda_graph": 4}
    assert (run.pool.made, run.pool.backend.captures) == (1, 1)


def test_what_is_kept_is_computed_for_another_context_alone(network: Network) -> None:
    run = executor(network, promised=("context",))
    with torch.inference_mode():
        x, context, other = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4)
        agree(run, network, x, context)
        made = network.projections
        agree(run, network, torch.randn(2, 4), context)
        assert network.projections == made
        agree(run, network, x, other)
        assert network.projections == made + 1


def test_without_a_promise_what_has_no_version_is_always_new(network: Network) -> None:
    run = executor(network)
    with torch.inference_mode():
        x, context = torch.randn(2, 4), torch.randn(2, 4)
        agree(run, network, x, context)
        context.mul_(3)
        agree(run, network, x, context)


@pytest.mark.parametrize(
    "change", ["rows", "tokens", "dtype", "constant", "key", "route", "switch", "gradient mode"]
)
def test_another_key_is_another_graph(network: Network, change: str) -> None:
    pool = Pool(Recorder())
    run = executor(network, pool=pool)
    x, context = torch.randn(2, 4), torch.randn(2, 4)
    for _ in range(2):
        run(x, context=context)
    if change == "rows":
        run(torch.randn(1, 4), context=torch.randn(1, 4))
    elif change == "tokens":
        run(x[None], context=context[None])
    elif change == "dtype":
        network.double()
        run(x.double(), context=context.double())
    elif change == "constant":
        run(x, context=context, return_dict=False)
    elif change == "key":
        executor(network, pool=pool, key="separate")(x, context=context)
    elif change == "route":
        with contract.use(geglu="reference"):
            run(x, context=context)
    elif change == "switch":
        with sdpa_kernel(SDPBackend.MATH):
            run(x, context=context)
        run(x, context=context)
    else:
        with torch.no_grad():
            run(x, context=context)
    assert pool.made == 2


def test_weights_in_place_are_seen_and_moved_ones_make_it_stale(network: Network) -> None:
    run = executor(network)
    x, context = torch.randn(2, 4), torch.randn(2, 4)
    agree(run, network, x, context)
    network.inner.weight.mul_(2)
    agree(run, network, x, context)
    assert run.pool.made == 1
    network.inner.weight.data = torch.randn(8, 4)
    agree(run, network, x, context)
    agree(run, network, x, context)
    network.inner = nn.Linear(4, 8, bias=False).requires_grad_(False)  # as an adapter that wraps it
    agree(run, network, x, context)
    assert (run.pool.made, len(run.pool.held)) == (3, 1)


def test_adapters_have_graphs_of_their_own(network: Network) -> None:
    run = executor(network)
    x, context = torch.randn(2, 4), torch.randn(2, 4)
    network.inner.scaling = {}
    for scale in (1.0, 0.5, 1.0):
        network.inner.scaling["style"] = scale
        run(x, context=context)
    assert (run.pool.made, len(run.pool.held)) == (2, 2)


def test_the_least_recently_used_goes(network: Network) -> None:
    run = executor(network, pool=Pool(Recorder(), limit=2))
    inputs = {rows: (torch.randn(rows, 4), torch.randn(rows, 4)) for rows in (1, 2, 3)}
    for rows in (1, 2, 1, 3, 1):
        agree(run, network, *inputs[rows])
    assert (run.pool.made, run.pool.evicted, len(run.pool.held)) == (3, 1, 2)
    agree(run, network, *inputs[2])
    assert run.pool.made == 4


def test_a_graph_goes_where_memory_would_be_decided_otherwise(network: Network) -> None:
    run = executor(network)
    x, context = torch.randn(2, 4), torch.randn(2, 4)
    agree(run, network, x, context)
    (graph,) = run.pool.held.values()
    graph.sample.largest_admitted = graph.sample.limit_bytes
    with budget.sampled(budget.Device("cpu"), graph.sample.limit_bytes / 2):
        agree(run, network, x, context)
    assert (run.pool.made, run.pool.evicted) == (2, 1)


def test_arguments_that_never_come_back_are_not_captured_for_ever(network: Network) -> None:
    run = executor(network, pool=Pool(Recorder(), limit=2))
    for rows in range(1, 8):
        agree(run, network, torch.randn(rows, 4), torch.randn(rows, 4))
    assert run.pool.made == 4
    assert list(run.pool.reasons) == ["its arguments differ from call to call"]


def test_an_output_that_cannot_be_copied_is_not_captured(network: Network) -> None:
    run = CudaGraph(lambda x: {"found": {x}}, "unet", Counter(), Pool(Recorder()))
    assert isinstance(run(torch.ones(1))["found"], set)
    assert list(run.pool.reasons) == ["its output is a dict, which cannot be copied"]


def test_a_list_that_the_module_empties_is_whole_at_capture() -> None:
    """Diffusers' UNets take an adapter's residuals off the list that they are given."""

    class Popping(nn.Module):
        def forward(self, x: Tensor, residuals: list[Tensor]) -> Tensor:
            while residuals:
                x = x + residuals.pop(0)
            return x

    run = CudaGraph(Popping(), "unet", Counter(), Pool(Recorder()))
    for number in (1.0, 2.0):
        assert torch.equal(run(torch.zeros(2), [torch.full((2,), number)]), torch.full((2,), number))
    assert run.pool.made == 1


def test_settings_of_a_module_make_a_graph_stale(network: Network) -> None:
    """FreeU's factors, an image adapter's scale: numbers that a graph has baked in."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.scale = None, [1.0]

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.factor or 1.0) * self.scale[0]

    module = Scaled()
    run = CudaGraph(module, "unet", Counter(), Pool(Recorder()))
    x, found = torch.ones(1), []
    for factor, scale in ((None, 1.0), (2.0, 1.0), (3.0, 1.0), (3.0, 1.0), (3.0, 0.5), (None, 0.5)):
        module.factor, module.scale[0] = factor, scale
        found.append(float(run(x)))
        assert float(run(x)) == found[-1]
    assert found == [1.0, 2.0, 3.0, 3.0, 1.5, 0.5]
    assert run.pool.made == 5


def test_what_memory_decided_in_a_graph_is_the_generations_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(attention.defaults, "cpu")  # native, where this CPU prefers it
    q = torch.randn(1, 1, 64, 8)
    run = CudaGraph(
        lambda q: attention(q, q, q[..., :4]),  # values of another size: PyTorch's own holds the scores
        "unet",
        Counter(),
        Pool(Recorder()),
    )
    with budget.sampled(budget.Device("cpu"), 1000) as sample:
        attention(q, q, q[..., :4])
    assert sample.smallest_refused < 1e6
    for _ in range(2):  # captured, then replayed
        with budget.sampled(budget.Device("cpu"), 1000) as other:
            run(q)
        assert other.smallest_refused == sample.smallest_refused


def test_threads_do_not_share_a_replay(network: Network) -> None:
    run = executor(network)
    x, context = torch.randn(2, 4), torch.randn(2, 4)
    run(x, context=context)
    wrong: list[int] = []

    def work(seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        for _ in range(100):
            x, context = torch.randn(2, 4, generator=drawn), torch.randn(2, 4, generator=drawn)
            found = run(x, context=context)[0]
            if not torch.equal(found, geglu(network.inner(x) + network.inner(context))):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and run.pool.made == 1


def test_ops_are_counted_at_replays(network: Network) -> None:
    routes: dict[str, int] = {}
    run = executor(network)
    with contract.recording(routes):
        for _ in range(3):
            run(torch.randn(2, 4), context=torch.randn(2, 4))
    assert routes == {"geglu/reference": 3}


def test_calls_that_were_not_replayed_are_told_apart_from_none(network: Network) -> None:
    run = executor(network)
    run(torch.randn(2, 4), context=torch.randn(2, 4))
    assert run.sentences("the UNet") == []
    with torch.autocast("cpu"):
        run(torch.randn(2, 4), context=torch.randn(2, 4))
    assert run.sentences("the UNet") == ["the UNet ran eagerly at times: torch.autocast is at work"]
    assert executor(network, pool=run.pool).sentences("the UNet") == []  # another generation's


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), "cannot be captured: operation"),
        (RuntimeError("beginAllocateToPool: already recording"), "cannot be captured: beginAllocateToPool"),
        (RuntimeError("INTERNAL ASSERT FAILED\nand more"), "cannot be captured: INTERNAL ASSERT FAILED"),
        (TypeError("no such argument"), "cannot be captured: no such argument"),
        (torch.OutOfMemoryError("CUDA out of memory"), "no memory for its graph"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(
    network: Network, error: Exception, reason: str
) -> None:
    run = executor(network, error=error)
    for _ in range(2):
        agree(run, network, torch.randn(2, 4), torch.randn(2, 4))
    assert run.routes == {"unet/eager": 2}
    assert run.pool.backend.captures == 1  # tried once
    assert [reason in told for told in run.pool.reasons] == [True]


def test_a_graph_that_cannot_be_replayed_is_none(network: Network) -> None:
    class Unplayable(Recorder):
        def capture(self, run: Any) -> tuple[Any, Any]:
            _, output = super().capture(run)

            def replay() -> None:
                raise torch.OutOfMemoryError("CUDA out of memory")

            return replay, output

    run = executor(network, pool=Pool(Unplayable()))
    for _ in range(2):
        agree(run, network, torch.randn(2, 4), torch.randn(2, 4))
    assert run.pool.reasons == {"there was no memory for its graph": 2} and run.pool.backend.captures == 1


@pytest.mark.parametrize("error", [RuntimeError("shapes cannot be multiplied"), ValueError("its own")])
def test_the_modules_own_errors_are_raised(error: Exception) -> None:
    """In a warm-up; what comes of values that are thrown away is passed over, or no graph is made of it."""

    class Wrong(nn.Module):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.at, self.count = at, itertools.count(1)

        def forward(self, x: Tensor) -> Tensor:
            if next(self.count) == self.at:
                raise error
            return x * 2

    for at in (2, 4):  # the warm-up that runs, and an eager call after a capture that failed
        run = CudaGraph(Wrong(at), "unet", Counter(), Pool(Recorder(RuntimeError("not so"))))
        with pytest.raises(type(error), match=str(error)):
            for _ in range(2):
                run(torch.ones(2))
    run = CudaGraph(Wrong(1), "unet", Counter(), Pool(Recorder()))  # the one that only builds
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))


def test_arguments_that_are_not_captured(network: Network) -> None:
    run = executor(network)
    x = torch.randn(2, 4, requires_grad=True)
    run(x, context=torch.randn(2, 4))[0].sum().backward()
    assert x.grad is not None
    with torch.autocast("cpu"):
        run(torch.randn(2, 4), context=torch.randn(2, 4))
    handle = network.inner.register_forward_hook(lambda module, given, out: out * 2)
    agree(run, network, torch.randn(2, 4), torch.randn(2, 4))
    handle.remove()
    network._hf_hook = object()
    run(torch.randn(2, 4), context=torch.randn(2, 4))
    assert run.routes == {"unet/eager": 4}
    assert len(run.pool.reasons) == 4


def test_a_machine_without_cuda_says_so(network: Network) -> None:
    run = executor(network, pool=Pool(TorchCapture()))
    agree(run, network, torch.randn(2, 4), torch.randn(2, 4))
    assert list(run.pool.reasons) == ["CUDA graphs are for CUDA devices, this is cpu"]


@pytest.mark.cuda
def test_on_a_device_a_replay_gives_what_the_network_gives(network: Network) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    network.cuda()
    run = executor(network, pool=Pool(TorchCapture()), promised=("context",))
    with torch.inference_mode():
        for rows in (2, 4, 2):
            context = torch.randn(rows, 4, device="cuda")
            for _ in range(3):
                x = torch.randn(rows, 4, device="cuda")
                expected = geglu(network.inner(x) + network.inner(context))
                torch.testing.assert_close(run(x, context=context)[0], expected)
    assert run.routes == {"unet/cuda_graph": 9}


@pytest.mark.cuda
def test_on_a_device_a_failed_capture_is_a_reason_and_the_next_one_works(network: Network) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if float(x.sum()) else x

    network.cuda()
    run = executor(network, pool=Pool(TorchCapture()))
    with torch.no_grad():
        x, context = (torch.ones(rows, 4, device="cuda") for rows in (2, 2))
        run(x, context=context)
        for _ in range(3):
            wrong = CudaGraph(Reading(), "reading", Counter(), Pool(TorchCapture()))
            for _ in range(2):
                torch.testing.assert_close(wrong(x), x * 2)
            assert ["it cannot be captured: " in reason for reason in wrong.pool.reasons] == [True]
            for rows in (2, 3, 4):  # a graph from before, and new ones
                x, context = (torch.ones(rows, 4, device="cuda") for _ in range(2))
                expected = geglu(network.inner(x) + network.inner(context))
                torch.testing.assert_close(run(x, context=context)[0], expected)
    assert not run.pool.reasons, run.pool.reasons
    assert run.routes == {"unet/cuda_graph": 10} and run.pool.made == 3


def test_a_replay_that_gives_something_else_is_not_used() -> None:
    """As where a kernel was not in the captured stream, or draws random numbers."""

    calls: list[int] = []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return x * len(calls)

    run = CudaGraph(Counting(), "unet", Counter(), Pool(Recorder()))
    for _ in range(2):
        before = len(calls)
        assert torch.equal(run(torch.ones(2)), torch.full((2,), float(len(calls))))
    assert len(calls) == before + 1  # tried once
    assert ["gives other values" in reason for reason in run.pool.reasons] == [True]


def test_what_cannot_be_captured_and_counts_its_calls_is_not_tried_at_each() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls.append(1)
            return x * len(self.calls)

    run = CudaGraph(module := Counting(), "unet", Counter(), Pool(Recorder()))
    for _ in range(4):
        before = len(module.calls)
        assert torch.equal(run(torch.ones(2)), torch.full((2,), float(len(module.calls))))
    assert len(module.calls) == before + 1 and run.pool.backend.captures == 1


def test_within_a_capture_another_executor_only_calls(network: Network) -> None:
    inner = executor(network)

    class Outer(nn.Module):
        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            return inner(x, context=context)[0] + 1

    run = CudaGraph(Outer(), "outer", Counter(), Pool(Recorder()))
    for _ in range(2):
        x, context = torch.randn(2, 4), torch.randn(2, 4)
        expected = geglu(network.inner(x) + network.inner(context)) + 1
        torch.testing.assert_close(run(x, context), expected, rtol=0, atol=0)
    assert not inner.pool.held and not inner.routes and run.routes == {"outer/cuda_graph": 2}


def test_the_callers_key_may_be_a_function(network: Network) -> None:
    keys = ["one"]
    run = executor(network, key=lambda: keys[-1])
    for key in ("one", "two", "one"):
        keys.append(key)
        run(torch.randn(2, 4), context=torch.randn(2, 4))
    assert run.pool.made == 2
