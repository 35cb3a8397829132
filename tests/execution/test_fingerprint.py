"""The fingerprint changes with what a graph has baked in, and with nothing else."""

import enum
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from clearway.execution.fingerprint import Fingerprint, moves


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()


def test_it_holds_for_values_and_not_for_other_code_or_addresses() -> None:
    made = module()
    first = Fingerprint(made)
    with torch.no_grad():
        made[0].weight.fill_(1)
    assert first.holds()
    changes = (
        lambda: setattr(made[0].weight, "data", torch.ones(2, 2)),
        lambda: made.append(nn.ReLU()),
        lambda: setattr(made, "0", nn.Linear(2, 2)),
        lambda: setattr(made[0], "forward", lambda x: x),
        lambda: setattr(made[0], "forward", lambda x: x),
        lambda: setattr(made[0], "processor", object()),
        lambda: setattr(made[0], "processor", object()),
        lambda: made[1].train(),
        lambda: setattr(made[1], "running_mean", torch.zeros(2)),
        lambda: made[0].register_parameter("bias", None),
        lambda: made[0].register_buffer("extra", torch.zeros(1)),  # where there was none
        lambda: delattr(made[0], "extra"),
        lambda: made[1]._buffers.update(running_var=made[1].running_mean),
        lambda: made[0]._parameters.pop("bias"),
        lambda: made[0].__dict__.update(training=False),
    )
    for change in changes:
        before = Fingerprint(made)
        assert before.holds()
        change()
        assert not before.holds()


@pytest.mark.parametrize(
    ("made", "name", "value"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), "padding_mode", "circular"),
        (nn.Conv2d(4, 4, 3, padding=1), "stride", (2, 2)),
        (nn.GroupNorm(2, 4), "eps", 0.1),
        (nn.GroupNorm(2, 4), "num_groups", 4),
        (nn.LayerNorm(4), "eps", 0.1),
        (nn.Upsample(scale_factor=2), "mode", "bilinear"),
        (nn.GELU(), "approximate", "tanh"),
    ],
    ids=str,
)
def test_settings_of_torchs_own_modules_are_seen(made: nn.Module, name: str, value: object) -> None:
    """Scripts set a convolution's padding for pictures that tile."""
    before = Fingerprint(nn.Sequential(made))
    assert before.holds()
    setattr(made, name, value)
    assert not before.holds()


def test_settings_are_seen_in_modules_that_are_not_torchs() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.scales, self.processor = None, [1.0, [0.5]], Processor()

    class Processor:
        def __init__(self) -> None:
            self.size, self.cache = 2, torch.ones(1)

    made = Block()
    changes = (
        lambda: setattr(made, "factor", 0.5),
        lambda: setattr(made, "factor", None),
        lambda: made.scales[1].append(0.1),
        lambda: setattr(made.processor, "size", 3),
        lambda: delattr(made.processor, "size"),
        lambda: setattr(made, "factor", torch.ones(2)),
        lambda: setattr(made.processor, "cache", torch.ones(1)),
    )
    for change in changes:
        before = Fingerprint(made)
        assert before.holds()
        change()
        assert not before.holds()


def test_an_adapter_without_a_scale_is_one_too() -> None:
    made = module()
    made[0].__dict__.update(merged_adapters=[], _disable_adapters=False)
    found = Fingerprint(made)
    before = found.adapters()
    made[0]._disable_adapters = True
    assert found.adapters() != before


def test_hooks_are_seen_without_a_new_fingerprint() -> None:
    made = module()
    found = Fingerprint(made)
    assert not found.hooked()
    handle = made[0].register_forward_hook(lambda *_: None)
    assert found.hooked() and found.holds()
    handle.remove()
    assert not found.hooked()


def test_hooks_with_which_transformers_records_are_no_obstacle() -> None:
    def records(*_: object) -> None: ...

    records.__module__ = "transformers.utils.output_capturing"
    made = module()
    found = Fingerprint(made)
    made[0].register_forward_hook(records)
    assert not found.hooked()
    made[0].register_forward_hook(lambda *_: None)
    assert found.hooked()


def test_adapters_are_told_by_what_is_on_and_how_much() -> None:
    made = module()
    assert Fingerprint(made).adapters() == ""
    made[0].__dict__.update(scaling={"style": 1.0}, merged_adapters=[], _active_adapter=["style"])
    found = Fingerprint(made)
    states = [found.adapters()]
    for change in (
        lambda: made[0].scaling.update(style=0.5),
        lambda: made[0].merged_adapters.append("style"),
        lambda: setattr(made[0], "_active_adapter", []),
    ):
        change()
        states.append(found.adapters())
    assert len(set(states)) == 4
    assert found.holds()  # a graph for each may be kept


def test_another_class_or_an_enumeration_is_seen() -> None:
    class Backend(enum.Enum):
        ONE, TWO = 1, 2

    class Other(nn.Linear):
        pass

    made = module()
    before = Fingerprint(made)
    made[0].__class__ = Other  # as token merging does
    assert not before.holds()
    made[0].backend = Backend.ONE
    before = Fingerprint(made)
    assert before.holds()
    made[0].backend = Backend.TWO
    assert not before.holds()


@pytest.mark.parametrize("kind", ["hook", "pre_hook"])
def test_hooks_at_all_modules_are_seen(kind: str) -> None:
    first = Fingerprint(module())
    assert not first.hooked()
    hook = getattr(nn.modules.module, f"register_module_forward_{kind}")(lambda *_: None)
    try:
        assert first.hooked() and first.hooked(itself=False)
    finally:
        hook.remove()
    assert not first.hooked()


def test_hooks_of_the_module_itself_count_where_it_is_called() -> None:
    made = module()
    found = Fingerprint(made)
    made.register_forward_hook(lambda *_: None)
    assert found.hooked() and not found.hooked(itself=False)
    made[1].register_forward_hook(lambda *_: None)
    assert found.hooked(itself=False)


@pytest.mark.parametrize("key", ["_diffusers_hook", "_hf_hook"])
def test_what_moves_weights_is_seen_anywhere(key: str) -> None:
    made = module()
    before = Fingerprint(made)
    assert not before.moved
    setattr(made[1], key, object())
    assert not before.holds() and Fingerprint(made).moved


def test_a_registry_without_hooks_moves_nothing() -> None:
    """Diffusers' pipelines of transformers leave one at the network."""
    from diffusers.hooks.hooks import HookRegistry, ModelHook

    made = module()
    registry = HookRegistry.check_if_exists_or_initialize(made[1])
    assert not moves(vars(made[1]))
    before = Fingerprint(made)
    assert not before.moved
    registry.register_hook(ModelHook(), "any")
    assert moves(vars(made[1])) and not before.holds() and Fingerprint(made).moved
    registry.remove_hook("any")
    assert not moves(vars(made[1]))


def test_what_a_processor_is_given_afterwards_is_seen() -> None:
    """`set_attention_backend` makes an attribute of what was the class's."""
    made = module()
    made[0].processor = processor = type("Processor", (), {"_attention_backend": None})()
    before = Fingerprint(made)
    assert before.holds()
    processor._attention_backend = "flash"
    assert not before.holds()


def test_scales_that_are_tensors_are_told_by_place() -> None:
    made = module()
    made[0].__dict__.update(scaling={"style": torch.ones(1)}, merged_adapters=[])
    found = Fingerprint(made)
    states = [found.adapters()]
    made[0].scaling["style"].fill_(2)  # in place: a graph reads it
    states.append(found.adapters())
    made[0].scaling["style"] = torch.ones(1)
    states.append(found.adapters())
    made[0].merged_adapters.append("style")
    states.append(found.adapters())
    assert states[0] == states[1] and len(set(states)) == 3


def test_a_number_of_the_hosts_is_told_by_its_value() -> None:
    """A kernel takes it as an argument: no graph reads where it lies."""
    made = module()
    made[0].__dict__.update(scaling={"style": torch.tensor(1.0)}, merged_adapters=[])
    made[1].factor = torch.tensor(float("nan"))
    found = Fingerprint(made)
    before = found.adapters()
    assert found.holds() and found.holds()
    made[0].scaling["style"].data.fill_(2)
    assert found.adapters() != before and found.holds()
    made[1].factor.data.fill_(1)
    assert not found.holds()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.t(),
        lambda data: data[:, :1],
        lambda data: data.view(torch.int32),
        lambda data: data.view(4, 1).as_strided((2, 2), (1, 0)),
    ],
    ids=["transposed", "a part", "another dtype", "other strides"],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_same_memory_read_otherwise_is_seen(change: Any, mode: Any) -> None:
    made = module().requires_grad_(False)
    with mode():
        found = Fingerprint(made)
        assert found.holds() and found.holds()
    assert found.holds()  # whatever mode it is asked in
    before = made[0].weight.data
    made[0].weight.data = change(before)
    for asked in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with asked():
            assert found.lies() and not found.holds()
    made[0].weight.data = before
    assert found.holds()


def test_another_dict_in_the_place_of_a_modules_own_is_seen() -> None:
    made, other = module(), module()
    for change in (
        lambda: vars(made[0]).update(vars(other[0])),
        lambda: setattr(made[0], "_parameters", {}),
        lambda: setattr(made[1], "_buffers", {}),
    ):
        before = Fingerprint(made)
        assert before.holds()
        change()
        assert not before.holds()


def test_code_of_others_is_told_from_diffusers_and_the_classes_own() -> None:
    from diffusers.models.attention_processor import Attention, AttnProcessor

    class Counting(AttnProcessor):
        pass

    made = nn.Sequential(Attention(8, heads=1, dim_head=8), nn.Linear(8, 8))
    made[1].forward = made[1].forward  # as Accelerate leaves it
    assert Fingerprint(made).foreign is None
    made[0].processor = Counting()
    assert Fingerprint(made).foreign == "an attention processor (Counting)"
    made[0].processor = AttnProcessor()
    made[1].forward = lambda x: x
    assert Fingerprint(made).foreign == "a forward of its Linear"


def test_tensors_that_are_no_buffers_are_held_and_seen() -> None:
    """A graph reads them where they lie."""
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].scale = torch.ones(2)
    found = Fingerprint(module)
    assert found.holds() and found.lies()
    read = weakref.ref(module[0].scale)
    module[0].scale = torch.ones(2)
    assert not found.holds() and found.lies() and read() is not None
    del found
    gc.collect()
    assert read() is None
    found = Fingerprint(module)
    module[0].scale.data = torch.ones(2)
    assert not found.lies()
