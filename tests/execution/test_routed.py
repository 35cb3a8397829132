"""Attention in a recorded call: exchanged where the op routes it, and only there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearway.errors import UnavailableError
from clearway.execution import flat, recorded, routed
from clearway.ops import _cpp, attention_native, contract, state
from clearway.ops.attention import attention

needs_compiler = pytest.mark.skipif(_cpp.absent() is not None, reason=f"not here: {_cpp.absent()}")
NATIVE = torch.ops.clearway.attention_native.default


@pytest.fixture(autouse=True)
def _preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where it was measured quicker, without its self-test."""
    monkeypatch.setattr(attention_native, "QUICKER_CAPABILITY", (torch.backends.cpu.get_cpu_capability(),))
    monkeypatch.setattr(state, "verdict", lambda *given: None)


def qkv(tokens: int = 90, seed: int = 0, size: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, tokens, size, generator=generator) for _ in range(3)]


def steps(size: int = 16, **options: Any) -> tuple[list[Any], dict[str, int]]:
    routes: dict[str, int] = {}
    given = qkv(size=size)
    with torch.inference_mode():
        program, _ = recorded.record(lambda: F.scaled_dot_product_attention(*given, **options), given, [])
        made = routed.routed(program, routes)
    return [step.run for step in made.steps], routes


@needs_compiler
def test_attention_becomes_native_and_is_counted() -> None:
    assert steps() == ([NATIVE], {routed.ROUTE: 1})
    assert steps(scale=0.3) == ([NATIVE], {routed.ROUTE: 1})


@needs_compiler
@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.zeros(90, 90)}])
def test_what_native_does_not_take_stays(options: dict[str, Any]) -> None:
    given = qkv()
    mask = options.get("attn_mask")
    tensors = [*given, mask] if mask is not None else given
    with torch.inference_mode():
        program, _ = recorded.record(lambda: F.scaled_dot_product_attention(*given, **options), tensors, [])
    routes: dict[str, int] = {}
    assert NATIVE not in [step.run for step in routed.routed(program, routes).steps] and not routes


def test_what_the_user_named_stays() -> None:
    with contract.use(attention="sdpa"):
        found, routes = steps()
    assert NATIVE not in found and not routes


@needs_compiler
def test_one_that_cannot_be_built_is_switched_off_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise state.BuildError("c++ could not compile it")

    monkeypatch.setattr(attention_native, "ready", fails)
    try:
        found, routes = steps()
        assert NATIVE not in found and not routes
        assert "attention/native is not used in float32: c++ could not compile it" in capsys.readouterr().err
        assert attention.route(*qkv()).name == "sdpa"
    finally:
        state.forget()
    with contract.use(attention="native"), pytest.raises(UnavailableError, match="could not compile it"):
        steps()


@pytest.mark.parametrize("name", ["native", "tiled", "gemm"])
def test_a_step_that_the_named_one_does_not_take_stays(name: str) -> None:
    """It was never the op's: a VAE's one head of 512."""
    with contract.use(attention=name):
        found, routes = steps(size=512)
    assert len(found) == 1 and NATIVE not in found and not routes


@needs_compiler
def test_the_caller_s_default_device_decides_nothing() -> None:
    given, routes = qkv(), dict[str, int]()
    with torch.inference_mode():
        program, _ = recorded.record(lambda: F.scaled_dot_product_attention(*given), given, [])
    with torch.device("meta"):
        routed.routed(program, routes)
    assert routes == {routed.ROUTE: 1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(48, 144)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.view(*x.shape[:2], 3, 16).transpose(1, 2) for one in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


@needs_compiler
def test_a_recorded_module_gives_what_it_gave() -> None:
    block, x = Block(), torch.randn(2, 130, 48, generator=torch.Generator().manual_seed(1))
    calls: Counter[str] = Counter()
    run = flat.Flat(block, "block", calls, flat.Functions())
    ops: dict[str, int] = {}
    with torch.inference_mode(), contract.recording(ops):
        made = [run(x) for _ in range(3)]
    torch.testing.assert_close(made[0], block(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(made[0], made[1]) and torch.equal(made[1], made[2])
    assert calls == {"block/flat": 3} and ops == {routed.ROUTE: 3}
