"""Models of scenarios: by name, in the scenario's dtypes, and kept while nothing else is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clearway.device import Device
from clearway.errors import RequestError
from clearway.measure.loading import kept_model, load_model
from clearway.measure.scenario import Scenario
from clearway.types import Precision

CPU = Device("cpu")
TINY = Scenario(name="tiny", model="tiny-sd15-random", width=64, height=64, steps=2)


def test_a_model_is_kept_for_the_next_scenario() -> None:
    kept: dict[Any, Any] = {}
    first = kept_model(TINY, CPU, kept)
    assert kept_model(replace(TINY, steps=9), CPU, kept) is first
    other = kept_model(replace(TINY, precision={"vae": "bfloat16"}), CPU, kept)
    assert other is not first and list(kept.values()) == [other]


def test_models_come_by_name() -> None:
    made = load_model(replace(TINY, model="tiny-sdxl-random"), CPU)
    assert made.family.name == "sdxl" and made.precision == Precision()
    with pytest.raises(RequestError):
        load_model(replace(TINY, model="huge-random"), CPU)
