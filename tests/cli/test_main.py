"""The command as a process: bare prompts, errors, closed pipes."""

import os
import subprocess
import sys

import pytest

from clearway.cli import main as main_module
from clearway.cli.main import command_names, main


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["a red apple"], ["generate", "a red apple"]),
        (["--steps", "2", "x"], ["generate", "--steps", "2", "x"]),
        (["info", "x.png"], ["info", "x.png"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_a_bare_prompt_is_generate(given: list[str], meant: list[str]) -> None:
    assert main_module._with_command(given) == meant


@pytest.mark.parametrize(
    ("word", "meant"), [("doctr", "doctor"), ("sampler", "samplers"), ("model", "models")]
)
def test_a_misspelt_command_draws_nothing(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert f"nearest: {meant}" in capsys.readouterr().err


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(main_module.samplers, "print_json", broken)
    with pytest.raises(ZeroDivisionError):
        main(["samplers", "--json"])


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (MemoryError, 3)])
def test_stops_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type, code: int
) -> None:
    def stop(*_: object) -> None:
        raise error

    monkeypatch.setattr(main_module.samplers, "print_json", stop)
    assert main(["samplers", "--json"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_a_reader_that_has_gone_is_no_error() -> None:
    script = f"{sys.executable} -m clearway samplers | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("SAMPLER")


@pytest.mark.parametrize("ending", [">&-", ">/dev/full", "| true"])
def test_output_that_cannot_be_written_is_no_traceback(ending: str) -> None:
    script = f"{sys.executable} -m clearway samplers {ending}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert "Traceback" not in done.stderr and done.returncode in (0, 3)
    assert (done.returncode == 3) == (ending == ">/dev/full")


@pytest.mark.parametrize("name", ["", *command_names()])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*([name] if name else []), "--help"])
    assert stop.value.code == 0
    assert "usage: clearway" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["generate", "x", "--schedules", "Karras"],
            ("clearway generate; nearest: --schedule", "generate --help"),
        ),
        (["x", "--schedules=Karras"], ("'--schedules=Karras' is not understood by clearway generate",)),
        (["samplers", "--jsons"], ("clearway samplers; nearest: --json", "clearway samplers --help")),
        (["doctor", "well"], ("'well' is not understood by clearway doctor (see",)),
        (["a", "red", "apple"], ("'red apple' is not understood", "several words are one prompt in quotes")),
        (["schedule", "karas"], ("'karas' is neither a schedule nor a sampler; nearest: 'Karras'",)),
        (["x", "-o", "y.png", "--format", "jpg"], ("--format jpg was asked for and the output is y.png",)),
    ],
)
def test_what_is_not_understood_is_told_of_the_command_it_was_said_to(
    given: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(word in err for word in words), err
