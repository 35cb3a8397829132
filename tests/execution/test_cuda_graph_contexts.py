"""Captured graphs and what is kept of a context: made for another one, not by a hook, not by a run of NaN."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearway.execution.cuda_graph import WARM_UPS, CudaGraph
from clearway.execution.kept import Kept
from clearway.execution.pool import Pool
from clearway.ops._triton import Kernel
from fake_capture import Recorder


class Keying(nn.Module):
    """Adds a mean of what `k` makes of a context, which is kept as cross-attention's keys are."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.kept, self.factor = nn.Linear(4, 4), Kept(), 1.0

    def forward(self, x: Tensor, *, context: Tensor) -> Tensor:
        (keys,) = self.kept.get(context, list(self.k.parameters()), lambda: (self.k(context),))
        return x + self.factor * keys.mean(1, keepdim=True)


def keying() -> tuple[Keying, CudaGraph, Recorder]:
    module, backend = Keying().requires_grad_(False), Recorder()
    return module, CudaGraph(module, "unet", Counter(), Pool(backend), promised=("context",)), backend


def test_what_a_hook_made_of_a_context_is_not_kept() -> None:
    """One that edits keys in the first steps of a picture."""
    module, run, backend = keying()
    x, one, other = torch.randn(1, 3, 4), torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    for _ in range(3):
        run(x, context=one)
    before = backend.replays
    hook = module.k.register_forward_hook(lambda layer, given, out: out * 10)
    run(x, context=other)
    assert backend.replays == before  # nor is anything replayed for nothing, as long as it stays
    hook.remove()
    module.kept.forget()  # what eager kept of it
    torch.testing.assert_close(run(x, context=other), Keying.forward(module, x, context=other))


def test_what_could_not_be_made_of_a_context_is_made_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory ran out in a projection, some was freed, and the same words are tried again."""
    module, run, _ = keying()
    x, one, other = torch.randn(1, 3, 4), torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    for _ in range(3):
        run(x, context=one)
    forward = nn.Linear.forward
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            run(x, context=other)
    assert nn.Linear.forward is forward
    torch.testing.assert_close(run(x, context=other), module(x, context=other))


def test_a_module_that_changes_at_each_call_is_not_captured_at_each() -> None:
    module, run, backend = keying()
    x, context = torch.randn(1, 3, 4), torch.randn(1, 5, 4)
    for step in range(8):
        module.factor = 1.0 + step
        found = run(x, context=context)
        torch.testing.assert_close(found, module(x, context=context))
    assert backend.captures <= 2


class Launching(nn.Module):
    """Twice x by a kernel, whose values something is kept of."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel, self.kept = kernel, Kept()

    def forward(self, x: Tensor, *, context: Tensor) -> Tensor:
        out = torch.full_like(x, float("nan"))
        self.kernel.launch((1,), x, out)
        (read,) = self.kept.get(context, [], lambda: (context + out,), promised=True)
        return read


def test_kernels_are_built_by_a_run_that_launches_none_and_leaves_nothing() -> None:
    """The first warm-up gives NaN, since nothing is written in it; the graph, and what it keeps, do not."""
    told: list[str] = []

    class Jit:
        cache_key, device_caches = "", Counter[Any]()

        def warmup(self, *args: Any, grid: Any) -> Any:
            told.append("built")
            return SimpleNamespace(run=None)

        def __getitem__(self, grid: Any) -> Any:
            told.append("launched")
            return lambda x, out: out.copy_(2 * x)

    kernel = Kernel(lambda x, out: None)
    kernel._built = Jit()
    pool = Pool(Recorder())
    run = CudaGraph(Launching(kernel), "unet", Counter(), pool, promised=("context",))
    x, context = torch.ones(4), torch.ones(4)
    assert torch.equal(run(x, context=context), torch.full((4,), 3.0))
    assert told[0] == "built" and told.count("built") == 1 and "launched" in told
    assert pool.backend.warm_ups == WARM_UPS and run.routes == {"unet/cuda_graph": 1}
