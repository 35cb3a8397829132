"""The benchmark of kernels in Gluon: its plumbing, on this CPU with small shapes and what runs there."""

from __future__ import annotations

from pathlib import Path

from bench_on_cpu import lines_of


def test_every_part_runs_and_says_what_is_absent(tmp_path: Path) -> None:
    first, *lines = lines_of("gluon_on_device.py", tmp_path)
    assert first["gluon"]  # why this machine has none
    assert [line for line in lines if "failed" in line] == [] and "seconds" in lines[-1]
    timed = [line for line in lines if "p50_ms" in line]
    assert {line["part"] for line in timed} == {"geglu_linear", "convolution", "upsampler"}
    assert all("gluon" not in line["candidate"] for line in timed)
    assert all(line["p50_ms"] > 0 and line.get("error", 0) < 1e-2 for line in timed)
