"""Graphs go, executors stay."""

from collections import Counter

import torch
from torch import nn

from clearway.execution import executor
from clearway.execution.executor import pools
from clearway.execution.release import release
from fake_capture import Recorder


def test_released_graphs_are_captured_anew() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    assert release(module) == 0
    run = executor("cuda_graph", module, "unet", routes := Counter[str]())
    (pool,) = pools(module)
    pool.backend = backend = Recorder()
    x = torch.randn(2, 4)
    with torch.inference_mode():
        first = run(x)
        assert torch.equal(run(x), first) and backend.captures == 1
        assert release(module) == 1 and not pool.held
        assert torch.equal(run(x), first) and backend.captures == 2
    assert routes["unet/cuda_graph"] == 3
