"""`clearway warmup`: the same options as generate, a table or JSON, mistakes in one sentence."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from clearway.cli.main import main
from clearway.cli.progress import Stop
from clearway.ops.attention import attention


@pytest.fixture
def warm(model: Path, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str, named: bool = True) -> tuple[int, str, str]:
        code = main(["warmup", *([str(model)] if named else []), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_it_prints_what_each_part_cost_and_what_ran(warm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(attention.defaults, "cpu")  # native may wait for its self-test, and say so
    code, out, err = warm("--sizes", "64x64,64x72", "--batch-size", "2")
    assert (code, err) == (0, "")
    assert "64 x 64, batch 2" in out and "64 x 72, batch 2" in out
    for part in ("text_encoder/flat", "unet/flat", "vae/flat"):
        assert part in out
    assert "is warm on" in out.splitlines()[-1]


def test_json_is_one_object(warm) -> None:
    code, out, _ = warm("--size", "64x64", "--windows", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["total_s"] > 0
    (one,) = found["sizes"]
    assert {"text", "sampling", "vae", "encode"} <= set(one["seconds"])
    assert one["routes"]["unet/flat"] > 3  # prompts of one and of two windows
    assert not list(Path().rglob("*.png"))  # no picture is written


def test_it_warms_what_would_run(warm, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearway.models import chosen

    monkeypatch.setitem(chosen.DEFAULTS, "cpu", {"executor": "eager", "ops": ("geglu",)})
    assert "geglu/reference" in warm("--size", "64x64")[1]
    assert "geglu/reference" not in warm("--size", "64x64", "--plain")[1]


def test_the_model_may_be_an_option(warm, model: Path) -> None:
    assert warm("--model", str(model), "--size", "64x64", named=False)[0] == 0
    code, _, err = warm("--model", str(model), "--size", "64x64")
    assert code == 2 and "MODEL and --model" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sizes", "64x64,big"],
        ["--sizes", ""],
        ["--sizes", "64x64,1030x512"],
        ["--sizes", "64x64", "--size", "64x64"],
        ["--sizes", "64x64", "--width", "64"],
        ["--windows", "0"],
        ["--sampler", "DPM++ 4M"],
        ["--dtype", "float8"],
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(warm, arguments: list[str]) -> None:
    code, out, err = warm(*arguments)
    assert code == 2 and out == ""
    assert err.startswith("clearway: ") and err.count("\n") == 1


def test_ctrl_c_stops_it(warm, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Stop.__call__

    def press(self: Stop, event: object) -> None:
        signal.raise_signal(signal.SIGINT)
        inner(self, event)

    monkeypatch.setattr(Stop, "__call__", press)
    code, out, err = warm("--size", "64x64")
    assert code == 130 and out == "" and "stopped" in err
