"""Blocks in turns: the same result to the bit, in few buffers, whatever the order. The CPU stands for the
device; a lane that delays its copies shows that each is waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearway.device import Device
from clearway.measure.random_model import random_model
from clearway.models import _streamed
from clearway.models._moved import Moved
from clearway.models._streamed import blocks, streamed
from clearway.types import Precision

CPU = Device("cpu")


class Late(_streamed.AtOnce):
    """Copies only when they are waited for, and spoils the buffer until then."""

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        with torch.inference_mode():
            for inside, _ in pairs:
                inside.fill_(float("nan"))
        return pairs

    def wait(self, token: Any) -> None:
        super().copy(token)


def sample(unet: Any, rows: int = 2) -> tuple[Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, 16, 16, generator=generator)
    context = torch.randn(rows, 77, unet.config.cross_attention_dim, generator=generator)
    added = {"text_embeds": torch.randn(rows, 32, generator=generator), "time_ids": torch.ones(rows, 6)}
    return x, {
        "timestep": torch.full((rows,), 500.0),
        "encoder_hidden_states": context,
        "added_cond_kwargs": added,
        "return_dict": False,
    }


@pytest.fixture(params=["tiny-sd15", "tiny-sdxl"])
def unet(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param, CPU, Precision()).unet


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny networks have small weights only."""
    monkeypatch.setattr(_streamed, "SMALL_BYTES", 0)


@torch.inference_mode()
@pytest.mark.parametrize("lane", [_streamed.AtOnce, Late])
def test_the_result_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch, unet: Any, lane: Any) -> None:
    monkeypatch.setattr(_streamed, "AtOnce", lane)
    x, given = sample(unet)
    whole = unet(x, **given)[0]
    with streamed(unet, Moved(unet, CPU), CPU) as streams:
        for _ in range(3):
            assert torch.equal(unet(x, **given)[0], whole)
        count = len(blocks(unet))
        assert streams.early >= 2 * count - 1  # from the second call on each is under way before its turn
        assert sum(buffer.numel() for buffer in streams._buffers) <= 3 * max(_streamed.block_bytes(unet))
    assert torch.equal(unet(x, **given)[0], whole)
    assert not any(module._forward_pre_hooks for module in unet.modules())


@torch.inference_mode()
def test_first_blocks_are_kept_where_there_is_room(unet: Any) -> None:
    x, given = sample(unet)
    whole, sizes = unet(x, **given)[0], _streamed.block_bytes(unet)
    for kept in (1, len(sizes) - 2, len(sizes) - 1, len(sizes)):
        with streamed(unet, Moved(unet, CPU), CPU, sum(sizes[:kept])) as streams:
            for _ in range(3):
                assert torch.equal(unet(x, **given)[0], whole)
            assert len(streams._blocks) == len(sizes) - kept


@torch.inference_mode()
def test_a_block_out_of_turn_is_fetched_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of weights that were made in inference mode, as a model is that a generation itself loads."""
    monkeypatch.setattr(_streamed, "AtOnce", Late)

    class ResnetBlock2D(nn.Linear):
        pass

    torch.manual_seed(0)
    network = nn.ModuleList(ResnetBlock2D(4, 4) for _ in range(5)).requires_grad_(False)
    x = torch.randn(2, 4)
    orders = [(0, 1, 2), (0, 1, 2), (2, 0, 1), (0, 3, 2, 4), (4, 3, 0), (0, 1, 2)]

    def run(order: tuple[int, ...]) -> Tensor:
        out = x
        for index in order:
            out = network[index](out)
        return out

    plain = [run(order) for order in orders]
    with streamed(network, Moved(network, CPU), CPU):
        for order, expected in zip(orders, plain, strict=True):
            assert torch.equal(run(order), expected)


@torch.inference_mode()
def test_between_turns_tensors_are_the_hosts(unet: Any) -> None:
    moved = Moved(unet, CPU)
    rest = {id(tensor): tensor.data_ptr() for tensor in unet.parameters()}
    x, given = sample(unet)
    with streamed(unet, moved, CPU):
        unet(x, **given)
        for block in blocks(unet):
            for name, tensor in block.named_parameters():
                assert (tensor.data_ptr() == rest[id(tensor)]) == ("time_emb_proj" not in name)
    assert moved.holds() and not moved.inside


@torch.inference_mode()
def test_small_tensors_are_always_in(monkeypatch: pytest.MonkeyPatch, unet: Any) -> None:
    x, given = sample(unet)
    whole, everything = unet(x, **given)[0], _streamed.block_bytes(unet)
    monkeypatch.setattr(_streamed, "SMALL_BYTES", 2**13)
    assert 0 < sum(_streamed.block_bytes(unet)) < sum(everything)
    with streamed(unet, Moved(unet, CPU), CPU) as streams:
        for _ in range(3):
            assert torch.equal(unet(x, **given)[0], whole)
        taking_turns = [tensor for block in streams._blocks.values() for tensor in block.tensors]
        assert all(tensor.nbytes >= 2**13 for tensor in taking_turns)


@torch.inference_mode()
def test_an_error_within_leaves_the_network_at_rest(unet: Any) -> None:
    moved = Moved(unet, CPU)
    with pytest.raises(ZeroDivisionError), streamed(unet, moved, CPU):
        raise ZeroDivisionError
    assert moved.holds()
    assert not any(module._forward_hooks for module in unet.modules())


@pytest.mark.cuda
@torch.inference_mode()
def test_on_a_device_the_result_is_the_same_to_the_bit(unet: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = Device("cuda", 0)
    x, given = sample(unet)
    moved = Moved(unet, device)
    x, given = (
        x.cuda(),
        {
            name: value.cuda()
            if isinstance(value, Tensor)
            else {key: one.cuda() for key, one in value.items()}
            if isinstance(value, dict)
            else value
            for name, value in given.items()
        },
    )
    moved.enter()
    whole = unet(x, **given)[0]
    moved.leave()
    with streamed(unet, moved, device) as streams:
        for _ in range(5):
            assert torch.equal(unet(x, **given)[0], whole)
        assert streams.early > 0
