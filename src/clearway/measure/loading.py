"""A scenario's model: loaded or drawn at random in the scenario's dtypes, and kept for the next scenario."""

from __future__ import annotations

import gc
from typing import Any

from clearway import device as machine
from clearway.device import Device
from clearway.measure.random_model import SUFFIX, random_model
from clearway.measure.scenario import Scenario
from clearway.models import Model, load


def load_model(scenario: Scenario, device: Device) -> Model:
    """The scenario's model on `device`, in the scenario's dtypes."""
    precision = scenario.precision_on(device)
    if scenario.model.endswith(SUFFIX):
        return random_model(scenario.model.removesuffix(SUFFIX), device, precision)
    return load(scenario.model, device=device, precision=precision)


def kept_model(scenario: Scenario, device: Device, kept: dict[Any, Model]) -> Model:
    """The scenario's model, that of the last scenario where it is the same; another is dropped first."""
    key = scenario.model, str(device), scenario.precision_on(device)
    if key not in kept:
        kept.clear()
        gc.collect()
        machine.release_memory(device)
        kept[key] = load_model(scenario, device)
    return kept[key]
