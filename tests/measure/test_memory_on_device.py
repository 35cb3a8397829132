"""The measurement of memory under a cap: its plumbing, on this CPU with a tiny model."""

from __future__ import annotations

import dataclasses
import importlib
import json
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
    assert len(line["resident_s"]) == 3 and len(line["capped_s"]) == 2
    assert all(line[f"memory{when}"]["driver_peak_bytes"] > 0 for when in ("", "_first", "_loading"))


def test_what_a_device_cannot_hold_is_loaded_on_the_host(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = bench.random_model, list[str]()

    def scarce(name: str, device: Device, precision: Precision) -> Model:
        asked.append(device.kind)
        if device.kind == "cuda":
            raise UnavailableError("it does not fit")
        return real(name, device, precision)

    monkeypatch.setattr(bench, "random_model", scarce)
    monkeypatch.setattr(bench.machine, "capped", lambda *_: nullcontext())
    monkeypatch.setattr(bench.machine, "release_memory", lambda _: None)
    device = Device("cuda", 0)
    model, where = bench.loaded("tiny-sd15", device, Precision(), 2**30)
    assert (where, model.device, asked) == ("host", device, ["cuda", "cpu"])
    assert next(model.unet.parameters()).device.type == "cpu"


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
