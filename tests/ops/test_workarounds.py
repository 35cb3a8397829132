"""Which versions need which workaround, and the switches that force them."""

from __future__ import annotations

import sys

import pytest
import torch

from clearway import home
from clearway.ops import workarounds
from clearway.ops.workarounds import TABLE, Workaround


def test_names_are_distinct_and_say_all() -> None:
    assert len({entry.name for entry in TABLE}) == len(TABLE)
    for entry in TABLE:
        assert entry.symptom and entry.instead and entry.source and entry.versions().startswith("torch ")
        assert entry.since is None or entry.fixed is None or entry.since < entry.fixed


@pytest.mark.parametrize(
    ("torch_version", "macos", "expected"),
    [
        ((2, 12), (15, 0), False),
        ((2, 13), (15, 0), True),
        ((2, 14), (15, 0), True),
        ((2, 15), (15, 0), False),
    ],
)
def test_a_range_of_versions(torch_version, macos, expected: bool) -> None:
    entry = Workaround("", "", "", "", since=(2, 13), fixed=(2, 15))
    assert entry.applies(torch_version, macos) is expected
    assert entry.versions() == "torch from 2.13, before 2.15"


def test_macos_versions() -> None:
    entry = Workaround("", "", "", "", macos=(13, 3))
    assert [entry.applies((2, 13), found) for found in ((13, 2), (13, 3), (26, 0), None)] == [
        True,
        False,
        False,
        True,
    ]
    assert entry.versions() == "torch no fix known, macOS before 13.3"


@pytest.mark.parametrize("name", workarounds.FORCE)
def test_either_name_forces_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in workarounds.FORCE:
        monkeypatch.delenv(other, raising=False)
    assert not workarounds.forced()
    monkeypatch.setenv(name, "0")
    assert not workarounds.forced()
    monkeypatch.setenv(name, "1")
    assert workarounds.forced() and all(workarounds.needed(entry.name) for entry in TABLE)


def test_torch_2_13_needs_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearway.device.torch_version", lambda: (2, 13))
    monkeypatch.setattr(workarounds, "macos_version", lambda: (15, 5))
    workarounds._applies.cache_clear()
    assert {entry.name for entry in TABLE if workarounds.needed(entry.name)} == {
        "broadcast attention",
        "sigmas as tensors",
        "layer_norm in float32",
        "padding of rank 5",
        "copies of gappy tensors",
        "2^31 elements",
        "lerp with infinities",
    }
    workarounds._applies.cache_clear()
    with pytest.raises(KeyError):
        workarounds.needed("no such fault")


def test_elsewhere_than_on_mps_the_functions_are_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARWAY_MPS_FORCE_LEGACY_OPS", "1")
    x = torch.randn(3, 8)
    assert workarounds.narrow(x, 1, 2, 3)._base is x
    assert torch.equal(workarounds.cumsum(x.long(), 0), x.long().cumsum(0))
    expected = torch.nn.functional.layer_norm(x, [8], torch.ones(8), None, 1e-5)
    assert torch.equal(workarounds.layer_norm(x, [8], torch.ones(8), None, 1e-5), expected)


class OnMps(torch.Tensor):
    """Says that it lies on MPS."""

    @property
    def device(self):
        return torch.device("mps")


def test_on_mps_they_go_the_long_way_where_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8).half().as_subclass(OnMps)
    monkeypatch.setattr(workarounds, "needed", lambda name: True)
    assert workarounds.narrow(x, 1, 2, 3).data_ptr() != x[:, 2:].data_ptr()
    out = workarounds.layer_norm(x, [8], torch.ones(8), None, 1e-5)
    assert out.dtype == torch.float16
    monkeypatch.setattr(workarounds, "needed", lambda name: False)
    assert workarounds.narrow(x, 1, 2, 3).data_ptr() == x[:, 2:].data_ptr()


@pytest.fixture
def mac(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A Mac before torch is imported, with a measurement that says Metal is faster."""
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path))
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(workarounds, "_installed", lambda package: "2.14.1")
    home.write_json(
        {
            "torch": "2.14.1",
            "values": {"PYTORCH_MPS_PREFER_METAL": "1", "PATH": "/elsewhere", "PYTORCH_MPS_FAST_MATH": 1},
        },
        "tuned",
        "environment.json",
    )


def test_variables_are_set_before_torch_starts_and_only_known_ones(mac) -> None:
    environment: dict[str, str] = {}
    assert workarounds.prepare_environment(environment) == {"PYTORCH_MPS_PREFER_METAL": "1"} == environment


@pytest.mark.parametrize(
    "why", ["torch runs already", "not a Mac", "another torch", "the user's own", "nothing measured"]
)
def test_and_never_where_they_do_not_apply(mac, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PYTORCH_MPS_PREFER_METAL": "0"} if why == "the user's own" else {}
    if why == "torch runs already":
        monkeypatch.setitem(sys.modules, "torch", torch)
    if why == "not a Mac":
        monkeypatch.setattr("platform.system", lambda: "Linux")
    if why == "another torch":
        monkeypatch.setattr(workarounds, "_installed", lambda package: "2.15.0")
    if why == "nothing measured":
        home.write_json({}, "tuned", "environment.json")
    before = dict(environment)
    assert workarounds.prepare_environment(environment) == {} and environment == before


def test_importing_it_does_not_start_torch() -> None:
    import subprocess

    code = "import sys, clearway.ops.workarounds; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
