"""The benchmark of candidates: its plumbing, on this CPU with small shapes."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_on_cpu import lines_of
from clearway.execution.executor import pools
from fake_capture import Recorder

ROOT = Path(__file__).parents[2]


def test_all_parts_run_and_each_line_is_written(tmp_path: Path) -> None:
    _, *lines = lines_of("candidates_on_device.py", tmp_path)
    assert [line for line in lines if "failed" in line] == []
    timed = [line for line in lines if "p50_ms" in line]
    parts = {"product", "packed qkv", "geglu", "attention", "convolution", "skip_concat", "unet call"}
    assert {line["part"] for line in timed} == parts
    for line in timed:
        assert 0 < line["p20_ms"] <= line["p50_ms"] <= line["p80_ms"]
        assert line.get("error", 0) < 1e-2


def test_branches_are_the_two_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import candidates_on_device as candidates

    order: list[str] = []
    current = ["main"]

    def stream() -> Any:
        name = f"side {len(order)}"
        order.append(name)
        return SimpleNamespace(name=name, wait_stream=lambda other: None)

    @contextlib.contextmanager
    def entered(which: Any) -> Any:
        current.append(getattr(which, "name", "graph"))
        yield
        current.pop()

    main = SimpleNamespace(name="main", wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: None)
    for name, fake in {
        "Stream": stream,
        "stream": entered,
        "graph": entered,
        "CUDAGraph": lambda: graph,
        "current_stream": lambda: main,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    seen: list[tuple[str, float]] = []

    def unet(x: torch.Tensor, t: torch.Tensor, encoder_hidden_states: torch.Tensor, **_: Any) -> Any:
        seen.append((current[-1], float(x)))
        return (x * 10,)

    given = (torch.tensor([[1.0], [2.0]]), torch.ones(2)), {"encoder_hidden_states": torch.ones(2, 3)}
    halves = [candidates.half(given, index) for index in range(2)]
    _, outputs = candidates.forked(unet, halves)
    assert [float(output) for output in outputs] == [10.0, 20.0]
    assert seen[-2:] == [("graph", 1.0), ("side 1", 2.0)] and len(seen) == 6


class Network(torch.nn.Module):
    """Called as a UNet is."""

    def forward(self, x: torch.Tensor, t: torch.Tensor, *, scale: torch.Tensor, return_dict: bool) -> Any:
        assert not return_dict
        return (x * scale + t,)


@pytest.mark.parametrize("error", [None, RuntimeError("operation not permitted when stream is capturing")])
def test_on_cuda_a_call_is_the_replay_of_its_graph(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import candidates_on_device as candidates

    backend = Recorder(error)
    monkeypatch.setattr(sys.modules["clearway.execution.executor"], "TorchCapture", lambda: backend)
    run, network = SimpleNamespace(kind="cuda"), Network()
    given = (torch.ones(2, 3), torch.ones(2, 1)), {"scale": torch.full((2, 3), 4.0)}
    with torch.no_grad():
        if error is not None:
            with pytest.raises(RuntimeError, match=r"was not captured: .*cannot be captured"):
                candidates.prepared(run, network, given)
            return
        want, call = candidates.prepared(run, network, given)
    assert torch.equal(want, torch.full((2, 3), 5.0))
    (pool,) = pools(network)
    (graph,) = pool.held.values()
    graph.inputs[0].zero_()
    call()
    assert torch.equal(graph.output[0], torch.ones(2, 3)) and backend.captures == 1
