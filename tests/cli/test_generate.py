"""`clearway generate` from its words to its files."""

from __future__ import annotations

import json
import signal
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clearway import Request, StepDone
from clearway.cli import generate as command
from clearway.cli.main import build_parser, main

FAST = ["--size", "64x64", "--steps", "2", "--seed", "5"]


@pytest.fixture
def draw(model: Path, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["generate", *arguments, "--model", str(model)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_every_field_of_a_request_has_an_option() -> None:
    args = vars(build_parser().parse_args(["generate", "x"]))
    assert {field.name for field in fields(Request)} <= set(args)


def test_it_says_where_the_picture_is(draw) -> None:
    code, out, err = draw("a red apple", *FAST)
    assert (code, err) == (0, "")
    (path,) = out.split()
    assert Image.open(path).size == (64, 64)
    assert Path(path).parent.name == "pictures"


def test_json_is_one_object(draw) -> None:
    code, out, err = draw("a red apple", *FAST, "--count", "2", "--json", "--output", "out")
    found = json.loads(out)
    assert code == 0 and err == ""
    assert found["seeds"] == [5, 6]
    assert [Path(path).is_file() for path in found["paths"]] == [True, True]
    assert {"load", "text", "sampling", "vae", "save"} <= set(found["timings_ms"])
    assert found["routes"]["unet/flat"] == 2
    assert found["request"]["width"] == 64


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_a_picture_repeats_itself(draw, suffix: str) -> None:
    assert (
        draw(
            "a (red:1.2) apple, bright",
            *FAST,
            "-n",
            "green",
            "--sampler",
            "Euler a",
            "--eta",
            "0.5",
            "-o",
            f"a.{suffix}",
        )[0]
        == 0
    )
    code, _, err = draw("--from", f"a.{suffix}", "-o", f"b.{suffix}")
    assert (code, err) == (0, "")
    assert Path(f"a.{suffix}").read_bytes() == Path(f"b.{suffix}").read_bytes()


def test_options_change_what_is_repeated(draw) -> None:
    draw("a red apple", *FAST, "--sampler", "Euler a", "-o", "a.png")
    code, out, _ = draw("--from", "a.png", "--seed", "6", "--json", "-o", "b.png")
    request = json.loads(out)["request"]
    assert code == 0
    assert (request["seed"], request["sampler"], request["prompt"]) == (6, "Euler a", "a red apple")


def test_the_file_carries_its_parameters_and_evidence_apart(draw) -> None:
    draw("a red apple", *FAST, "--evidence", "-o", "a.png")
    text = Image.open("a.png").text
    assert text["parameters"].startswith("a red apple\nSteps: 2, Sampler: ")
    assert "routes" not in text["parameters"]
    evidence = json.loads(text["clearway"])
    assert evidence["routes"]["unet/flat"] == 2
    assert evidence["timings_ms"]["sampling"] > 0
    assert "/" + "root" not in text["clearway"]


def test_plain_turns_off_what_the_device_would_run_by(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearway.models import chosen

    monkeypatch.setitem(chosen.DEFAULTS, "cpu", {"executor": "eager", "ops": ("geglu",)})
    found = json.loads(draw("x", *FAST, "--json", "-o", "a.png")[1])
    assert found["choices"]["ops"] == ["geglu"] and found["routes"]["geglu/reference"] > 0
    _, out, err = draw("x", *FAST, "--plain", "--evidence", "--json", "-o", "b.png")
    assert err == "" and json.loads(out)["choices"]["ops"] == []
    evidence = json.loads(Image.open("b.png").text["clearway"])
    assert evidence["choices"]["executor"] == "eager" and "geglu/reference" not in evidence["routes"]


def test_dtypes_are_recorded_and_repeated(draw) -> None:
    draw("x", *FAST, "--dtype", "bfloat16", "-o", "a.png")
    assert "Dtype: bfloat16" in Image.open("a.png").text["parameters"]
    _, out, _ = draw("--from", "a.png", "-o", "b.png", "--json")
    assert json.loads(out)["precision"]["unet"] == "bfloat16"
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()


def test_a_bare_prompt_draws(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a red apple", *FAST, "--model", str(model)]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()
    assert main([*FAST, "--model", str(model), "a red apple"]) == 0


WRONG = {
    "no prompt": [],
    "sampler": ["x", "--sampler", "DPM++ 4M"],
    "schedule": ["x", "--schedule", "Carras"],
    "size": ["x", "--size", "1030x512"],
    "size twice": ["x", "--size", "64x64", "--width", "64"],
    "size words": ["x", "--size", "big"],
    "steps": ["x", "--steps", "0"],
    "number": ["x", "--steps", "many"],
    "option": ["x", "--stepps", "4"],
    "dtype": ["x", "--dtype", "float8"],
    "device": ["x", "--device", "gpu"],
    "folder as file": ["x", "--output", "a.bmp"],
    "empty output": ["x", "--output", ""],
    "odd size": ["x", "--size", "²x²"],
    "option of another sampler": ["x", "--sampler", "DPM++ 2M", "--eta", "1"],
    "option of another schedule": ["x", "--sampler", "Euler", "--schedule", "Exponential", "--rho", "3"],
    "last seed": ["x", "--seed", str(2**63 - 1), "--count", "2"],
    "from": ["--from", "missing.png"],
}


@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG.keys())
def test_a_mistake_is_one_sentence_and_code_2(draw, arguments: list[str]) -> None:
    code, out, err = draw(*arguments)
    assert code == 2 and out == ""
    assert err.startswith("clearway: ") and err.count("\n") == 1
    assert not Path("pictures").exists()


def test_a_strangers_picture_chooses_no_path_and_no_hub(
    draw, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL.PngImagePlugin import PngInfo

    for name in ("evil/repo", str(model)):
        info = PngInfo()
        info.add_text(
            "parameters", f"x\nSteps: 2, Sampler: Euler, CFG scale: 3, Seed: 1, Size: 64x64, Model: {name}"
        )
        Image.new("RGB", (8, 8)).save("m.png", pnginfo=info)
        assert main(["generate", "--from", "m.png"]) == 2
        err = capsys.readouterr().err
        assert "--model" in err and err.count("\n") == 1
    monkeypatch.setenv("CLEARWAY_MODELS", str(model.parent))
    draw("x", *FAST, "-o", "a.png")
    assert main(["generate", "--from", "a.png", "-o", "b.png"]) == 0  # a name in the user's own folders
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()


def test_an_empty_model_name_is_not_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--model", ""]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_reader_that_has_gone_does_not_stop_the_drawing(model: Path) -> None:
    import subprocess
    import sys

    script = (
        f"{sys.executable} -m clearway generate x --size 64x64 --steps 1 --count 3 --batch-size 1 "
        f"--model {model} -o out/ | true; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(Path("out").iterdir())) == 3


def test_a_picture_its_format_cannot_hold_is_png_and_that_is_said(draw) -> None:
    code, out, err = draw("word " * 9000, *FAST, "--steps", "1", "-o", "a.jpg")
    assert code == 0 and out.strip() == "a.png"
    assert "saved as PNG" in err


def test_a_missing_model_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--model", "./nowhere.safetensors"]) == 2
    err = capsys.readouterr().err
    assert "nowhere.safetensors" in err and err.count("\n") == 1


def test_an_absent_device_is_code_3(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearway import device

    monkeypatch.setattr(device, "absent", lambda kind: None if kind == "cpu" else "none answers")
    code, _, err = draw("x", "--device", "cuda")
    assert code == 3 and "--device cpu works" in err


def test_an_existing_file_is_refused_before_drawing(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.png").write_bytes(b"mine")
    monkeypatch.setattr(command, "loaded", lambda *_: pytest.fail("a model was loaded"))
    code, _, err = draw("x", *FAST, "--output", "a.png")
    assert code == 2 and "a.png" in err
    assert Path("a.png").read_bytes() == b"mine"


def test_ctrl_c_stops_after_the_step_and_keeps_finished_pictures(
    draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = command.Progress.__call__

    def press(self, event) -> None:
        inner(self, event)
        if isinstance(event, StepDone) and (event.group, event.step) == (2, 1):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command.Progress, "__call__", press)
    code, out, err = draw("x", *FAST, "--count", "3", "--batch-size", "1", "--output", "out")
    assert code == 130
    assert "stopped after step 1 of 2" in err and err.count("\n") == 1
    assert [path.name for path in Path("out").iterdir()] == [Path(out.strip()).name]


def test_a_disk_that_fills_while_drawing_loses_nothing(
    draw, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from clearway import UnavailableError, image

    inner = image.save

    def full(result, target, **options):
        if str(target) == "out":
            raise UnavailableError("the disk of out is full")
        return inner(result, target, **options)

    monkeypatch.setattr(image, "save", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spare"))
    code, out, err = draw("x", *FAST, "--output", "out")
    assert (code, out) == (3, "") and err.count("\n") == 1
    (kept,) = (tmp_path / "spare" / "clearway-pictures").iterdir()
    assert str(kept) in err


def test_pictures_are_saved_while_the_next_are_drawn(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first group's file is written only when a step of the second has been seen."""
    import threading

    from clearway import image

    drawing, inner, listen = threading.Event(), image.save, command.Progress.__call__

    def slow(result, target, **options):
        assert drawing.wait(60)
        return inner(result, target, **options)

    def watch(self, event) -> None:
        listen(self, event)
        if isinstance(event, StepDone) and event.group == 2:
            drawing.set()

    monkeypatch.setattr(image, "save", slow)
    monkeypatch.setattr(command.Progress, "__call__", watch)
    code, out, err = draw("x", *FAST, "--count", "2", "--batch-size", "1", "-o", "out")
    assert (code, err) == (0, "")
    assert [Path(line).name.split("-")[1] for line in out.split()] == ["5.png", "6.png"]


def test_a_full_disk_is_one_sentence(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = draw("x", *FAST, "--output", "out")
    assert code == 3 and err.count("\n") == 1
    assert not any(path.is_file() for path in Path("out").rglob("*"))


def test_pictures_of_a_batch_agree_with_their_singles(draw) -> None:
    draw("x", *FAST, "--count", "3", "-o", "batch")
    draw("x", *FAST, "--seed", "7", "-o", "single.png")
    batch = sorted(Path("batch").iterdir())
    apart = np.asarray(Image.open(batch[2])).astype(int) - np.asarray(Image.open("single.png")).astype(int)
    assert abs(apart).max() <= 1
