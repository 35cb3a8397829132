"""For all tests: no state outside the test's own folder, and no clocks in property tests."""

import hypothesis
import pytest

import evidence
from clearway.ops import attention_native

hypothesis.settings.register_profile("clearway", deadline=None)  # shared cores make any deadline luck
hypothesis.settings.load_profile("clearway")


@pytest.fixture(autouse=True, scope="session")
def _home(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEARWAY_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("CLEARWAY_MODELS", raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _attention_of_pytorch():
    """On any CPU: attention in C++ is compiled and self-tested once a state folder, and tests have many.

    Those that are about it say which CPU this is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_native, "QUICKER_CAPABILITY", ())
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was interpreted, compiled, emulated and run in this run; "-" is what was not."""
    for line in evidence.table():
        terminalreporter.write_line(line.rstrip())
