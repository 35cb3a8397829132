"""A replay comes before the look at the module: what is then thrown away, and what is captured again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearway.execution.fingerprint import Fingerprint
from execution.test_cuda_graph import Network, agree, executor
from fake_capture import Recorder


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network().requires_grad_(False)


def test_the_device_works_while_the_module_is_looked_at(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, backend = executor(network), Recorder()
    run.pool.backend = backend
    x, context = torch.randn(2, 4), torch.randn(2, 4)
    run(x, context=context)
    before, seen, holds = backend.replays, list[int](), Fingerprint.holds
    monkeypatch.setattr(Fingerprint, "holds", lambda *given: seen.append(backend.replays) or holds(*given))
    agree(run, network, x, context)
    assert seen == [before + 1] and backend.replays == before + 1


def test_a_prompt_and_a_module_that_change_together(network: Network) -> None:
    """What is made of the prompt before the module is looked at goes with the graph; where it cannot be made
    the call tells."""
    run, backend = executor(network), Recorder()
    run.pool.backend = backend
    x, context = torch.randn(2, 4), torch.randn(2, 4)
    for _ in range(2):
        agree(run, network, x, context)
    network.scale = 2.0
    agree(run, network, x, torch.randn(2, 4))
    network.inner.weight.data.mul_(2)  # unseen, and made of what is there at the next prompt
    agree(run, network, x, torch.randn(2, 4))
    network.inner = nn.Linear(4, 6, bias=False).requires_grad_(False)
    agree(run, network, x, torch.randn(2, 4))
    del network.inner
    with pytest.raises(AttributeError, match="inner"):
        run(x, context=torch.randn(2, 4))


def test_what_could_not_be_captured_and_is_mended_is_captured_once_seen_twice(network: Network) -> None:
    run, backend = executor(network), Recorder()
    run.pool.backend = backend
    x, context, inner = torch.randn(2, 4), torch.randn(2, 4), network.inner
    for _ in range(2):
        agree(run, network, x, context)
    network.inner, backend.error = nn.Linear(4, 8, bias=False), RuntimeError("operation not permitted")
    network.inner.requires_grad_(False)
    for _ in range(2):
        agree(run, network, x, context)
    network.inner, backend.error = inner, None
    for _ in range(4):
        agree(run, network, x, context)
    assert run.routes == {"unet/cuda_graph": 5, "unet/eager": 3}


def test_who_begins_to_listen_is_heard_at_once_and_costs_one_replay(network: Network) -> None:
    run, backend = executor(network), Recorder()
    run.pool.backend = backend
    x, context, heard = torch.randn(2, 4), torch.randn(2, 4), list[int]()
    for _ in range(3):
        agree(run, network, x, context)
    before = backend.replays
    handle = network.inner.register_forward_hook(lambda *_: heard.append(len(heard)))
    for _ in range(3):
        run(x, context=context)
    assert len(heard) >= 3 and backend.replays == before + 1  # the first, thrown away
    assert run.routes["unet/eager"] == 3
    handle.remove()
    agree(run, network, x, context)
    agree(run, network, x, context)
    assert backend.replays == before + 3 and not run.pool.heard


def test_what_no_longer_lies_where_it_lay_is_not_read(network: Network) -> None:
    """And what was replayed of a module that changed otherwise is thrown away."""
    run, backend = executor(network), Recorder()
    run.pool.backend = backend
    x, context = torch.randn(2, 4), torch.randn(2, 4)
    for _ in range(2):
        agree(run, network, x, context)
    before = backend.replays
    network.inner.weight.data = network.inner.weight.data * 2
    agree(run, network, x, context)
    assert backend.captures == 2 and backend.replays == before + 2  # the new graph's: its trial and its use
    agree(run, network, x, context)
    before = backend.replays
    network.inner = nn.Linear(4, 8, bias=False).requires_grad_(False)
    agree(run, network, x, context)
    assert backend.captures == 3 and backend.replays == before + 3  # and one of the old graph for nothing
