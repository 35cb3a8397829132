"""One tiny model for all command-line tests, and a state folder of their own."""

from pathlib import Path

import pytest

from builders import tiny_sd1


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd1(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CLEARWAY_MODELS", raising=False)
    monkeypatch.chdir(tmp_path)
