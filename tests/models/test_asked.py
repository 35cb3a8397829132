"""What `accelerate` makes of what it was asked for: ops, executor and layout by where the networks lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clearway import load
from clearway.device import Device
from clearway.errors import RequestError
from clearway.models import _asked
from clearway.models.accelerate import EVERY, accelerate, restore
from clearway.types import Choices
from dit_builders import tiny_sd3
from models import dit_pipelines
from pipelines import KINDS, draw, pipeline

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
CPU = (nn.Linear(1, 1),)
GPU = (SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device("cuda"))]),)


def asked(parts: Any = CPU, ops: Any = None, executor: str = "auto", layout: str | None = "auto") -> Any:
    return _asked.exact(nn.Linear(1, 1), parts, EVERY, ops, executor, layout, None)


def test_where_there_is_only_a_cpu_calls_are_recorded_and_no_op_is_in_place(only_a_cpu: None) -> None:
    assert asked() == _asked.Asked((), "flat", None)
    assert asked(executor="flat") == asked(ops=()) == asked()
    assert asked(executor="eager") == _asked.Asked(EVERY, "eager", "channels_last")
    assert asked(layout="channels_last").layout == "channels_last"


def test_what_is_named_is_put_in_place_and_what_that_costs_is_said(only_a_cpu: None) -> None:
    found = asked(ops=("geglu",))
    assert (found.ops, found.executor, found.layout) == (("geglu",), "auto", "channels_last")
    assert "ops=() leaves ops out" in found.notes[0]


def test_beside_a_gpu_every_op_is_in_place_wherever_the_networks_lie(
    only_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = _asked.Asked(EVERY, "auto", "channels_last")
    assert asked(GPU) == usual
    monkeypatch.setattr(_asked, "pick", lambda: Device("cuda", 0))
    assert asked() == usual  # it may be moved there
    assert asked(executor="flat") == _asked.Asked((), "flat", None)


@pytest.mark.parametrize("op", _asked.NEEDS)
def test_an_op_that_another_brings_says_so(op: str) -> None:
    assert any(f"{op} comes with {_asked.NEEDS[op]}" in note for note in asked(ops=(op,)).notes)
    assert not asked(ops=(op, _asked.NEEDS[op], "group_norm_silu")).notes


def test_graphs_where_none_can_be_captured_are_told_of_at_once(only_a_cpu: None) -> None:
    assert asked(executor="cuda_graph").notes == ("no graph can be captured here: there is no cuda",)


@pytest.mark.parametrize("ops", [3, [3], [None], [["attention"]], "all", ("atention",)])
def test_what_is_no_op_is_one_sentence(ops: Any) -> None:
    with pytest.raises(RequestError, match=r"cannot be put in place|are no names of ops"):
        asked(ops=ops)


def test_packed_qkv_is_yes_no_or_by_device() -> None:
    with pytest.raises(RequestError, match="packed_qkv 'yes' is not known"):
        _asked.exact(None, CPU, EVERY, None, "auto", "auto", "yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_on_a_cpu_alone_is_recorded_and_restored_to_the_bit(
    kind: str, folders: dict[str, Path], only_a_cpu: None
) -> None:
    pipe, given = pipeline(folders, kind)
    before = draw(pipe, given)
    report = accelerate(pipe)
    assert set(report.placed) == {"flat"} and not report.notes
    after = draw(pipe, given)
    assert np.abs(before - after).max() < 2e-3
    assert "unet ran" in str(report) and "by flat" in str(report) and not report.reasons()
    restore(pipe)
    assert np.array_equal(before, draw(pipe, given))


def test_a_wrapper_that_keeps_a_forward_in_a_closure_is_named_by_restore(
    folders: dict[str, Path], only_a_cpu: None
) -> None:
    pipe, given = pipeline(folders, "text2img")
    before = draw(pipe, given)
    accelerate(pipe)

    def wrapped(forward: Any) -> Any:
        return lambda *args, **kwargs: forward(*args, **kwargs)

    pipe.unet.forward = wrapped(pipe.unet.forward)
    assert any(
        "wrapped since" in reason and names == ["unet"] for reason, names in restore(pipe).left.items()
    )
    assert np.array_equal(before, draw(pipe, given))


def test_a_model_on_a_cpu_is_left_as_it_runs(folders: dict[str, Path], only_a_cpu: None) -> None:
    model = load(folders["sd1"], device="cpu")
    report = accelerate(model)
    assert not report.placed and "recorded calls" in str(report)
    assert "geglu" in accelerate(model, ("geglu",), layout=None).placed
    restore(model)


def test_a_model_that_does_not_run_by_recorded_calls_takes_every_op(
    folders: dict[str, Path], only_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folders["sd1"], device="cpu")
    assert not _asked.recorded_here(replace(model, choices=Choices(layout="channels_last")), ())
    assert _asked.recorded_here(replace(model, choices=Choices(executor="flat")), ())
    monkeypatch.setenv("CLEARWAY_PLAIN", "1")
    report = accelerate(model)
    assert "geglu" in report.placed and not report.notes
    restore(model)


@pytest.mark.parametrize(
    "make", [dit_pipelines.flux, lambda: dit_pipelines.sd3(tiny_sd3)], ids=["flux", "sd3"]
)
def test_transformers_on_a_cpu_alone_are_recorded_too(make: Any, only_a_cpu: None) -> None:
    pipe = make()
    before = dit_pipelines.draw(pipe)
    report = accelerate(pipe)
    assert np.abs(before - dit_pipelines.draw(pipe)).max() < 2e-3
    assert "transformer ran" in str(report) and not report.reasons()
    restore(pipe)
    assert np.array_equal(before, dit_pipelines.draw(pipe))
