"""Which choice a linear layer takes: the trial, what is kept of it, and what is not believed."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearway import home
from clearway.ops import _linear_choices, state
from clearway.ops._cublaslt import Choice, Failed, Shape
from clearway.ops._linear_choices import FOLDER, LINEAR, Choices

SHAPE = Shape(0, torch.float16, 5, 24, 16, True)
CPU = torch.device("cpu")


class Fake:
    """A binding of a few choices; those of `wrong` give something else, those of `failing` nothing."""

    def __init__(self, count: int = 4, wrong: tuple[int, ...] = (), failing: tuple[int, ...] = ()) -> None:
        self.given = [Choice(number, bytes([number + 1] * 64), 0) for number in range(count)]
        self.wrong, self.failing = wrong, failing
        self.fickle: tuple[int, ...] = ()
        self.asked = 0
        self.ran: list[int] = []

    def version(self) -> int:
        return 130100

    def choices(self, shape: Shape, most: int) -> list[Choice]:
        self.asked += 1
        return self.given[:most]

    def run(self, shape: Shape, choice: Choice, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.ran.append(choice.number)
        if choice.number in self.failing:
            raise Failed("it is not to be had")
        out = F.linear(x, weight, bias)
        if choice.number in self.wrong:
            out[-1, -1] += 0.05 * out.abs().max()
        if choice.number in self.fickle and len(self.ran) % 2:
            out[0, 0] = torch.nextafter(out[0, 0].float(), torch.tensor(9.0)).half() + 1e-3
        return out


class Clock:
    """Times as they are told, by number; each contender's calls are made once."""

    def __init__(self, **ms: float) -> None:
        self.ms = {LINEAR: 1.0} | {int(name[1:]): value for name, value in ms.items()}
        self.timed: list[set[int]] = []

    def __call__(self, contenders: Mapping[int, Sequence[Any]]) -> dict[int, float]:
        assert next(iter(contenders)) == LINEAR
        self.timed.append(set(contenders))
        for calls in contenders.values():
            assert len({len(each) for each in contenders.values()}) == 1
            assert all(torch.equal(call(), calls[0]()) for call in calls)
        return {name: self.ms.get(name, 2.0) for name in contenders}


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))


def made(
    binding: Any, clock: Any, capturing: bool = False, device: str = "a GPU", settle: Any = lambda: None
) -> Choices:
    return Choices(
        *(binding, clock, lambda: capturing, lambda index: device, lambda index: 2**12),
        *(contextlib.nullcontext, settle),
    )


def kept() -> list[Path]:
    folder = home.path(FOLDER)
    return sorted(folder.iterdir()) if folder.is_dir() else []


def test_the_fastest_is_taken_and_kept_for_later_processes() -> None:
    clock = Clock(c0=1.0, c1=0.8, c2=0.7, c3=0.9)
    first = made(Fake(), clock)
    assert first.of(SHAPE, CPU) == first.binding.choices(SHAPE, 4)[2]
    assert first.of(SHAPE, CPU) == first.binding.choices(SHAPE, 4)[2]
    assert clock.timed == [{LINEAR, 0, 1, 2, 3}]
    content = json.loads(kept()[0].read_text())
    assert content["number"] == 2 and content["us"]["linear"] == 1000.0 and content["us"]["2"] == 700.0
    later = Clock(c0=0.1)
    assert made(Fake(), later).of(SHAPE, CPU).number == 2 and later.timed == []
    assert made(Fake(), later, capturing=True).of(SHAPE, CPU).number == 2


def test_pytorch_is_left_only_for_what_is_worth_it() -> None:
    assert made(Fake(), Clock(c0=0.98)).of(SHAPE, CPU) is None
    later = Clock(c0=0.1)
    assert made(Fake(), later).of(SHAPE, CPU) is None and later.timed == []
    assert json.loads(kept()[0].read_text())["algorithm"] is None


def test_what_is_wrong_or_fails_is_not_tried() -> None:
    clock = Clock(c0=0.1, c1=0.1, c2=0.1, c3=0.9)
    binding = Fake(wrong=(0,), failing=(1,))
    binding.fickle = (2,)
    assert made(binding, clock).of(SHAPE, CPU).number == 3
    assert clock.timed == [{LINEAR, 3}]


def test_where_there_is_no_choice_it_is_pytorch() -> None:
    clock = Clock()
    assert made(Fake(0), clock).of(SHAPE, CPU) is None and clock.timed == [] and kept()


def test_nothing_is_tried_while_a_graph_is_captured() -> None:
    clock = Clock(c0=0.1)
    choices = made(Fake(), clock, capturing=True)
    assert choices.of(SHAPE, CPU) is None and kept() == []
    choices._capturing = lambda: False
    assert choices.of(SHAPE, CPU).number == 0  # afterwards it is


def test_a_self_test_takes_the_first_and_keeps_nothing() -> None:
    clock = Clock(c2=0.1)
    choices = made(Fake(), clock)
    with state.trusting():
        assert choices.of(SHAPE, CPU).number == 0
        assert made(Fake(0), clock).of(SHAPE, CPU) is None
    assert clock.timed == [] and kept() == []
    assert choices.of(SHAPE, CPU).number == 2


@pytest.mark.parametrize(
    "damage", ["", "[]", "{}", '{"schema": 2}', "{" * 10, "\0\0", "algorithm", "key", "no algorithm"]
)
def test_a_damaged_file_is_as_none(damage: str) -> None:
    """It stays, and another stands in for it from then on."""
    made(Fake(), Clock(c1=0.5)).of(SHAPE, CPU)
    (path,) = kept()
    content = json.loads(path.read_text())
    if damage == "algorithm":
        damage = json.dumps(content | {"algorithm": 5})
    elif damage == "key":
        damage = json.dumps(content | {"key": {**content["key"], "rows": 6}})
    elif damage == "no algorithm":
        damage = json.dumps({name: value for name, value in content.items() if name != "algorithm"})
    path.write_text(damage)
    clock = Clock(c3=0.5)
    assert made(Fake(), clock).of(SHAPE, CPU).number == 3 and len(clock.timed) == 1
    assert path.read_text() == damage and len(kept()) == 2
    later = Clock(c0=0.1)
    assert made(Fake(), later).of(SHAPE, CPU).number == 3 and later.timed == []


def test_where_everything_is_damaged_nothing_is_kept() -> None:
    for _ in range(_linear_choices.PLACES):
        assert made(Fake(), Clock(c1=0.5)).of(SHAPE, CPU).number == 1
        for path in kept():
            path.write_text("{")
    assert len(kept()) == _linear_choices.PLACES
    clock = Clock(c2=0.5)
    choices = made(Fake(), clock)
    assert [choices.of(SHAPE, CPU).number for _ in range(2)] == [2, 2] and len(clock.timed) == 1
    assert {path.read_text() for path in kept()} == {"{"}


def test_a_choice_that_the_heuristic_has_not_any_more_is_tried_anew() -> None:
    made(Fake(), Clock(c3=0.5)).of(SHAPE, CPU)
    moved = Fake()
    moved.given = [one._replace(number=3 - one.number) for one in reversed(moved.given)]
    assert made(moved, Clock()).of(SHAPE, CPU).number == 0  # the same one, at another place
    clock = Clock(c1=0.5)
    assert made(Fake(3), clock).of(SHAPE, CPU).number == 1 and len(clock.timed) == 1


def test_devices_versions_and_shapes_have_their_own() -> None:
    made(Fake(), Clock(c1=0.5)).of(SHAPE, CPU)
    newer = Fake()
    newer.version = lambda: 130200  # type: ignore[method-assign]
    assert made(newer, Clock(c2=0.5)).of(SHAPE, CPU).number == 2
    assert made(Fake(), Clock(c3=0.5), device="another").of(SHAPE, CPU).number == 3
    plain = SHAPE._replace(bias=False)
    assert made(Fake(), Clock(c0=0.5)).of(plain, CPU).number == 0
    assert len(kept()) == 4 and made(Fake(), Clock()).of(SHAPE, CPU).number == 1


def test_what_another_process_kept_meanwhile_holds() -> None:
    def meanwhile(contenders: Mapping[int, Sequence[Any]]) -> dict[int, float]:
        made(Fake(), Clock(c1=0.5)).of(SHAPE, CPU)
        return Clock(c2=0.5)(contenders)

    choices = made(Fake(), meanwhile)
    assert [choices.of(SHAPE, CPU).number for _ in range(2)] == [1, 1] and len(kept()) == 1
    assert made(Fake(), Clock()).of(SHAPE, CPU).number == 1


@pytest.mark.parametrize("damaged", [0, 1])
def test_of_processes_that_try_at_once_all_end_with_one_choice(damaged: int) -> None:
    """Each is done with its trial before any has kept what it found."""
    if damaged:
        made(Fake(), Clock(c1=0.5)).of(SHAPE, CPU)
        kept()[0].write_text("{")
    together = threading.Barrier(4)

    def process(number: int) -> int:
        def times(contenders: Mapping[int, Sequence[Any]]) -> dict[int, float]:
            together.wait(60)
            return Clock(**{f"c{number}": 0.5})(contenders)

        return made(Fake(), times).of(SHAPE, CPU).number

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(process, range(4)))
    assert len(found) == 1 and len(kept()) == 1 + damaged
    assert made(Fake(), Clock()).of(SHAPE, CPU).number in found


def test_what_another_keeps_half_is_stood_in_for() -> None:
    def meanwhile(contenders: Mapping[int, Sequence[Any]]) -> dict[int, float]:
        made(Fake(), Clock(c1=0.5)).of(SHAPE, CPU)
        kept()[0].write_text("{")
        return Clock(c2=0.5)(contenders)

    assert made(Fake(), meanwhile).of(SHAPE, CPU).number == 2
    assert made(Fake(), Clock()).of(SHAPE, CPU).number == 2


def test_a_home_that_cannot_be_written_costs_a_trial_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "create_json", lambda *_: False)
    for _ in range(2):
        clock = Clock(c1=0.5)
        choices = made(Fake(), clock)
        assert [choices.of(SHAPE, CPU).number for _ in range(2)] == [1, 1]
        assert len(clock.timed) == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("CUDA error: operation not permitted when stream is capturing"),
        Failed("cublasLtMatmulAlgoGetHeuristic gave CUBLAS_STATUS_INTERNAL_ERROR (14)"),
    ],
)
def test_a_trial_that_fails_ends_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's own for this process: not tried again, not kept, not said."""
    tried: list[int] = []

    def failing(*_: Any) -> Any:
        tried.append(1)
        raise error

    binding = Fake()
    if isinstance(error, Failed):
        monkeypatch.setattr(binding, "choices", failing)
    version = state.version()
    choices = made(binding, failing)
    assert [choices.of(SHAPE, CPU) for _ in range(2)] == [None, None] and len(tried) == 1
    assert kept() == [] and state.version() == version and capsys.readouterr().err == ""
    assert made(Fake(), Clock(c1=0.5)).of(SHAPE, CPU).number == 1  # another process tries


def test_a_fault_of_the_device_is_raised() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        made(Fake(), broken, settle=broken).of(SHAPE, CPU)


def test_what_is_kept_and_cannot_be_looked_up_is_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a capture nobody waits for the device meanwhile."""
    made(Fake(), Clock(c1=0.5)).of(SHAPE, CPU)

    def failing(*_: Any) -> Any:
        raise Failed("cublasLtCreate gave CUBLAS_STATUS_ALLOC_FAILED (3)")

    binding = Fake()
    monkeypatch.setattr(binding, "choices", failing)
    assert made(binding, Clock(), capturing=True, settle=failing).of(SHAPE, CPU) is None
    assert len(kept()) == 1


def test_a_trial_is_made_on_values_of_its_own() -> None:
    """The same each time, normal, nobody's random numbers used; in a layer of unit gain."""
    before = torch.get_rng_state()
    (x, weight, bias), again = (_linear_choices._inputs(Shape(0, torch.bfloat16, 512, 256, 128, True), CPU)
                                for _ in range(2))  # fmt: skip
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one, other) for one, other in zip((x, weight, bias), again, strict=True))
    assert (x.shape, weight.shape, bias.shape) == ((512, 128), (256, 128), (256,))
    assert {one.dtype for one in (x, weight, bias)} == {torch.bfloat16}
    for one, deviation in ((x, 1.0), (weight, 128**-0.5), (bias, 1.0), (F.linear(x, weight, None), 1.0)):
        assert float(one.float().std()) == pytest.approx(deviation, rel=0.2)
    assert _linear_choices._inputs(SHAPE._replace(bias=False), CPU)[2] is None


def test_a_trial_is_made_on_the_shape_s_device() -> None:
    """It is the current one then, and whether a graph is captured is asked there."""
    entered, log = [0], list[tuple[str, int]]()

    @contextlib.contextmanager
    def current(index: int) -> Iterator[None]:
        entered.append(index)
        yield
        entered.pop()

    def capturing() -> bool:
        log.append(("capturing", entered[-1]))
        return False

    def times(contenders: Mapping[int, Sequence[Any]]) -> dict[int, float]:
        log.append(("times", entered[-1]))
        return Clock(c1=0.5)(contenders)

    choices = Choices(Fake(), times, capturing, lambda index: "a GPU", lambda index: 2**12, current)
    assert choices.of(SHAPE._replace(device=1), CPU).number == 1
    assert log == [("capturing", 1), ("times", 1)] and entered == [0]


def test_modes_of_inference_and_of_gradients_are_tried_alike() -> None:
    assert torch.is_grad_enabled() and made(Fake(), Clock(c1=0.5)).of(SHAPE, CPU).number == 1
    with torch.inference_mode():
        plain = SHAPE._replace(bias=False)
        assert made(Fake(), Clock(c2=0.5)).of(plain, CPU).number == 2


def test_the_name_of_a_device_tells_parts_of_it_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    about = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    assert _linear_choices.on_device(0) == "NVIDIA H200, 132 multiprocessors"
