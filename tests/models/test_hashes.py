"""Hashes against hashlib, and their cache."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from clearway import home
from clearway.models import hashes


def test_the_first_ten_digits(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 5_000_000)
    expected = hashlib.sha256(b"x" * 5_000_000).hexdigest()
    assert hashes.sha256([path]) == expected
    assert hashes.short_hash([path]) == expected[:10]
    (tmp_path / "b").write_bytes(b"y")
    both = hashlib.sha256(b"x" * 5_000_000 + b"y").hexdigest()
    assert hashes.sha256([path, tmp_path / "b"]) == both


def test_a_known_file_is_not_read_again_and_a_changed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    first = hashes.sha256([path])
    with monkeypatch.context() as patch:
        patch.setattr(hashes.hashlib, "sha256", lambda: pytest.fail("read again"))
        assert hashes.sha256([path]) == first
    before = path.stat().st_mtime_ns
    path.write_bytes(b"two")
    os.utime(path, ns=(before + 1000, before + 1000))
    assert hashes.sha256([path]) == hashlib.sha256(b"two").hexdigest()


def test_what_this_process_knows_needs_no_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    monkeypatch.setenv("CLEARWAY_HOME", str(path))  # a file: nothing can be kept in it
    first = hashes.sha256([path])
    monkeypatch.setattr(hashes.hashlib, "sha256", lambda: pytest.fail("read again"))
    assert hashes.sha256([path]) == first


def test_a_spoilt_or_unwritable_cache_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    home.write_json({str(path.resolve()): "nonsense"}, hashes.STORE)
    assert hashes.sha256([path]) == hashlib.sha256(b"one").hexdigest()
    monkeypatch.setenv("CLEARWAY_HOME", str(path))  # a file: nothing can be kept in it
    assert hashes.sha256([path]) == hashlib.sha256(b"one").hexdigest()
