"""Ceilings by a fake clock: what is reckoned, how long it may take, what is kept and for whom."""

from __future__ import annotations

import pytest
import torch

from clearway import device, home
from clearway.device import Device
from clearway.measure import ceilings as module
from clearway.measure.ceilings import Ceilings, best, ceilings, measure
from fake_timer import FakeTimer

CPU = Device("cpu")
KNOWN = Ceilings("float32", 1e12, 1e11, 1e-6)


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))


class Machine(FakeTimer):
    """A machine of known speed: it moves the clock by what products and copies take on it."""

    def install(self, monkeypatch: pytest.MonkeyPatch, flops_per_s: float, bytes_per_s: float) -> None:
        def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            self.spend(2 * a.shape[0] * a.shape[1] * b.shape[1] / flops_per_s)

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            self.spend(2 * source.numel() * source.element_size() / bytes_per_s)

        def add(one: torch.Tensor, value: float) -> None:
            self.spend(3e-6)

        monkeypatch.setattr(torch, "mm", mm)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(torch.Tensor, "add", add)
        monkeypatch.setitem(module.COPY_BYTES, "cpu", 2**20)


def test_a_machine_of_known_speed_is_measured_right(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Machine()
    timer.install(monkeypatch, 2e11, 1e10)
    found = measure(CPU, "float32", timer)
    assert found.flops_per_s == pytest.approx(2e11) and found.bytes_per_s == pytest.approx(1e10)
    assert found.launch_s == pytest.approx(3e-6)
    assert timer.now() < 3 * module.LIMIT_S


def test_a_slow_machine_is_not_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Machine()
    timer.install(monkeypatch, 1e8, 1e6)
    measure(CPU, "float32", timer)
    assert timer.now() < 4 * module.LIMIT_S


def test_best_is_the_least_of_several() -> None:
    timer, times = FakeTimer(), iter([9.0, *[0.03] * 20])
    assert best(lambda: timer.spend(next(times)), timer, limit_s=100.0) == pytest.approx(0.03)
    short = FakeTimer()
    assert best(lambda: short.spend(1e-4), short) == pytest.approx(1e-4)


def test_a_floor_is_the_larger_bound() -> None:
    assert KNOWN.floor_s(2e12, 1e11) == 2.0
    assert KNOWN.floor_s(1e12, 3e11) == 3.0


def test_it_is_measured_once_and_kept_by_dtype_threads_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(device: Device, dtype: str, timer: object) -> Ceilings:
        asked.append(dtype)
        return Ceilings(dtype, 1e12 * len(asked), 1e11, 1e-6)

    monkeypatch.setattr(module, "measure", fake)
    timer = FakeTimer()
    first = ceilings(CPU, "float32", timer)
    assert ceilings(CPU, "float32", timer) == first and asked == ["float32"]
    ceilings(CPU, "bfloat16", timer)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    ceilings(CPU, "float32", timer)
    assert asked == ["float32", "bfloat16", "float32"]
    monkeypatch.setattr(device, "identity", lambda kind: "another driver")
    ceilings(CPU, "float32", timer)
    assert len(asked) == 4


def test_a_fresh_measurement_only_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure", lambda *_: KNOWN)
    ceilings(CPU, "float32", FakeTimer())
    monkeypatch.setattr(module, "measure", lambda *_: Ceilings("float32", 5e11, 2e11, 5e-7))
    assert ceilings(CPU, "float32", FakeTimer()) == KNOWN
    assert ceilings(CPU, "float32", FakeTimer(), fresh=True) == Ceilings("float32", 1e12, 2e11, 5e-7)


@pytest.mark.parametrize("stored", [None, 3, {}, {"flops_per_s": "x"}, {"flops_per_s": 0.0}])
def test_what_is_stored_wrongly_is_measured_anew(stored: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure", lambda *_: KNOWN)
    ceilings(CPU, "float32", FakeTimer())
    file = home.read_json("ceilings", "cpu.json")
    file["ceilings"] = {name: stored for name in file["ceilings"]}
    home.write_json(file, "ceilings", "cpu.json")
    assert ceilings(CPU, "float32", FakeTimer()) == KNOWN
