"""Tiny models of each family, written once: as folders, and as files in the original layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders import original, save_original, tiny_sd1, tiny_sd2, tiny_sdxl
from clearway.device import Device
from clearway.models import _asked


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder of this test's own, and no models folders."""
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CLEARWAY_MODELS", raising=False)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Diffusers folder by family; not to be changed."""
    place = tmp_path_factory.mktemp("folders")
    makers = {"sd1": tiny_sd1, "sd2": tiny_sd2, "sdxl": tiny_sdxl}
    return {name: make(place / f"tiny-{name}") for name, make in makers.items()}


@pytest.fixture(scope="session")
def tensors(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """The same models' tensors under their original names, by family; not to be changed."""
    return {name: original(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, dict[str, Any]]) -> dict[str, Path]:
    """The same models as single files, by family; not to be changed."""
    place = tmp_path_factory.mktemp("files")
    return {name: save_original(held, place / f"{name}.safetensors") for name, held in tensors.items()}


@pytest.fixture(autouse=True)
def _beside_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate` puts every op in place on a CPU too, as beside a GPU, unless a test says otherwise."""
    if "only_a_cpu" not in request.fixturenames:
        monkeypatch.setattr(_asked, "recorded_here", lambda target, parts: False)


@pytest.fixture
def only_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU on this machine, for `accelerate`: others keep what they once found absent."""
    monkeypatch.setattr(_asked, "absent", lambda kind: f"there is no {kind}")
    monkeypatch.setattr(_asked, "pick", lambda: Device("cpu"))
