"""The flat executor where memory is short: what stays unpacked, what gives way, and that it is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clearway.device import Memory
from clearway.execution import flat, packed
from execution import test_flat
from execution.test_flat import agrees, flat_of, given

unet = test_flat.unet


def test_without_memory_weights_stay_unpacked_and_it_is_said(
    unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed.able(torch.float32):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(packed.machine, "memory", lambda device: Memory(2**20, 2**18))
    run = flat_of(unet)
    agrees(run, unet, given(unet))
    assert "were not packed: memory is short" in run.sentences("the UNet")[0]


def test_where_memory_is_short_another_size_gives_way(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the packed weights of one size and half of another's. Who gave way is not made room for."""
    if not packed.able(torch.float32):
        pytest.skip("this PyTorch has no oneDNN")
    run, sizes = flat_of(unet), [given(unet, side=side) for side in (8, 12, 16)]
    agrees(run, unet, sizes[0])
    whole = len(run.pool.packs.held)

    def room(device: Any) -> Memory:
        return Memory(2**30, 2**30 if len(run.pool.packs.held) < whole * 3 // 2 else 2**20)

    monkeypatch.setattr(packed.machine, "memory", room)
    for count, size in enumerate(sizes[1:], 1):
        agrees(run, unet, size)
        assert (run.pool.evicted, len(run.pool.held), run.pool.packs.short) == (count, 1, 0)
        assert not run.sentences("the UNet")
    for _ in range(2):
        for size in sizes:  # each in turn: the first two as far as there is room, and none is recorded again
            agrees(run, unet, size)
    assert (run.pool.made, run.pool.evicted, len(run.pool.held)) == (5, 2, 3)
    assert "were not packed: memory is short" in run.sentences("the UNet")[0]
    with torch.no_grad():
        next(unet.parameters()).mul_(1)  # every function goes, and their weights make room at once
    agrees(run, unet, sizes[0])
    assert not run.pool.packs.short


def test_where_there_is_never_any_room_nothing_gives_way(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not packed.able(torch.float32):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(packed.machine, "memory", lambda device: Memory(2**30, 2**20))
    run, sizes = flat_of(unet), [given(unet, side=side) for side in (8, 12)]
    for _ in range(2):
        for size in sizes:
            agrees(run, unet, size)
    assert (run.pool.made, run.pool.evicted) == (2, 0)


def test_what_is_recorded_anew_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is lowered again for want of memory, routes are those of the last time."""
    routes, times = {"attention/sdpa": 2}, []

    def made(program: Any, numbers: Any, packs: Any, taken: dict[str, int]) -> str:
        taken["attention/native"] = taken.get("attention/native", 0) + 1
        packs.short = int(not times)
        times.append(taken)
        return "function"

    monkeypatch.setattr(flat, "_made", made)
    function, taken = flat.Functions().fitted((), None, [], routes)  # type: ignore[arg-type]
    assert (function, taken, len(times)) == ("function", {"attention/sdpa": 2, "attention/native": 1}, 2)
    assert routes == {"attention/sdpa": 2}


def test_out_of_memory_while_packing_is_a_reason(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(flat.packed, "lowered", none_left)
    run = flat_of(unet)
    agrees(run, unet, given(unet))
    assert [*run.reasons] == ["there was no memory for its packed weights"]
