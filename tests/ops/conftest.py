"""Marks of this room, and a line at the end of a run on what was done with Triton's kernels."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "triton_compile: minutes of compiling Triton kernels for absent GPUs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "triton_compile" in (config.option.markexpr or ""):
        return
    skip = pytest.mark.skip(reason="minutes of compiling: -m triton_compile runs it")
    for item in items:
        if "triton_compile" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats
    passed = [report.nodeid for report in reports.get("passed", []) if "test_triton.py" in report.nodeid]
    skipped = [report for report in reports.get("skipped", []) if "test_triton.py" in report.nodeid]
    if not passed and not skipped:
        return
    interpreted = sum("interpreted_on_every_case" in nodeid for nodeid in passed)
    line = f"triton: {interpreted} implementations interpreted"
    if any("every_launch_compiles" in nodeid for nodeid in passed):
        line += ", every distinct launch compiled for 5 targets"
    elif any("compiles_for_each_target" in nodeid for nodeid in passed):
        line += ", each kernel once compiled for 5 targets"
    else:
        line += ", none compiled"
    if importlib.util.find_spec("triton") is None:
        line += f"; {len(skipped)} tests skipped, triton is not installed"
    terminalreporter.write_line(line)
