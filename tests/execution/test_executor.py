"""Executors by name; what they build stays with the module and goes with it."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

from clearway.errors import RequestError, UnavailableError
from clearway.execution import EXECUTORS, executor, forget
from clearway.execution.executor import absent
from clearway.ops.geglu import geglu


def network() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


def test_each_name_gives_its_executor_and_routes_say_what_ran() -> None:
    routes, module, x = Counter[str](), network(), torch.randn(2, 4)
    for name in ("eager", "cuda_graph"):
        torch.testing.assert_close(executor(name, module, "unet", routes)(x), module(x))
    assert routes == {"unet/eager": 2}  # no CUDA here
    with pytest.raises(RequestError, match="nearest: 'cuda_graph'"):
        executor("cudagraph", module, "unet")


def test_an_executor_says_what_did_not_run_as_meant() -> None:
    module, x = network(), torch.randn(2, 4)
    for fixed in ((), (("geglu", "reference"),)):
        run = executor("cuda_graph", module, "unet", fixed=fixed)
        assert run.sentences("the UNet") == []
        for _ in range(2):
            run(x)
        assert run.sentences("the UNet") == [
            "the UNet ran eagerly: CUDA graphs are for CUDA devices, this is cpu"
        ]
    run = executor("eager", module, "unet")
    run(x)
    assert run.sentences("the UNet") == []


def test_what_is_built_outlives_a_generation_and_is_not_copied() -> None:
    module = network()
    first = executor("cuda_graph", module, "unet", Counter())
    assert executor("cuda_graph", module, "unet", Counter()).pool is first.pool
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert executor("cuda_graph", copied, "unet").pool is not first.pool
    forget(module)
    assert set(vars(module)) == set(vars(network()))
    assert executor("cuda_graph", lambda x: x, "vae").pool is not first.pool


def test_fixed_routes_hold_within_calls() -> None:
    routes = Counter[str]()
    run = executor("eager", geglu, "op", routes, fixed=(("geglu", "reference"),))
    run(torch.randn(2, 4))
    with pytest.raises(UnavailableError):
        executor("eager", geglu, "op", routes, fixed=(("geglu", "triton"),))(torch.randn(2, 4))


def test_what_a_device_cannot_run() -> None:
    assert [name for name in EXECUTORS if absent(name, "cuda") is None] == ["eager", "compiled", "cuda_graph"]
    assert [name for name in EXECUTORS if absent(name, "cpu") is None] == ["eager", "compiled", "flat"]
    assert "CUDA" in str(absent("cuda_graph", "cpu")) and "CPU" in str(absent("flat", "cuda"))
