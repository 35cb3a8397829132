"""Libraries of the .metal files that ship, emulated; skipped and counted where there is no C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from metal import tally
from metal.emulator import Library, absent, compile_shader
from metal.sources import text_of


@pytest.fixture(scope="session")
def emulator() -> None:
    """Skips what needs a C++ compiler where there is none."""
    reason = absent()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def emulated(emulator: None) -> Iterator[Callable[..., Library]]:
    """emulated("softmax", seed=1) is the library of softmax.metal; `source` replaces the file's text."""
    used: list[tuple[str, Library]] = []

    def make(name: str, source: str | None = None, **options: object) -> Library:
        library = compile_shader(text_of(name) if source is None else source, **options)  # type: ignore[arg-type]
        if source is None:
            used.append((name, library))
        return library

    yield make
    for name, library in used:
        tally.count(name, library)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line: what was emulated, in which modes, and what was not for want of a compiler."""
    lines = tally.lines()
    skipped = absent() or ""
    missing = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if skipped and skipped in str(report.longrepr)
    ]
    if missing:
        lines.append(f"metal: {len(missing)} tests not emulated: {skipped}")
    for line in lines:
        terminalreporter.write_line(line)
