"""The hub: which files are taken, and what is said when it cannot be reached. No network here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from clearway.errors import RequestError, UnavailableError
from clearway.models import hub

NAMES = [
    ".gitattributes", "README.md", "model_index.json", "v1-5-pruned.safetensors", "v1-5-pruned.ckpt",
    "scheduler/scheduler_config.json", "tokenizer/vocab.json", "tokenizer/merges.txt",
    "tokenizer/tokenizer_config.json", "safety_checker/model.safetensors",
    "text_encoder/config.json", "text_encoder/model.safetensors", "text_encoder/model.fp16.safetensors",
    "text_encoder/pytorch_model.bin", "unet/config.json", "unet/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.safetensors", "unet/diffusion_pytorch_model.fp16.safetensors",
    "unet/diffusion_pytorch_model.non_ema.safetensors", "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", ["a/b", "stabilityai/sd-turbo", "runwayml/stable-diffusion-v1-5", "A.b/c_d"])
def test_ids(name: str) -> None:
    assert hub.is_hub_id(name)


@pytest.mark.parametrize(
    "name", ["a", "./a", "../a/b", "a/b/c", "/a/b", "a/", "a b/c", "~/a", "a\\b", "a/.."]
)
def test_what_is_no_id(name: str) -> None:
    assert not hub.is_hub_id(name)


@pytest.mark.parametrize("half", [False, True])
def test_only_what_is_needed(half: bool) -> None:
    found = hub.needed(NAMES, half)
    assert ("unet/diffusion_pytorch_model.fp16.safetensors" in found) is half
    assert ("unet/diffusion_pytorch_model.safetensors" in found) is not half
    assert "vae/diffusion_pytorch_model.safetensors" in found and "tokenizer/merges.txt" in found
    assert not any(name.endswith((".bin", ".ckpt", ".md")) for name in found)
    assert not any("safety" in name or "pruned" in name or "non_ema" in name for name in found)
    assert hub.needed(["unet/config.json"], half) == []


def test_sharded_and_pickled_repositories() -> None:
    index = "unet/diffusion_pytorch_model.safetensors.index.json"
    shard = "unet/diffusion_pytorch_model-00001-of-00002.safetensors"
    found = hub.needed(["model_index.json", index, shard, "vae/diffusion_pytorch_model.bin"], False)
    assert set(found) == {"model_index.json", index, shard, "vae/diffusion_pytorch_model.bin"}


def test_shards_of_half_precision_belong_to_it() -> None:
    names = [
        "model_index.json",
        "unet/diffusion_pytorch_model.safetensors",
        "unet/diffusion_pytorch_model.safetensors.index.fp16.json",
        "unet/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
        "unet/diffusion_pytorch_model.fp16-00002-of-00002.safetensors",
    ]
    assert hub.needed(names, True) == [names[0], *names[2:]]
    assert hub.needed(names, False) == names[:2]


def online(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)


def test_downloading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def snapshot(hub_id: str, **options: Any) -> str:
        asked.append(options)
        return str(tmp_path)

    online(monkeypatch, NAMES)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hub.download("a/b", half=False, local_files_only=False) == (tmp_path, ())
    assert "model_index.json" in asked[0]["allow_patterns"]
    assert hub.download("a/b", half=False, local_files_only=True) == (tmp_path, ())
    assert asked[1] == {"local_files_only": True}


def test_a_repository_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    online(monkeypatch, ["x.safetensors"])
    with pytest.raises(RequestError, match=r"a/b on the hub holds no Diffusers folder"):
        hub.download("a/b", half=False, local_files_only=False)


def test_offline_what_was_downloaded_before_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    path, notes = hub.download("a/b", half=False, local_files_only=False)
    assert path == tmp_path
    assert notes == (
        "a/b could not be fetched from the hub: no route; the files downloaded earlier were taken.",
    )


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (LocalEntryNotFoundError("x\ny"), "a/b is not among the downloaded models"),
        (OfflineModeIsEnabled("please unset HF_HUB_OFFLINE"), "a/b was not looked for on the hub"),
        (ConnectionError("no route\nto host"), "a/b could not be fetched from the hub: no route"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_being_offline_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for local in (False, True):
        with pytest.raises(UnavailableError, match=sentence) as found:
            hub.download("a/b", half=False, local_files_only=local)
        assert "\n" not in str(found.value)


def test_local_files_only_really_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("went online"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UnavailableError, match="is not among the downloaded models"):
        hub.download("nobody/nothing-here", half=False, local_files_only=True)


def test_offline_mode_is_not_blamed_on_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(*_: Any, **__: Any) -> Any:
        raise OfflineModeIsEnabled("Cannot reach it. To disable it, unset the `HF_HUB_OFFLINE` variable")

    def absent(*_: Any, **__: Any) -> Any:
        raise LocalEntryNotFoundError("x")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(
        UnavailableError, match=r"a/b is not among the downloaded models \(nor a path"
    ) as error:
        hub.download("a/b", half=False, local_files_only=False)
    assert "HF_HUB_OFFLINE" not in str(error.value)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert "HF_HUB_OFFLINE" not in str(hub.download("a/b", half=False, local_files_only=False)[1])
