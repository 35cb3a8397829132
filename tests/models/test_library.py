"""Models folders: what is listed, and which model a name means."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from builders import save_original
from clearway.errors import RequestError
from clearway.models import library
from clearway.models.library import available, embedded_problem, find, name_of, not_found


@pytest.fixture
def place(
    folders: dict[str, Path], files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A models folder as a WebUI has it: files, a subfolder, a Diffusers folder, other things."""
    place = tmp_path / "Stable-diffusion"
    (place / "xl").mkdir(parents=True)
    (place / ".hidden").mkdir()
    (place / "sd-v1.safetensors").symlink_to(files["sd1"])
    (place / "xl" / "Big.safetensors").symlink_to(files["sdxl"])
    (place / ".hidden" / "no.safetensors").symlink_to(files["sdxl"])
    (place / "tiny").symlink_to(folders["sd2"])
    save_original({"a.lora_up.weight": torch.ones(3)}, place / "style.safetensors")
    torch.save({"a": torch.ones(1)}, place / "old.ckpt")
    (place / "broken.safetensors").write_bytes(b"<html>")
    (place / "Put models here.txt").write_text("")
    (place / "again").symlink_to(place)  # a circle
    monkeypatch.setenv("CLEARWAY_MODELS", os.pathsep.join([str(tmp_path / "nothing"), str(place)]))
    return place


def test_what_is_listed(place: Path, files: dict[str, Path]) -> None:
    found = available()
    assert [entry.name for entry in found] == [
        "embedded", "Big", "broken", "old", "sd-v1", "style", "tiny"
    ]  # fmt: skip
    by = {entry.name: entry for entry in found}
    assert {name: by[name].family for name in ("Big", "sd-v1", "tiny")} == {
        "Big": "SDXL", "sd-v1": "SD 1.x", "tiny": "SD 2.x"
    }  # fmt: skip
    assert by["style"].problem == "is a LoRA"
    assert by["old"].problem == "is a pickle checkpoint (needs --allow-pickle)"
    assert "is a web page" in (by["broken"].problem or "")
    assert by["sd-v1"].size_bytes == files["sd1"].stat().st_size and by["tiny"].size_bytes > 10**7
    assert all((entry.family is None) != (entry.problem is None) for entry in found)


def test_more_folders(place: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEARWAY_MODELS")
    assert [entry.name for entry in available()] == ["embedded"]
    assert [entry.name for entry in available([folders["sd1"]])] == ["embedded", "tiny-sd1"]
    with pytest.raises(RequestError, match="there is no folder"):
        available([place / "none"])


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("sd-v1", "sd-v1.safetensors"),
        ("sd-v1.safetensors", "sd-v1.safetensors"),
        ("SD-V1", "sd-v1.safetensors"),
        ("big", "xl/Big.safetensors"),
        ("tiny", "tiny"),
    ],
)
def test_names(place: Path, name: str, file: str) -> None:
    assert find(name) == place / file


def test_names_that_are_none_or_several(place: Path) -> None:
    assert find("no") is None and find("sd") is None
    shutil.copy(place / "style.safetensors", place / "xl" / "style.safetensors")
    with pytest.raises(RequestError, match="'style' is there 2 times"):
        find("style")


def test_names_that_are_no_text(folders: dict[str, Path], place: Path) -> None:
    strange = [os.fsdecode(b"latin-\xe9"), "line\nend"]
    try:
        for name in strange:
            shutil.copytree(folders["sd1"], place / name)
    except OSError:
        pytest.skip("this file system has only names that are text")
    names = {entry.name for entry in available()}
    assert {r"latin-\udce9", r"line\nend"} <= names and all(name.isprintable() for name in names)
    assert find(strange[0]) == find(r"latin-\udce9") == place / strange[0]


def test_problems_are_escaped(place: Path) -> None:
    save_original({"\x1b[31m": torch.ones(1)}, place / "z.safetensors")
    problem = available()[-1].problem
    assert problem is not None and r"\x1b[31m" in problem and problem.isprintable()


def test_homes_that_are_not_known(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARWAY_MODELS", os.pathsep.join(["~nosuchuser", str(place)]))
    assert find("tiny") == place / "tiny"
    with pytest.raises(RequestError, match="there is no folder '~nosuchuser/x'"):
        available(["~nosuchuser/x"])
    assert "there is no folder '~nosuchuser'" in str(not_found("~nosuchuser/x"))


def test_case_matters_between_two(place: Path) -> None:
    shutil.copy(place / "style.safetensors", place / "STYLE.safetensors")
    if not (place / "style.safetensors").samefile(place / "STYLE.safetensors"):
        assert find("STYLE") == place / "STYLE.safetensors"
        assert find("style") == place / "style.safetensors"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("sd-v2", ["model 'sd-v2' is not known", "'sd-v1'", "hub id"]),
        ("embeded", ["'embedded'"]),
        ("{}/sd-v2.safetensors", ["does not exist", "'sd-v1.safetensors'"]),
        ("{}/none/x.safetensors", ["there is no folder"]),
        ("./x", ["'./x' does not exist", "holds no models"]),
        ("weights/x.safetensors", ["there is no folder 'weights'"]),
    ],
)
def test_what_is_not_there(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = str(not_found(source.format(place)))
    assert all(part in text for part in parts) and "\n" not in text


def test_the_variable_is_named_where_it_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CLEARWAY_MODELS" in str(not_found("anything"))
    monkeypatch.setenv("CLEARWAY_MODELS", "/nothing/here")
    assert "CLEARWAY_MODELS names '/nothing/here': no folder" in str(not_found("anything"))


def test_names_of_paths() -> None:
    assert name_of(Path("a/b.v2.safetensors")) == "b.v2"
    assert name_of(Path("a/stable-diffusion-v1.5")) == "stable-diffusion-v1.5"


def test_the_embedded_model(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "embedded_folder", lambda: tmp_path / "none")
    assert embedded_problem() == "is not part of this installation"
    monkeypatch.setattr(library, "embedded_folder", lambda: folders["sd1"])
    assert embedded_problem() is None
    assert available()[0].name == "embedded" and available()[0].family == "SD 1.x"
