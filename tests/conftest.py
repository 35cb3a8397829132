"""For all tests: no state outside the test's own folder, and no clocks in property tests."""

import hypothesis
import pytest

hypothesis.settings.register_profile("clearway", deadline=None)  # shared cores make any deadline luck
hypothesis.settings.load_profile("clearway")


@pytest.fixture(autouse=True, scope="session")
def _home(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEARWAY_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("CLEARWAY_MODELS", raising=False)
        yield
