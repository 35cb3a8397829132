"""Every attribute counts, whatever it is and wherever it lies; values alone do not."""

import gc
import logging
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.configuration_utils import FrozenDict
from torch import nn

from clearway.execution.attributes import BUILT, Attributes


@dataclass
class Settings:
    """Alike where their fields are."""

    scale: float = 1.0
    parts: list[Any] = field(default_factory=lambda: [1.0, {"more": [torch.ones(1), torch.ones(3)]}])


class Call:
    """A function that is an object."""

    def __init__(self) -> None:
        self.factor, self.table = 2.0, torch.ones(3)

    def __call__(self, x: Any) -> Any:
        return x * self.factor


def made() -> nn.Module:
    block = nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2), nn.Dropout(0.0))
    block.settings, block.call, block.function = Settings(), Call(), torch.relu
    block.tables = [torch.ones(1), torch.ones(4)]
    block.hidden = [nn.Linear(1, 1)]  # which nobody registered
    block.config = FrozenDict({"flip": True, "sizes": [1, 2]})
    block.namespace = SimpleNamespace(inner=SimpleNamespace(value=1))
    block.kind, block.array = torch.float32, np.ones(3)
    block.ordered = OrderedDict(a=1)
    block.both = (torch.ones(2), [1])
    return block.eval()


CHANGES = {
    "a number of an object": lambda one: setattr(one.settings, "scale", 2.0),
    "an equal object": lambda one: setattr(one, "settings", Settings()),
    "a tensor within": lambda one: one.settings.parts[1]["more"].__setitem__(1, torch.ones(3)),
    "an equal tensor of one element within": lambda one: one.settings.parts[1]["more"].__setitem__(
        0, torch.ones(1)
    ),
    "a function": lambda one: setattr(one, "function", torch.sigmoid),
    "a number of a function": lambda one: setattr(one.call, "factor", 3.0),
    "a tensor of a function": lambda one: setattr(one.call, "table", torch.ones(3)),
    "an equal tensor in a list": lambda one: one.tables.__setitem__(0, torch.ones(1)),
    "a tensor in a list": lambda one: one.tables.__setitem__(1, torch.ones(4)),
    "a longer list": lambda one: one.tables.append(torch.ones(1)),
    "a list in a tuple": lambda one: one.both[1].append(2),
    "a weight of a hidden module": lambda one: setattr(
        one.hidden[0], "weight", nn.Parameter(torch.ones(1, 1))
    ),
    "an attribute of a config": lambda one: setattr(one.config, "flip", False),
    "an item of a config": lambda one: one.config["sizes"].append(3),
    "another config": lambda one: setattr(one, "config", FrozenDict({"flip": False, "sizes": [1, 2]})),
    "a namespace in one": lambda one: setattr(one.namespace.inner, "value", 2),
    "a dtype": lambda one: setattr(one, "kind", torch.float16),
    "an equal array": lambda one: setattr(one, "array", np.ones(3)),
    "another array": lambda one: setattr(one, "array", np.zeros(3)),
    "an item of an ordered dict": lambda one: one.ordered.update(a=2),
    "an attribute of a layer": lambda one: setattr(one[0], "extra", 1),
    "a setting of a norm": lambda one: setattr(one[1], "eps", 1.0),
    "a tensor in the place of a number": lambda one: setattr(one[1], "eps", torch.ones(3)),
    "training": lambda one: setattr(one[2], "training", True),
    "a parameter of one element": lambda one: one.hidden[0].register_parameter(
        "bias", nn.Parameter(one.hidden[0].bias.detach().clone())
    ),
    "an attribute that is gone": lambda one: delattr(one, "kind"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changes_is_seen(change: Any) -> None:
    one = made()
    found = Attributes(one)
    assert found.hold() and found.hold()
    change(one)
    assert not found.hold()
    found = Attributes(one)
    assert found.hold()


def test_dropout_in_training_reads_how_much() -> None:
    one = made().train()
    found = Attributes(one)
    one[2].p = 0.5
    assert not found.hold()


def test_values_in_place_and_what_is_no_setting_are_none() -> None:
    one = made()
    one.log = logging.getLogger("network")
    one.scheduler = type("Scheduler", (), {"set_timesteps": None})()
    one.scaling, one.merged_adapters = {"a": 1.0}, []
    one._active_adapter = ["a"]
    found = Attributes(one)
    one.tables[1].mul_(2)
    one.array *= 2
    one.log.setLevel(logging.ERROR)
    one.scheduler.step = 3
    one.scaling["a"], one._active_adapter = 2.0, []  # these have a hash of their own
    one[0].weight.data.mul_(2)
    vars(one)[BUILT] = None
    assert not found.hold()  # one attribute more
    found = Attributes(one)
    vars(one)[BUILT] = object()
    assert found.hold()


def test_all_tensors_and_modules_are_found_once() -> None:
    one = made()
    one.again = one.tables[1]
    one.itself = one
    found = Attributes(one)
    assert found.modules[0] is one and one.hidden[0] in found.modules
    assert len(found.modules) == len(set(map(id, found.modules))) == 5
    assert len(found.tensors) == len(set(map(id, found.tensors)))
    held = {id(tensor) for tensor in found.tensors}
    assert {id(one.tables[0]), id(one.call.table), id(one.settings.parts[1]["more"][1])} <= held
    assert {id(weight) for weight in one.parameters()} <= held


def test_it_holds_nothing_that_executors_made() -> None:
    """Else the memory of graphs would wait for the garbage collector."""

    class Made: ...

    one = made()
    vars(one)[BUILT] = what = Made()
    what.of = Attributes(one)
    gone = weakref.ref(what)
    gc.disable()
    try:
        del vars(one)[BUILT], what
        assert gone() is None
    finally:
        gc.enable()
