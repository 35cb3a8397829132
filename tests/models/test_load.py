"""Sources of every kind, and the order in which they are looked for."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from clearway.device import Device
from clearway.errors import RequestError, UnavailableError
from clearway.models import hub, library, load
from clearway.models.build import guard
from clearway.ops import verdicts
from clearway.types import Precision


def test_paths_names_and_what_is_chosen(
    folders: dict[str, Path], files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(files["sd1"], device=Device("cpu"))
    assert (model.name, model.path, str(model.device)) == ("sd1", files["sd1"], "cpu")
    assert model.precision == Precision()
    assert load(str(folders["sdxl"]), device="cpu").name == "tiny-sdxl"
    monkeypatch.setenv("CLEARWAY_MODELS", str(folders["sd1"].parent))
    assert load("TINY-SD1", device="cpu").name == "tiny-sd1"
    monkeypatch.chdir(folders["sd1"])
    assert load(".", device="cpu").name == "tiny-sd1"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_weights_are_ordinary_in_any_mode(
    folders: dict[str, Path], files: dict[str, Path], kind: str
) -> None:
    """Executors refuse weights without versions; a program may run under inference_mode as a whole, and
    `generate` does while it loads the model that it was given by name."""
    source = {"folder": folders, "file": files}[kind]["sd1"]
    with torch.inference_mode():
        model = load(source, device="cpu")
    parts = (model.unet, model.vae, *model.text_encoders)
    weights = [weight for part in parts for weight in (*part.parameters(), *part.buffers())]
    assert weights and not any(weight.is_inference() for weight in weights)


def test_existing_paths_are_never_hub_ids(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", lambda *_, **__: pytest.fail("asked the hub"))
    place = folders["sd1"].parent
    monkeypatch.chdir(place.parent)
    assert load(f"{place.name}/tiny-sd1", device="cpu").name == "tiny-sd1"
    for source in ("./a/b", "../x", "a/b.safetensors", "/a/b", "~/none/x", "x/y/z", "plain"):
        with pytest.raises(RequestError):
            load(source, device="cpu")


def test_hub_ids(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(hub_id: str, **options: bool) -> tuple[Path, tuple[str, ...]]:
        asked.append((hub_id, options))
        return folders["sd1"], ("A note.",)

    monkeypatch.setattr(hub, "download", download)
    model = load("owner/name", device="cpu", local_files_only=True)
    assert (model.name, model.notes) == ("name", ("A note.",))
    load("owner/name", device="cpu", precision=Precision(unet="float16"))
    assert asked == [
        ("owner/name", {"half": False, "local_files_only": True}),
        ("owner/name", {"half": True, "local_files_only": False}),
    ]


def test_the_embedded_model(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "embedded_folder", lambda: folders["sd1"])
    assert load(device="cpu").name == "embedded"
    monkeypatch.setattr(library, "embedded_folder", lambda: tmp_path)
    with pytest.raises(UnavailableError, match="holds no embedded model"):
        load(device="cpu")


@pytest.mark.parametrize("source", ["", " ", "a\0b", "x" * 5000, "nonsense"])
def test_what_is_nothing_is_a_sentence(source: str) -> None:
    with pytest.raises(RequestError) as error:
        load(source, device="cpu")
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"a folder without model_index\.json"):
        load(tmp_path, device="cpu")


def test_wrong_dtypes_and_devices_are_said_before_anything_is_read(files: dict[str, Path]) -> None:
    with pytest.raises(RequestError, match="dtype 'float8'"):
        load(files["sd1"], device="cpu", precision=Precision(unet="float8"))
    with pytest.raises(RequestError, match="device 'tpu'"):
        load(files["sd1"], device="tpu")


def test_dtypes_may_be_said_shortly(files: dict[str, Path]) -> None:
    short = Precision(unet="fp16", text_encoder="bf16", vae="fp32", sampling="fp16")
    model = load(files["sd1"], device="cpu", precision=short)
    assert model.precision == Precision("float16", "bfloat16", "float32", "float16")
    assert model.unet.dtype == torch.float16 and model.text_encoders[0].dtype == torch.bfloat16
    with pytest.raises(RequestError, match="dtype 'x'"):
        load(files["sd1"], device="cpu", precision=Precision(sampling="x"))


def test_a_mixed_vae_is_read_in_float32_and_no_other_part_is_mixed(
    files: dict[str, Path], folders: dict[str, Path]
) -> None:
    for source in (files["sd1"], folders["sd1"]):
        model = load(source, device="cpu", precision=Precision(vae="mixed"))
        assert model.precision.vae == "mixed" and model.vae.dtype == torch.float32
    for part, name in (("unet", "the UNet"), ("text_encoder", "a text encoder"), ("sampling", "the samp")):
        said = f"dtype 'mixed' is the VAE's alone; {name}.* takes float32, float16 or bfloat16"
        with pytest.raises(RequestError, match=said):
            load(files["sd1"], device="cpu", precision=Precision(**{part: "mixed"}))  # type: ignore[arg-type]


def test_folders_have_names_even_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "empty" / "inner"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    for source, name in ((".", "inner"), ("..", "empty"), ("../inner", "inner"), ("/", "/")):
        with pytest.raises(RequestError, match=f"^{name} is a folder without model_index"):
            load(source, device="cpu")


def test_a_home_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    monkeypatch.setenv("CLEARWAY_MODELS", os.pathsep.join(["/a", "~zz"]))
    with pytest.raises(RequestError, match="model '~nouser/x': there is no folder '~nouser'"):
        load("~nouser/x", device="cpu")


def test_errors_and_names_are_escaped(folders: dict[str, Path], tmp_path: Path) -> None:
    place = shutil.copytree(folders["sd1"], tmp_path / "a\x1b[31m\n")
    assert load(place, device="cpu").name == r"a\x1b[31m\n"
    (place / "unet" / "config.json").unlink()
    (place / "unet" / "config.json").write_text('{"in_channels": "\\u001b\\ud800"}')
    with pytest.raises(RequestError) as error:
        load(place, device="cpu")
    assert str(error.value).isprintable() and str(error.value).startswith(r"a\x1b[31m\n has a UNet")


def test_importing_the_room_is_light() -> None:
    code = "import sys, clearway.models; print(*(n for n in ('torch', 'diffusers', 'transformers', 'yaml', "
    code += "'huggingface_hub', 'tokenizers', 'safetensors') if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def stand_in(monkeypatch: pytest.MonkeyPatch, read: Any, capped: Any) -> None:
    """`read` for folders and `capped` for the limit, on a CPU that passes for a card."""
    monkeypatch.setattr(importlib.import_module("clearway.models.load"), "load_folder", read)
    monkeypatch.setattr("clearway.device.capped", capped)
    monkeypatch.setattr("clearway.device.release_memory", lambda device: None)
    monkeypatch.setattr("clearway.models.build.release_memory", lambda device: None)


def test_what_does_not_fit_the_device_at_once_stays_on_the_host(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA device without memory; its limit holds while it is tried."""
    card, tried, limits = Device("cuda", 0), list[str](), list[int | None]()
    module = importlib.import_module("clearway.models.load")  # not the function of that name
    real = module.load_folder

    def read(path: Path, *, device: Device, **given: Any) -> Any:
        tried.append(str(device))
        if device == card:
            with guard("the UNet", device):
                raise torch.OutOfMemoryError("CUDA out of memory")
        return real(path, device=device, **given)

    @contextmanager
    def capped(device: Device, limit: int | None) -> Iterator[None]:
        limits.append(limit)
        yield

    stand_in(monkeypatch, read, capped)
    model = load(folders["sd1"], device=card, precision=Precision(), memory_limit_bytes=2**30)
    assert tried == ["cuda:0", "cpu"] and limits == [2**30] * 2  # of self-tests and of reading
    assert model.device == card and model.memory_limit_bytes == 2**30
    assert next(model.unet.parameters()).device.type == "cpu"
    assert model.notes[-1] == (
        "tiny-sd1 does not fit into the memory of cuda:0 at once: it is moved there part by part"
    )


@pytest.mark.parametrize("fits", ["beside them", "after them", "never"])
@pytest.mark.parametrize("limit", [None, 2**33])
def test_what_does_not_fit_beside_self_tests_is_read_again_after_them(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fits: str, limit: int | None
) -> None:
    """So a first load is as later ones are, which meet none."""
    card, done = Device("cuda", 0), list[Any]()
    module = importlib.import_module("clearway.models.load")
    real, claim = module.load_folder, 2**30

    def read(path: Path, *, device: Device, **given: Any) -> Any:
        done.append(str(device))
        if device == card and (fits == "never" or (fits == "after them" and "settle cuda" not in done)):
            with guard("the UNet", device):
                raise torch.OutOfMemoryError("CUDA out of memory")
        return real(path, device=Device("cpu"), **given)

    @contextmanager
    def capped(device: Device, limit: int | None) -> Iterator[None]:
        done.append(limit)
        yield

    stand_in(monkeypatch, read, capped)
    monkeypatch.setattr(verdicts, "prepare", lambda *given: done.append("begin") or 1)
    monkeypatch.setattr(verdicts, "claimed_bytes", lambda device: claim)
    monkeypatch.setattr(verdicts, "settle", lambda kind: done.append(f"settle {kind}"))
    model = load(folders["sd1"], device=card, precision=Precision(), memory_limit_bytes=limit)
    beside, after = [limit and limit - claim, "cuda:0"], ["settle cuda", limit, "cuda:0"]
    wanted = {"beside them": beside, "after them": [*beside, *after], "never": [*beside, *after, "cpu"]}
    assert done == [limit, "begin", *wanted[fits]]
    assert any("part by part" in note for note in model.notes) == (fits == "never")


def test_a_limit_that_limits_nothing_is_noted(folders: dict[str, Path]) -> None:
    found = load(folders["sd1"], device="cpu", memory_limit_bytes=2**30).notes
    assert found == (*load(folders["sd1"], device="cpu").notes, found[-1])
    assert found[-1] == "the memory limit is for CUDA devices: on cpu nothing is limited by it"


def test_another_want_of_memory_is_not_taken_for_the_devices(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, *, device: Device, **given: Any) -> Any:
        with guard("the UNet", device):
            raise MemoryError

    monkeypatch.setattr(importlib.import_module("clearway.models.load"), "load_folder", read)
    with pytest.raises(UnavailableError, match="does not fit into the memory of cpu"):
        load(folders["sd1"], device="cpu")


@pytest.mark.parametrize("source", [None, 3, object(), torch.zeros(1)])
def test_what_is_no_name_is_told_of_by_its_kind(source: Any) -> None:
    with pytest.raises(RequestError, match=f"and {type(source).__name__} was given"):
        load(source)
