"""Compiled: what is compiled, and the proof of it, with a compiler that only counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clearway.measure import compiled
from clearway.measure.compiled import Compiled


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    found = {"graphs": 0, "breaks": 0, "skips": 0, "cached": 0}
    monkeypatch.setattr(compiled, "counts", lambda: dict(found))
    return found


def parts(place: str) -> Any:
    convs = [torch.nn.Conv2d(4, 4, 3) for _ in range(2)]
    return SimpleNamespace(unet=convs[0], vae=convs[1], place=place, compiled=None)


def test_eager_needs_no_proof() -> None:
    eager = Compiled()
    assert eager.proof() is None and eager.watched(print) is print and eager.label == "eager"
    assert eager.intended() == {"layout": "contiguous", "compile": None}


def test_channels_last_and_modes_that_need_cuda() -> None:
    own, setup = parts("cpu"), Compiled(layout="channels_last", scope="full", mode="reduce-overhead")
    setup.laid_out(own)
    assert own.unet.weight.is_contiguous(memory_format=torch.channels_last) and setup.mode is None
    kept = Compiled(scope="full", mode="reduce-overhead")
    kept.laid_out(parts("cuda:0"))
    assert kept.mode == "reduce-overhead" and kept.intended()["mode"] == "reduce-overhead"


def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda module, **how: asked.append((module, how)) or module)
    decode = object()
    unet = SimpleNamespace(compile_repeated_blocks=lambda **how: asked.append(("blocks", how)))
    pipe = SimpleNamespace(unet=unet, vae=SimpleNamespace(decode=decode))
    Compiled(scope="full", dynamic=True).compile(pipe, parts("cpu"))
    assert [module for module, _ in asked] == [unet, decode]
    assert all(how == {"fullgraph": True, "mode": None, "dynamic": True} for _, how in asked)
    asked.clear()
    Compiled(scope="regional").compile(pipe, parts("cpu"))
    assert [module for module, _ in asked] == ["blocks"]
    asked.clear()
    Compiled().compile(pipe, parts("cpu"))
    assert asked == []


def test_what_an_earlier_scenario_compiled_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda module, **how: "compiled")
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    own, first, later = parts("cpu"), Compiled(scope="full"), Compiled(scope="full")
    pipes = [SimpleNamespace(unet=object(), vae=SimpleNamespace(decode=object())) for _ in range(2)]
    with compiled.keeping():
        assert compiled.once("work", "how", lambda: own) is compiled.once("work", "how", object) is own
        assert compiled.once("work", "other", lambda: 1) == 1 and compiled.once("work", "how", object) is own
        first.compile(pipes[0], own)
        first.close()
        later.compile(pipes[1], own)
        assert pipes[1].unet == "compiled" and later.reused and not first.reused and not resets
        assert later.proof() is None and later.intended()["compiled_by_an_earlier_scenario"] is True
        assert first.proof() == "nothing was compiled"
        compiled.once("other work", "how", object)
        assert resets == [1] and compiled.once("work", "how", object) is not own and resets == [1, 1]
    assert resets == [1, 1, 1] and compiled.once("work", "how", lambda: None) is None
    first.close()
    assert resets == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        ({"graphs": 2}, {}, None),
        ({}, {}, "nothing was compiled"),
        ({"graphs": 2, "breaks": 1}, {}, "1 graph breaks"),
        ({"graphs": 2}, {"graphs": 1}, "1 graphs were compiled anew"),
        ({"graphs": 2, "skips": 3}, {}, "skipped 3 times"),
    ],
)
def test_the_proof(
    counted: dict[str, int], first: dict[str, int], later: dict[str, int], words: str | None
) -> None:
    setup = Compiled(scope="full", mode="max-autotune")
    turns = iter([first, later, {"graphs": 5}])

    def call(round: int, side_px: int) -> None:
        for name, count in next(turns).items():
            counted[name] += count

    run = setup.watched(call)
    run(0)
    run(1)
    found = setup.proof()
    assert found is None if words is None else words in (found or "")
    run(2, 64)  # another size may be compiled anew
    assert setup.recompiled == later.get("graphs", 0)


def test_the_compilers_own_counters_are_there() -> None:
    assert set(compiled.counts()) == {"graphs", "breaks", "skips", "cached"}
