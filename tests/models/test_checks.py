"""What is self-tested as soon as it is known what will run: from what was put in place, or before reading."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from clearway import execution, models
from clearway.device import Device
from clearway.models import _checks, chosen
from clearway.models._report import Report
from clearway.models.accelerate import EVERY, accelerate
from clearway.ops import verdicts
from clearway.ops.contract import OPS, Op
from clearway.types import Precision


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked of `verdicts.prepare`."""
    heard: list[tuple[Any, ...]] = []

    def prepare(ops: Any, kind: str, dtype: torch.dtype, likes: Any = None) -> int:
        heard.append((tuple(ops), kind, dtype, dict(likes or {})))
        return len(heard[-1][0])

    monkeypatch.setattr(verdicts, "prepare", prepare)
    return heard


def test_accelerate_begins_the_ops_that_it_put_in_place(
    asked: list[tuple[Any, ...]], folders: dict[str, Path]
) -> None:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(folders["sd1"], subfolder="unet", low_cpu_mem_usage=False)
    accelerate(unet.half(), executor="eager")
    ((ops, kind, dtype, likes),) = asked
    assert {"attention", "convolution", "geglu", "group_norm_silu", "layer_norm"} <= set(ops)
    assert {"geglu_linear", "residual_add"} <= set(ops) and "linear" not in ops
    assert (kind, dtype) == ("cpu", torch.float16)
    assert set(likes) == {"attention", "geglu", "geglu_linear", "layer_norm"}


def test_shapes_are_those_that_modules_tell() -> None:
    from diffusers.models.attention_processor import Attention

    part = nn.Sequential(Attention(query_dim=24, heads=3, dim_head=8), nn.LayerNorm(24))
    assert _checks.likes(part) == {"attention": (2, 3, 64, 8), "layer_norm": (2, 64, 24)}


def test_where_nothing_was_put_nothing_is_begun(asked: list[tuple[Any, ...]]) -> None:
    report = Report(placed={"geglu": ["unet.ff.net.0", "vae_2.x"]})
    assert _checks.begin("vae", nn.Linear(2, 2), report) == 0
    assert _checks.begin("unet", nn.ReLU(), report) == 0 and not asked
    assert _checks.begin("unet", nn.Linear(2, 2), report) == 2
    assert asked == [(("geglu", "geglu_linear"), "cpu", torch.float32, {})]


def test_a_models_part_is_tested_on_its_device_within_its_limit(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the part rests just then."""
    limits: list[tuple[Device, int | None]] = []

    @contextmanager
    def capped(device: Device, limit: int | None) -> Iterator[None]:
        limits.append((device, limit))
        yield

    monkeypatch.setattr("clearway.device.capped", capped)
    card, report = Device("cuda", 0), Report(placed={"layer_norm": ["unet.norm"]})
    model: Any = SimpleNamespace(device=card, memory_limit_bytes=2**33, precision=Precision(vae="float16"))
    assert _checks.begin("unet", nn.Linear(2, 2).half(), report, model) == 1
    assert asked == [(("layer_norm",), "cuda", torch.float16, {})] and limits == [(card, 2**33)]
    _checks.begin_loading(card, Precision(), 2**32)
    assert limits[1:] == [(card, 2**32)]


def test_a_model_that_is_accelerated_says_its_device(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(_checks, "begin", lambda label, part, report, model: heard.append((label, model)))
    model = models.load(folders["sd1"], device="cpu")
    accelerate(model)
    assert [one for _, one in heard] == [model] * len(heard) and "unet" in dict(heard)
    accelerate(model.unet)
    assert heard[-1][1] is None


def test_before_a_model_is_read_what_it_will_be_run_by_is_begun(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(chosen.PLAIN, raising=False)
    precision = Precision(unet="float16", vae="float32")
    assert _checks.begin_loading(Device("cpu"), precision) == 0 and not asked
    _checks.begin_loading(Device("cuda", 0), precision)
    assert [(kind, dtype) for _, kind, dtype, _ in asked] == [
        ("cuda", torch.float16),
        ("cuda", torch.float32),
    ]
    assert {"group_norm_silu", "geglu_linear"} <= set(asked[0][0]) and OPS.keys() >= {
        "group_norm_silu",
        "attention",
    }
    asked.clear()
    with chosen.plainly():
        assert _checks.begin_loading(Device("cuda", 0), precision) == 0 and not asked


def test_every_op_that_models_call_is_begun_by_some_name() -> None:
    """One that is not is waited for when it is first called: seconds of a first picture."""
    called = set()
    for package in (models, execution):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not found.ispkg:
                held = vars(importlib.import_module(found.name)).values()
                called |= {one.name for one in held if isinstance(one, Op)}
    assert {"attention", "convolution", "geglu_linear", "rope", "grouped_linear"} <= called
    assert called - set(_checks._ops(EVERY)) == {"linear"}
