"""Code that somebody puts in the place of a library's is seen, for one module or for everybody."""

from types import MethodType
from typing import Any

import pytest
import torch
from diffusers.models import embeddings
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.embeddings import Timesteps
from torch import nn

from clearway.execution import code
from clearway.execution.fingerprint import Fingerprint


def module() -> nn.Module:
    return nn.Sequential(FeedForward(8), Timesteps(8, True, 0), nn.Conv2d(2, 2, 3), Attention(8))


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (FeedForward, "forward"),
        (nn.Conv2d, "_conv_forward"),
        (nn.Module, "__call__"),
        (Attention, "prepare_attention_mask"),
        (AttnProcessor2_0, "__call__"),
        (embeddings, "get_timestep_embedding"),
        (torch.nn.functional, "conv2d"),
    ],
    ids=str,
)
def test_what_is_replaced_for_everybody_is_seen(
    holder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Fingerprint(module())
    assert found.holds()
    monkeypatch.setattr(holder, name, lambda *args, **kwargs: None)
    assert not found.holds()
    monkeypatch.undo()
    assert found.holds()


def test_a_forward_that_a_class_is_given_hides_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lower(nn.Linear): ...

    found = Fingerprint(nn.Sequential(Lower(2, 2)))
    assert found.holds()
    monkeypatch.setattr(Lower, "forward", lambda self, x: x, raising=False)
    assert not found.holds()


def test_a_method_put_at_an_instance_is_seen_each_time() -> None:
    made = module()
    for _ in range(2):
        found = Fingerprint(made)
        made[2]._conv_forward = MethodType(lambda self, x, weight, bias: x, made[2])
        assert not found.holds()


def test_code_that_may_count_its_calls_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    class Registered(nn.Module):
        def __call__(self, *args: Any) -> None: ...

    made = module()
    assert code.foreign(made.modules()) is None
    made[2]._conv_forward = MethodType(lambda self, x, weight, bias: x, made[2])  # pictures that tile
    assert code.foreign(made.modules()) is None
    made[3].get_attention_scores = lambda *args: None
    assert code.foreign(made.modules()) == "get_attention_scores of its Attention"
    del made[3].get_attention_scores
    del made[3].processor
    made[3].processor = Registered()  # among its modules
    assert code.foreign(made.modules()) == "an attention processor (Registered)"
    made[3] = nn.Identity()
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: x)
    assert code.foreign(made.modules()) == "a forward of its FeedForward"
    monkeypatch.undo()
    assert code.foreign(made.modules()) is None
    made = nn.Sequential(Attention(8))
    monkeypatch.setattr(AttnProcessor2_0, "__call__", lambda *args: None)
    assert code.foreign(made.modules()) == "an attention processor (AttnProcessor2_0)"


def test_a_module_of_somebodys_own_class_is_captured() -> None:
    class Own(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    assert code.foreign(nn.Sequential(Own()).modules()) is None
