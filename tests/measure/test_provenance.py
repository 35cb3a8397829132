"""Provenance: everything a reader of a result must know, and nothing private."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clearway import __version__
from clearway import device as machine
from clearway.device import Device
from clearway.measure import provenance as module
from clearway.measure.provenance import channel, provenance, slug

CPU = Device("cpu")
KEYS = {
    *("machine", "device", "kind", "driver", "os", "cores", "threads", "memory_bytes", "python", "torch"),
    *("torch_channel", "torch_commit", "cuda", "triton", "diffusers", "transformers", "clearway", "commit"),
    *("dirty", "date", "settings"),
}


@pytest.fixture(autouse=True)
def _no_memory_of_commits():
    module._commit.cache_clear()
    yield
    module._commit.cache_clear()


def test_everything_is_named() -> None:
    found = provenance(CPU, dtype="float32", compiler={"mode": "default"})
    assert set(found) == KEYS
    assert (found["kind"], found["driver"], found["clearway"]) == ("cpu", None, __version__)
    assert found["torch"] == torch.__version__ and found["memory_bytes"] > 2**28
    assert (found["settings"]["dtype"], found["settings"]["compiler"]) == ("float32", {"mode": "default"})
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    assert re.fullmatch(r"[a-z0-9-]+", found["machine"])
    assert json.loads(json.dumps(found)) == found


def test_nothing_private_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARWAY_HOME", "/home/someone/private")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/home/someone/cache")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    found = provenance(CPU)
    text = json.dumps(found)
    assert found["settings"]["environment"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    private = ("someone", "hf_secret", str(Path.home()), str(Path.cwd()))
    assert [word for word in private if len(word) > 1 and word in text] == []


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0", "release"),
        ("2.13.0+cpu", "release"),
        ("2.13.1+cu130", "release"),
        ("2.11.0+rocm7.1", "release"),
        ("2.13.0rc3", "candidate"),
        ("2.14.0.dev20260801+cu130", "nightly"),
        ("2.14.0a0+gitcf30153", "source"),
        ("2.14.0a0+nv26.02", "source"),
        ("2.13.0+gitcf30153", "source"),
    ],
)
def test_the_build_channel_is_read_off_the_version(version: str, expected: str) -> None:
    assert channel(version) == expected


@pytest.mark.parametrize(
    ("kind", "processor", "expected"),
    [
        ("cpu", "Intel(R) Xeon(R) Processor", "intel-xeon-8-cores"),
        ("cpu", "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", "intel-core-i7-9750h-8-cores"),
        ("cpu", "AMD EPYC 7763 64-Core Processor", "amd-epyc-7763-64-core-8-cores"),
        ("cpu", "Apple M1", "apple-m1-8-cores"),
        ("mps", "Apple M3 Pro", "apple-m3-pro"),
        ("cpu", "", "8-cores"),
        ("mps", "", "unknown"),
    ],
)
def test_the_folder_name_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, kind: str, processor: str, expected: str
) -> None:
    monkeypatch.setattr(machine, "machine", lambda: {"processor": processor, "cores": 8})
    assert slug(Device(kind)) == expected


def test_the_folder_name_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "cuda", SimpleNamespace(get_device_name=lambda name: "NVIDIA GeForce RTX 4090")
    )
    assert slug(Device("cuda", 0)) == "nvidia-geforce-rtx-4090"


def test_a_kernel_release_loses_what_can_name_a_company() -> None:
    assert module._system("Linux 6.18.4-acme-build7") == "Linux 6.18.4"
    assert module._system("Windows 11") == "Windows 11"


def git(folder: Path, *words: str) -> str:
    said = subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return said.stdout.strip()


def test_the_commit_is_the_checkouts_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("CLEARWAY_COMMIT", raising=False)
    package = tmp_path / "src" / "clearway"
    package.mkdir(parents=True)
    (package / "device.py").write_text("")
    monkeypatch.setattr(machine, "__file__", str(package / "device.py"))
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "another project")
    assert module._commit() == (None, None)  # inside somebody's checkout, but no part of it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "now it is")
    module._commit.cache_clear()
    commit = git(tmp_path, "rev-parse", "HEAD")
    for change, dirty in ((None, False), ("results.jsonl", False), ("src/clearway/new.py", True)):
        if change:
            (tmp_path / change).write_text("x")
        module._commit.cache_clear()
        assert module._commit() == (commit, dirty)
    monkeypatch.setenv("CLEARWAY_COMMIT", "told-dirty")  # a copy on another machine is told what it is
    module._commit.cache_clear()
    assert module._commit() == ("told", True)


def test_without_git_the_environment_tells_or_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_git", lambda folder, *words: None)
    monkeypatch.delenv("CLEARWAY_COMMIT", raising=False)
    assert module._commit() == (None, None)
    module._commit.cache_clear()
    monkeypatch.setenv("CLEARWAY_COMMIT", "abc123")
    found = provenance(CPU)
    assert (found["commit"], found["dirty"]) == ("abc123", False)
