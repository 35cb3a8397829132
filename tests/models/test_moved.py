"""Moving a module: the same numbers, the same objects, and nothing left behind. The CPU stands for the
device: what matters is that memory is another."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

from clearway.device import Device
from clearway.execution.cuda_graph import CudaGraph
from clearway.execution.pool import Pool
from clearway.models import _moved
from clearway.models._moved import Moved
from fake_capture import Recorder

CPU = Device("cpu")


def network() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3).half().float())
    made[0].weight.data = made[0].weight.data.contiguous(memory_format=torch.channels_last)
    made[2].weight.data = made[2].weight.data.to(torch.bfloat16)
    return made.eval().requires_grad_(False)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(module: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = module.state_dict()
    return all(
        torch.equal(now[name], value)
        and now[name].dtype == value.dtype
        and now[name].stride() == value.stride()
        for name, value in before.items()
    )


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("piece_bytes", [1, 1000, 2**26])
def test_moving_changes_where_tensors_lie_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, inference: bool
) -> None:
    monkeypatch.setattr(_moved, "PIECE_BYTES", piece_bytes)
    with torch.inference_mode(inference):  # as a model is that a generation itself loads
        module = network()
    before, objects = values(module), [*module.parameters(), *module.buffers()]
    moved = Moved(module, CPU)
    assert same(module, before) and not moved.inside and moved.holds()
    rest = [tensor.data_ptr() for tensor in objects]
    with torch.inference_mode():
        moved.enter()
    inside = [tensor.data_ptr() for tensor in objects]
    assert same(module, before) and moved.inside and not set(rest) & set(inside)
    assert all(tensor.is_inference() == inference for tensor in module.parameters())
    with torch.inference_mode():
        module[0](torch.ones(1, 3, 4, 4))
    moved.enter()
    assert [tensor.data_ptr() for tensor in objects] == inside
    moved.leave()
    assert same(module, before) and [tensor.data_ptr() for tensor in objects] == rest
    assert all(
        one is other for one, other in zip(objects, [*module.parameters(), *module.buffers()], strict=True)
    )


def test_parts_of_one_tensor_stay_parts_of_it() -> None:
    whole = torch.randn(6, 4)
    module = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(3)).requires_grad_(False)
    for layer, part in zip(module, whole.chunk(3), strict=True):
        layer.weight.data = part
    moved = Moved(module, CPU)
    moved.enter()
    first, second, _ = (layer.weight for layer in module)
    assert second.data_ptr() - first.data_ptr() == 2 * 4 * 4
    assert torch.equal(torch.cat([layer.weight for layer in module]), whole)
    assert moved.bytes() < 2 * whole.nbytes + _moved.ALIGNMENT


def test_what_was_changed_between_moves_is_kept() -> None:
    module = network()
    moved = Moved(module, CPU)
    module[0].weight.data += 1  # at rest, in place: it is the host's copy that changes
    before = values(module)
    moved.enter()
    assert same(module, before)
    module.to(torch.float64)  # inside, as a NaN guard does: other memory
    before = values(module)
    assert not moved.holds()
    moved.leave()
    assert same(module, before) and moved.holds() and not moved.inside
    module[0].register_parameter("added", nn.Parameter(torch.ones(3), requires_grad=False))
    before = values(module)
    moved.enter()
    assert same(module, before) and moved.inside


def test_only_what_was_changed_is_copied_again() -> None:
    """As joining weights does at a network's first call: the rest keeps its copies, and nothing piles up."""
    module = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).requires_grad_(False)
    moved = Moved(module, CPU)
    size = moved.bytes()
    for _ in range(3):
        moved.enter()
        whole = torch.cat([module[0].weight.data, module[1].weight.data])
        module[0].weight.data, module[1].weight.data = whole.chunk(2)
        before, first = values(module), moved._pieces[0]
        moved.leave()
        assert same(module, before) and moved.holds() and moved._pieces[0] is first
        assert len(moved._pieces) == 2 and moved.bytes() <= size + 2 * _moved.ALIGNMENT
        assert module[1].weight.data_ptr() - module[0].weight.data_ptr() == 4 * 4 * 4


def test_staying_leaves_one_copy() -> None:
    module = network()
    before = values(module)
    moved = Moved(module, CPU)
    host = weakref.ref(moved._pieces[0])
    moved.stay()
    gc.collect()
    assert same(module, before) and host() is None


def test_leaving_gives_the_devices_memory_back() -> None:
    module = network()
    moved = Moved(module, CPU)
    moved.enter()
    inside = weakref.ref(moved._inside[0])
    moved.leave()
    gc.collect()
    assert inside() is None


def test_a_graph_is_not_replayed_after_a_move() -> None:
    """What it reads has been given back: the module's fingerprint sees the addresses."""
    module = nn.Conv2d(3, 4, 3).requires_grad_(False)
    backend = Recorder()
    run = CudaGraph(module, "unet", Counter(), Pool(backend))
    x, moved = torch.randn(1, 3, 8, 8), Moved(module, CPU)
    with torch.inference_mode():
        moved.enter()
        first = run(x)
        assert torch.equal(run(x), first) and backend.captures == 1
        moved.leave()
        kept = torch.empty(10 * moved.bytes(), dtype=torch.uint8)  # so that it does not lie there again
        moved.enter()
        assert torch.equal(run(x), first)
    assert (backend.captures, len(kept) > 0) == (2, True)


@pytest.mark.cuda
def test_on_a_device_weights_move_exactly_and_are_pinned() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    module = network()
    before = values(module)
    module.to("cuda")
    moved = Moved(module, Device("cuda", 0))
    assert all(piece.is_pinned() for piece in moved._pieces)
    assert same(module, before) and all(value.device.type == "cpu" for value in module.state_dict().values())
    held = torch.cuda.memory_allocated()
    moved.enter()
    assert all(value.is_cuda for value in module.state_dict().values())
    moved.leave()
    assert torch.cuda.memory_allocated() == held and same(module, before)
    moved.stay()
    assert same(module.cpu(), before)
