"""torch.compile as an executor, with backends that need no compiler of C++."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends import registry

from clearway.errors import RequestError
from clearway.execution import executor
from clearway.execution.compiled import Compiled, Settings
from clearway.ops import contract


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x)) + x


class Breaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("scope", ["regional", "full"])
def test_it_computes_the_same_and_counts_what_was_compiled(scope: str) -> None:
    model, x = Model().requires_grad_(False), torch.randn(2, 3)
    run = Compiled(model, Settings(scope=scope, backend="eager", regions=("Block",)))
    expected = model(x)
    for _ in range(2):
        torch.testing.assert_close(run(x), expected, rtol=0, atol=0)
    assert (run.events.compiled, run.events.late, run.events.graph_breaks) == (1, 0, 0)  # once for three
    torch.testing.assert_close(run(torch.cat([x, x, x])), torch.cat([expected] * 3))
    assert (run.events.late, run.events.recompiled) == (1, 1)
    assert ["after the first call" in sentence for sentence in run.events.sentences()] == [True]


def test_regions_run_compiled_during_a_call_only() -> None:
    model = Model().requires_grad_(False)
    Compiled(model, Settings(backend="eager", regions=("Block",)))(torch.randn(1, 3))
    assert [block.__dict__.get("_compiled_call_impl") for block in model.blocks] == [None] * 3
    assert "_compiled_call_impl" not in model.blocks[0].__dict__


def test_graph_breaks_are_counted_with_their_reason() -> None:
    run = Compiled(Model(Breaking).requires_grad_(False), Settings(scope="full", backend="eager"))
    run(torch.randn(2, 3))
    assert run.events.graph_breaks >= 1
    assert any("broke the graph" in sentence for sentence in run.events.sentences())
    assert all(sentence.startswith("the UNet: ") for sentence in run.sentences("the UNet"))


def test_too_many_variants_run_eagerly_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearway.execution.compiled.LIMIT", 1)
    model = Model().requires_grad_(False)
    run = Compiled(model, Settings(scope="full", backend="eager", dynamic=False))
    for rows in (2, 3, 4):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(run(x), model(x))
    assert run.events.over_limit == 2
    assert any("ran eagerly" in sentence for sentence in run.events.sentences())


def test_settings_are_checked_and_recorded() -> None:
    settings = Settings(mode="max-autotune-no-cudagraphs", options=(("epilogue_fusion", False),))
    assert settings.record()["options"] == (("epilogue_fusion", False),)
    given = settings.arguments()["options"]
    assert given["max_autotune"] and not given["epilogue_fusion"]
    assert Settings(mode="reduce-overhead").arguments()["mode"] == "reduce-overhead"
    with pytest.raises(RequestError, match="regional, full"):
        Settings(scope="some")
    with pytest.raises(RequestError, match="Inductor"):
        Settings(backend="eager", options=(("epilogue_fusion", False),))
    with pytest.raises(RequestError, match="scope 'full'"):
        Compiled(nn.Linear(2, 2), Settings(backend="eager"))(torch.ones(1, 2))


@pytest.mark.parametrize("scope", ["regional", "full"])
def test_without_a_compiler_it_runs_eagerly_and_says_so_once(
    scope: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler was found")

    for known in ("_BACKENDS", "_COMPILER_FNS"):
        monkeypatch.setattr(registry, known, dict(getattr(registry, known)))
    registry.register_backend(broken, "broken")
    model, x, routes = Model().requires_grad_(False), torch.randn(2, 3), Counter[str]()
    settings = Settings(scope=scope, backend="broken", regions=("Block",))
    run = executor("compiled", model, "unet", routes, settings=settings)
    for _ in range(2):
        torch.testing.assert_close(run(x), model(x), rtol=0, atol=0)
    assert routes == {"unet/eager": 2}
    assert run.sentences("the UNet") == [
        f"the UNet ran eagerly: torch.compile cannot be used here ({run.module.failed})"
    ]
    told = capsys.readouterr().err
    assert told.count("torch.compile is not used") == 1 and "no C++ compiler was found" in told


def test_named_routes_that_compiled_code_does_not_take_are_said() -> None:
    run = Compiled(Model().requires_grad_(False), Settings(backend="eager", regions=("Block",)))
    x = torch.randn(2, 3)
    with contract.use(geglu="reference", attention="math"):  # itself, and one opaque node
        run(x)
    assert not run.sentences("the UNet")
    for _ in range(2):
        with contract.use(geglu="triton", attention="math"):
            run(x)
    (told,) = run.sentences("the UNet")
    assert told.startswith("the UNet: geglu=triton is not taken in compiled code")
