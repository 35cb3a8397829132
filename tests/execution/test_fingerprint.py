"""The fingerprint changes with what a graph has baked in, and with nothing else."""

import copy

import torch
from torch import nn

from clearway.execution.fingerprint import adapter_state, fingerprint


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()


def test_it_stays_for_values_and_changes_with_code_and_addresses() -> None:
    made = module()
    first = fingerprint(made)
    with torch.no_grad():
        made[0].weight.fill_(1)
    assert fingerprint(made) == first
    seen = [first]
    changes = (
        lambda: setattr(made[0].weight, "data", torch.ones(2, 2)),
        lambda: made.append(nn.ReLU()),
        lambda: made[0].__dict__.update(forward=lambda x: x),
        lambda: made[0].__dict__.update(processor=object()),
        lambda: made[1].train(),
        lambda: made[1].__setattr__("running_mean", torch.zeros(2)),
    )
    for change in changes:
        change()
        seen.append(fingerprint(made))
    assert len(set(seen)) == len(seen)
    assert fingerprint(copy.deepcopy(made)) != fingerprint(made)
    assert fingerprint(None) == ()


def test_adapters_are_told_by_what_is_on_and_how_much() -> None:
    made = module()
    assert adapter_state(made) == adapter_state(None) == ""
    made[0].scaling = {"style": 1.0}
    states = [adapter_state(made)]
    for name, value in (("scaling", {"style": 0.5}), ("merged_adapters", ["style"]), ("_active_adapter", [])):
        setattr(made[0], name, value)
        states.append(adapter_state(made))
    assert len(set(states)) == 4
