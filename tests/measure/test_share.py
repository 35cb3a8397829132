"""What is shared is the same figures without anything private."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest

from clearway.errors import UnavailableError
from clearway.measure import scenario, share
from clearway.measure.record import Record, read, to_line


def made(**more: object) -> Record:
    one = scenario.find("embedded")
    values: dict[str, object] = {
        "scenario": one.name,
        "contender": "clearway",
        "provenance": {
            "machine": "nvidia-h200",
            "device": "NVIDIA H200, 139 GiB",
            "settings": {"scenario": one.as_dict(), "environment": {"TORCH_HOME": "/home/alice/cache"}},
        },
        "throughput": {"samples_s": [1.0, 2.0], "p50_s": 1.5},
    }
    return Record(**{**values, **more})  # type: ignore[arg-type]


def test_figures_and_named_scenarios_are_kept(tmp_path: Path) -> None:
    share.write(tmp_path / "new" / "mine.jsonl", [made(), made(contender="diffusers")])
    first, second = read(tmp_path / "new" / "mine.jsonl")
    assert first.throughput == made().throughput and second.contender == "diffusers"
    assert first.provenance["settings"]["scenario"] == scenario.find("embedded").as_dict()
    assert first.provenance["device"] == "NVIDIA H200, 139 GiB"


def test_prompts_and_models_of_ones_own_are_not_shared() -> None:
    mine = scenario.find("embedded").changed(
        {"prompt": "a secret plan", "model": "/home/alice/models/secret.safetensors", "steps": "3"}
    )
    record = made(scenario=mine.name, provenance={"machine": "x", "settings": {"scenario": mine.as_dict()}})
    line = to_line(share.shared(record))
    assert "secret" not in line and "alice" not in line and "steps=3" in line
    assert f"model={share.PRIVATE}" in share.shared(record).scenario
    found = share.shared(record).provenance["settings"]["scenario"]
    assert found["prompt"] == found["model"] == share.PRIVATE and found["steps"] == 3


def test_paths_users_and_hosts_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "alices-laptop")
    record = made(
        failed="OSError: /home/alice/models/x is not there, nor C:\\Users\\alice\\x on alices-laptop",
        routes={"unet/eager": 3},
        intended={"note": "ratio 3/4, ~/.cache/clearway/v1 by Alice"},
    )
    line = to_line(share.shared(record))
    assert "alice" not in line.lower().replace("malice", "") and "/home" not in line and ".cache" not in line
    found = share.shared(record)
    assert "<path>" in (found.failed or "") and found.routes == {"unet/eager": 3}
    assert "ratio 3/4" in found.intended["note"]


@pytest.mark.parametrize(
    "text",
    [
        "[Errno 2] No such file or directory: '/home/alice/My Secret Models/x.safetensors'",
        'File "C:\\Users\\alice\\My Secret\\x.py", line 3',
        "file:///home/alice/secret/x",
        "at //server/alice/secret",
        "in ~/secret",
        r"in \\server\secret\alice",
    ],
)
def test_paths_of_every_form_are_taken_out(text: str) -> None:
    found = share.shared(made(failed=text)).failed or ""
    assert "alice" not in found and "secret" not in found.lower() and "<path>" in found


def test_an_account_called_like_a_contender_renames_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "clearway")
    record = made(comparisons=[{"against": "clearway-eager"}])
    assert share.shared(record).comparisons == record.comparisons


def test_what_is_no_path_is_kept() -> None:
    text = "see https://pytorch.org/docs/stable; attention/sdpa 3/4 of 10 GB/s, and/or 1 / 2"
    assert share.shared(made(failed=text)).failed == text


def test_a_disk_that_refuses_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="could not be written"):
        share.write(tmp_path / "file" / "x.jsonl", [made()])
