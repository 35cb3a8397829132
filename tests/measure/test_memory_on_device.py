"""The measurement of memory under a cap: its plumbing, on this CPU with a tiny model."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clearway.device import Device
from clearway.errors import UnavailableError
from clearway.measure.random_model import random_model
from clearway.models import Model
from clearway.types import Precision

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    module = importlib.import_module("memory_on_device")

    def small(name: str, device: Device, precision: Precision) -> Model:
        made = random_model(name, device, precision)
        return dataclasses.replace(made, defaults=dataclasses.replace(made.defaults, width=64, height=64))

    monkeypatch.setattr(module, "random_model", small)
    return module


def test_the_peak_is_taken_before_anything_is_resident(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Any] = []
    drawn, Meter = bench.drawn, bench.Meter

    def watched(model: Model, request: Any, times: int) -> Any:
        done.append((model.memory_limit_bytes, times))
        return drawn(model, request, times)

    class Watching(Meter):
        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            done.append("measured")

    monkeypatch.setattr(bench, "drawn", watched)
    monkeypatch.setattr(bench, "Meter", Watching)
    output = tmp_path / "new" / "memory.jsonl"
    arguments = ["--device", "cpu", "--case", "tiny-sd15-random:1", "--steps", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["memory_on_device.py", *arguments])
    assert bench.main() == 0
    cap = 2**30
    assert done == ["measured", (cap, 1), "measured", (cap, 2), "measured", (None, 3)]
    line = json.loads(output.read_text(encoding="utf-8"))
    assert line == json.loads(capsys.readouterr().out)
    assert line["case"] == "tiny-sd15-random, 1 GiB" and line["size"] == "64x64"
    assert line["largest_error_of_255"] == 0 and line["psnr_db"] is None
    assert line["loaded_on"] == "device" and line["within_cap"] is None  # nothing is capped here
    assert [line[f"{when}_within_cap"] for when in ("loading", "first", "later")] == [None] * 3
    assert (line["state"], line["begun"], line["others_bytes"]) == ("empty", "at load", None)
    assert isinstance(line["self_tests_s"], dict) and isinstance(line["not_used"], list)
    assert len(line["resident_s"]) == 3 and len(line["capped_s"]) == 2
    assert all(line[f"memory{when}"]["driver_peak_bytes"] > 0 for when in ("", "_first", "_loading"))


def test_what_a_device_cannot_hold_is_loaded_on_the_host(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = bench.random_model, list[str]()

    def scarce(name: str, device: Device, precision: Precision) -> Model:
        asked.append(device.kind)
        if device.kind == "cuda":
            raise UnavailableError("it does not fit") from MemoryError()
        return real(name, device, precision)

    monkeypatch.setattr(bench, "random_model", scarce)
    monkeypatch.setattr(bench.machine, "capped", lambda *_: nullcontext())
    monkeypatch.setattr(bench.machine, "release_memory", lambda _: None)
    begun: list[Any] = []
    monkeypatch.setattr(bench._checks, "begin_loading", lambda *given: begun.append(given))
    device = Device("cuda", 0)
    for when in bench.BEGUN:
        asked.clear()
        model, where = bench.loaded("tiny-sd15", device, Precision(), 2**30, when)
        assert (where, model.device, asked) == ("host", device, ["cuda", "cpu"])
    assert begun == [(device, Precision(), 2**30)]  # at load alone
    assert next(model.unet.parameters()).device.type == "cpu"


def test_the_whole_devices_use_is_held_against_the_cap(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what others had before; self-tests, which are processes too, are no others."""
    gib, device = 2**30, Device("cuda", 0)
    meters: Any = {
        "first": SimpleNamespace(driver_peak_bytes=11 * gib),
        "later": SimpleNamespace(driver_peak_bytes=7 * gib),
    }
    told = bench.within(meters, device, None, 8 * gib)
    assert told["device_peak_bytes"] == {"first": 11 * gib, "later": 7 * gib}
    assert (told["first_within_cap"], told["later_within_cap"]) == (False, True)
    assert bench.within(meters, device, 3 * gib, 8 * gib)["first_within_cap"] is True
    assert set(bench.within(meters, Device("cpu"), None, 8 * gib).values()) == {None}
    assert bench.in_use_by_others(Device("cpu")) is None
    monkeypatch.setattr(bench.torch.cuda, "mem_get_info", lambda index: (0, 140 * gib))
    for free, others in ((None, None), (137 * gib, 3 * gib), (141 * gib, 0)):
        monkeypatch.setattr(bench, "free_before", lambda device, free=free: free)
        assert bench.in_use_by_others(device) == others


@pytest.mark.parametrize("visible", ["", "3,1", "GPU-7a,GPU-8b"])
def test_the_driver_is_asked_for_the_device_that_is_meant(
    bench: Any, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    asked: list[Any] = []

    class Driver:
        def __init__(self, name: str) -> None:
            self.nvmlInit_v2 = lambda: 0
            self.nvmlDeviceGetHandleByIndex_v2 = lambda index, handle: asked.append(index) or 0
            self.nvmlDeviceGetHandleByUUID = lambda name, handle: asked.append(name) or 0
            self.nvmlDeviceGetMemoryInfo = self.memory

        def memory(self, handle: Any, found: Any) -> int:
            found._obj.free = 2**36
            return 0

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(bench.ctypes, "CDLL", Driver)
    assert bench.free_before(Device("cuda", 1)) == 2**36
    assert asked == [{"": 1, "3,1": 1, "GPU-7a,GPU-8b": b"GPU-8b"}[visible]]
    monkeypatch.setattr(bench.ctypes, "CDLL", lambda name: SimpleNamespace(nvmlInit_v2=lambda: 9))
    assert bench.free_before(Device("cuda", 0)) is None


def test_a_case_knows_no_verdicts_unless_they_are_kept(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", "/mine")
    with bench.state_folder("kept"):
        assert os.environ["CLEARWAY_HOME"] == "/mine"
    with bench.state_folder("empty"):
        folder = Path(os.environ["CLEARWAY_HOME"])
        assert folder.is_dir() and not list(folder.iterdir())
    assert os.environ["CLEARWAY_HOME"] == "/mine" and not folder.exists()
    monkeypatch.delenv("CLEARWAY_HOME")
    with bench.state_folder("empty"):
        assert os.environ["CLEARWAY_HOME"]
    assert "CLEARWAY_HOME" not in os.environ


def test_each_case_is_a_process_of_its_own(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, though one fails."""
    asked: list[list[str]] = []

    def run(command: list[str], check: bool) -> Any:
        asked.append(command)
        return SimpleNamespace(returncode=-9 if len(asked) == 1 else 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["memory_on_device.py", "--device", "cpu", "--vae-dtype", "float32"])
    assert bench.main() == 1
    assert [command[-1] for command in asked] == list(bench.CASES)
    assert all("--vae-dtype=float32" in command and "--device=cpu" in command for command in asked)
