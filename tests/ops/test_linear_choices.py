"""Which choice a linear layer takes: the trial, what is kept of it, and what is not believed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from clearway.ops.linear import inputs

SHAPE = Shape(0, torch.float16, 5, 24, 16, True)
X, WEIGHT, BIAS = (arg.half() for arg in inputs(16, 24, 5))


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


def made(binding: Any, clock: Any, capturing: bool = False, device: str = "a GPU") -> Choices:
    return Choices(binding, clock, lambda: capturing, lambda index: device, lambda index: 2**12)


def kept() -> list[Path]:
    folder = home.path(FOLDER)
    return sorted(folder.iterdir()) if folder.is_dir() else []


def test_the_fastest_is_taken_and_kept_for_later_processes() -> None:
    clock = Clock(c0=1.0, c1=0.8, c2=0.7, c3=0.9)
    first = made(Fake(), clock)
    assert first.of(SHAPE, X, WEIGHT, BIAS) == first.binding.choices(SHAPE, 4)[2]
    assert first.of(SHAPE, X, WEIGHT, BIAS) == first.binding.choices(SHAPE, 4)[2]
    assert clock.timed == [{LINEAR, 0, 1, 2, 3}]
    content = json.loads(kept()[0].read_text())
    assert content["number"] == 2 and content["us"]["linear"] == 1000.0 and content["us"]["2"] == 700.0
    later = Clock(c0=0.1)
    assert made(Fake(), later).of(SHAPE, X, WEIGHT, BIAS).number == 2 and later.timed == []
    assert made(Fake(), later, capturing=True).of(SHAPE, X, WEIGHT, BIAS).number == 2


def test_pytorch_is_left_only_for_what_is_worth_it() -> None:
    assert made(Fake(), Clock(c0=0.98)).of(SHAPE, X, WEIGHT, BIAS) is None
    later = Clock(c0=0.1)
    assert made(Fake(), later).of(SHAPE, X, WEIGHT, BIAS) is None and later.timed == []
    assert json.loads(kept()[0].read_text())["algorithm"] is None


def test_what_is_wrong_or_fails_is_not_tried() -> None:
    clock = Clock(c0=0.1, c1=0.1, c2=0.1, c3=0.9)
    binding = Fake(wrong=(0,), failing=(1,))
    binding.fickle = (2,)
    assert made(binding, clock).of(SHAPE, X, WEIGHT, BIAS).number == 3
    assert clock.timed == [{LINEAR, 3}]


def test_where_there_is_no_choice_it_is_pytorch() -> None:
    clock = Clock()
    assert made(Fake(0), clock).of(SHAPE, X, WEIGHT, BIAS) is None and clock.timed == [] and kept()


def test_nothing_is_tried_while_a_graph_is_captured() -> None:
    clock = Clock(c0=0.1)
    choices = made(Fake(), clock, capturing=True)
    assert choices.of(SHAPE, X, WEIGHT, BIAS) is None and kept() == []
    choices._capturing = lambda: False
    assert choices.of(SHAPE, X, WEIGHT, BIAS).number == 0  # afterwards it is


def test_a_self_test_takes_the_first_and_keeps_nothing() -> None:
    clock = Clock(c2=0.1)
    choices = made(Fake(), clock)
    with state.trusting():
        assert choices.of(SHAPE, X, WEIGHT, BIAS).number == 0
        assert made(Fake(0), clock).of(SHAPE, X, WEIGHT, BIAS) is None
    assert clock.timed == [] and kept() == []
    assert choices.of(SHAPE, X, WEIGHT, BIAS).number == 2


@pytest.mark.parametrize(
    "damage", ["", "[]", "{}", '{"schema": 1}', "{" * 10, "\0\0", "algorithm", "key", "no algorithm"]
)
def test_a_damaged_file_is_as_none(damage: str) -> None:
    made(Fake(), Clock(c1=0.5)).of(SHAPE, X, WEIGHT, BIAS)
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
    assert made(Fake(), clock).of(SHAPE, X, WEIGHT, BIAS).number == 3 and len(clock.timed) == 1
    assert json.loads(path.read_text())["number"] == 3


def test_a_choice_that_the_heuristic_has_not_any_more_is_tried_anew() -> None:
    made(Fake(), Clock(c3=0.5)).of(SHAPE, X, WEIGHT, BIAS)
    moved = Fake()
    moved.given = [one._replace(number=3 - one.number) for one in reversed(moved.given)]
    assert made(moved, Clock()).of(SHAPE, X, WEIGHT, BIAS).number == 0  # the same one, at another place
    clock = Clock(c1=0.5)
    assert made(Fake(3), clock).of(SHAPE, X, WEIGHT, BIAS).number == 1 and len(clock.timed) == 1


def test_devices_versions_and_shapes_have_their_own() -> None:
    made(Fake(), Clock(c1=0.5)).of(SHAPE, X, WEIGHT, BIAS)
    newer = Fake()
    newer.version = lambda: 130200  # type: ignore[method-assign]
    assert made(newer, Clock(c2=0.5)).of(SHAPE, X, WEIGHT, BIAS).number == 2
    assert made(Fake(), Clock(c3=0.5), device="another").of(SHAPE, X, WEIGHT, BIAS).number == 3
    plain = SHAPE._replace(bias=False)
    assert made(Fake(), Clock(c0=0.5)).of(plain, X, WEIGHT, None).number == 0
    assert len(kept()) == 4 and made(Fake(), Clock()).of(SHAPE, X, WEIGHT, BIAS).number == 1


def test_what_another_process_kept_meanwhile_holds() -> None:
    def meanwhile(contenders: Mapping[int, Sequence[Any]]) -> dict[int, float]:
        made(Fake(), Clock(c1=0.5)).of(SHAPE, X, WEIGHT, BIAS)
        return Clock(c2=0.5)(contenders)

    assert made(Fake(), meanwhile).of(SHAPE, X, WEIGHT, BIAS).number == 1


def test_a_home_that_cannot_be_written_costs_a_trial_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "write_json", lambda *_: False)
    for _ in range(2):
        clock = Clock(c1=0.5)
        choices = made(Fake(), clock)
        assert [choices.of(SHAPE, X, WEIGHT, BIAS).number for _ in range(2)] == [1, 1]
        assert len(clock.timed) == 1


def test_where_memory_is_short_it_is_pytorch_for_this_process() -> None:
    def short(contenders: Mapping[int, Sequence[Any]]) -> dict[int, float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert made(Fake(), short).of(SHAPE, X, WEIGHT, BIAS) is None and kept() == []

    def broken(contenders: Mapping[int, Sequence[Any]]) -> dict[int, float]:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        made(Fake(), broken).of(SHAPE, X, WEIGHT, BIAS)


def test_values_that_cannot_be_compared_decide_nothing() -> None:
    clock = Clock(c1=0.5)
    choices = made(Fake(), clock)
    assert choices.of(SHAPE, X * float("inf"), WEIGHT, BIAS) is None and kept() == []


def test_tensors_of_inference_and_of_gradients_are_tried_alike() -> None:
    weight = WEIGHT.clone().requires_grad_()
    assert made(Fake(), Clock(c1=0.5)).of(SHAPE, X, weight, BIAS).number == 1
    with torch.inference_mode():
        args = [arg.clone() for arg in (X, WEIGHT)]
        plain = SHAPE._replace(bias=False)
        assert made(Fake(), Clock(c2=0.5)).of(plain, *args, None).number == 2


def test_the_name_of_a_device_tells_parts_of_it_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    about = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    assert _linear_choices.on_device(0) == "NVIDIA H200, 132 multiprocessors"
