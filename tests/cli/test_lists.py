"""The commands that list and report; each takes --json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from clearway import __version__
from clearway.cli.main import command_names, main
from clearway.models import library


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_samplers(run) -> None:
    code, out, _ = run("samplers", "--json")
    found = json.loads(out)
    assert code == 0
    names = {sampler["name"] for sampler in found["samplers"]}
    assert {"Euler", "Euler a", "Heun", "DPM++ 2M", "DPM++ SDE", "DDIM"} <= names
    assert "Karras" in {schedule["name"] for schedule in found["schedules"]}
    assert "DPM++ 2M" in run("samplers")[1]


def test_schedule_prints_sigmas(run) -> None:
    code, out, _ = run("schedule", "Karras", "--steps", "5")
    assert code == 0
    # k-diffusion's own values for SD 1.x
    assert [float(line) for line in out.split()] == pytest.approx(
        [14.614643, 4.796535, 1.274101, 0.247950, 0.029167, 0.0], abs=1e-5
    )
    assert len(json.loads(run("schedule", "DPM++ 2M", "--json")[1])["sigmas"]) == 21


@pytest.mark.parametrize("arguments", [["Carras"], ["Karras", "--steps", "0"], ["Exponential", "--rho", "3"]])
def test_a_wrong_schedule_is_one_sentence(run, arguments: list[str]) -> None:
    code, out, err = run("schedule", *arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1


def test_models_lists_folders(run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"<html>")
    code, out, _ = run("models", str(model.parent), str(tmp_path), "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0
    assert entries["embedded"]["problem"] is None
    assert entries[model.name]["family"] == "SD 1.x"
    assert entries["broken"]["problem"]
    assert "cannot be used" in run("models", str(tmp_path))[1]


def test_info_of_a_picture_without_parameters(run, tmp_path: Path) -> None:
    Image.new("RGB", (8, 16)).save(tmp_path / "plain.png")
    code, out, _ = run("info", str(tmp_path / "plain.png"))
    assert code == 0 and "8 x 16 without parameters" in out


def test_info_of_what_is_no_picture(run, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"no picture")
    code, _, err = run("info", str(tmp_path / "x.png"))
    assert code == 2 and err.count("\n") == 1


def test_info_reads_back_what_generate_wrote(run, model: Path) -> None:
    run("generate", "a red apple", "--model", str(model), "--size", "64x64", "--steps", "1", "-o", "a.png")
    found = json.loads(run("info", "a.png", "--json")[1])
    assert found["prompt"] == "a red apple"
    assert found["parameters"]["Version"] == f"Clearway {__version__}"
    assert run("info", "a.png")[1].startswith("a red apple\nSteps: 1")


def test_doctor_says_what_there_is_and_why_not(run) -> None:
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["devices"]["cpu"]["available"]
    assert all(state["available"] or state["reason"] for state in found["devices"].values())
    assert found["machine"]["versions"]["torch"]
    assert "default device" in run("doctor")[1]


def test_doctor_says_how_networks_run(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearway.models import chosen

    monkeypatch.setattr("clearway.device.KINDS", ("cpu",))
    assert "by flat (CLEARWAY_PLAIN=1 turns it off)" in run("doctor")[1]
    monkeypatch.delitem(chosen.DEFAULTS, "cpu")
    assert "plainly (clearway select may find better)" in run("doctor")[1]
    monkeypatch.setitem(chosen.DEFAULTS, "cpu", {"executor": "eager", "layout": "channels_last"})
    told = run("doctor")[1]
    assert "channels_last" in told and "CLEARWAY_PLAIN=1 turns it off" in told
    monkeypatch.setenv("CLEARWAY_PLAIN", "1")
    assert "plainly, since CLEARWAY_PLAIN is set" in run("doctor")[1]
    assert json.loads(run("doctor", "--json")[1])["plain"] is True


def test_help_and_version(run) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    code, out, _ = run()
    assert code == 0
    assert all(name in out for name in command_names())


def test_info_of_several_files(run, tmp_path: Path) -> None:
    for name, side in (("a.png", 8), ("b.png", 16)):
        Image.new("RGB", (side, side)).save(tmp_path / name)
    files = [str(tmp_path / name) for name in ("a.png", "b.png")]
    found = json.loads(run("info", *files, "--json")[1])
    assert [one["width"] for one in found] == [8, 16]
    out = run("info", *files)[1]
    assert out.index(f"== {files[0]}") < out.index(f"== {files[1]}") and "16 x 16" in out


def test_the_embedded_model_is_listed_once(run) -> None:
    folder = library.embedded_folder().parent
    names = [one["name"] for one in json.loads(run("models", str(folder), "--json")[1])]
    assert names.count("embedded") == 1
