"""Eager execution calls and counts, and on CUDA has kernels built first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from clearway.execution import Eager, eager, executor
from clearway.execution.executor import forget


def test_every_call_is_counted_under_its_part() -> None:
    run = Eager(lambda x, *, y: x + y, "unet")
    assert [run(1, y=2), run(3, y=4)] == [3, 7]
    assert run.routes == {"unet/eager": 2}


def test_it_passes_on_what_an_executor_inside_says() -> None:
    class Inner:
        ran = "compiled"

        def __call__(self, x: int) -> int:
            return x

        def sentences(self, name: str) -> list[str]:
            return [f"{name}: it was compiled twice"]

    run = Eager(Inner(), "unet")
    assert run(3) == 3 and run.routes == {"unet/compiled": 1}
    assert run.sentences("the UNet") == ["the UNet: it was compiled twice"]
    assert Eager(lambda x: x, "unet").sentences("the UNet") == []


class Scaled(nn.Module):
    """Says how often it was called, and doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Identity(), 0

    def forward(self, x: Tensor, *, fail: bool = False) -> Tensor:
        self.calls += 1
        if fail:
            raise ValueError("its own")
        return 2 * self.inner(x)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """What kernels were built for, on a CPU that passes for CUDA."""
    seen: list[Callable[[], Any]] = []
    monkeypatch.setattr(eager, "takes_kernels", lambda tensor: True)
    monkeypatch.setattr(eager.ahead, "build", lambda run, calls, known: seen.append(run))
    monkeypatch.setattr(eager.torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


def test_kernels_are_built_once_a_shape_whichever_executor_asks(runs: list[Callable[[], Any]]) -> None:
    module, one = Scaled(), torch.ones(1, 2)
    with torch.no_grad():
        for x in (one, one, torch.ones(3, 2), one.double(), torch.ones(3, 2)):
            assert torch.equal(executor("eager", module, "unet")(x), 2 * x)
        assert len(runs) == 3 and module.calls == 5
        assert torch.equal(runs[1](), torch.full((3, 2), 2.0))
        forget(module)
        executor("eager", module, "unet")(one)
    assert len(runs) == 4


def test_nothing_is_built_where_a_call_more_would_be_noticed(runs: list[Callable[[], Any]]) -> None:
    listened, x = Scaled(), torch.ones(1)
    handle = listened.inner.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        executor("eager", listened, "unet")(x)
        executor("eager", lambda x: x, "unet")(x)
    executor("eager", Scaled(), "unet")(x)  # it may have to be differentiated
    with torch.no_grad(), FlopCounterMode(display=False):
        executor("eager", Scaled(), "unet")(x)
    assert runs == []
    handle.remove()


def test_off_cuda_kernels_are_built_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager.ahead, "build", lambda run, calls, known: pytest.fail("there are none"))
    with torch.no_grad():
        executor("eager", Scaled(), "unet")(torch.ones(1))


def test_a_failing_call_fails_as_it_is(runs: list[Callable[[], Any]]) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="its own"):
        executor("eager", Scaled(), "unet")(torch.ones(1), fail=True)
