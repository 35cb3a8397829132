"""Would the emulated tests find a fault? Each planted one must be caught in at least one mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from metal import test_attention as attention
from metal import test_constant_pad as constant_pad
from metal import test_geglu as geglu
from metal import test_group_norm_silu as group_norm
from metal import test_layer_norm as layer_norm
from metal import test_linear_row as linear_row
from metal import test_softmax as softmax
from metal.accuracy import MODES
from metal.emulator import EmulatorError, Library
from metal.mutants import MUTANTS, Mutant
from metal.sources import text_of

Fresh = Callable[[], Library]
HALF, FLOAT = torch.float16, torch.float32


def attention_cases(fresh: Fresh) -> None:
    q, k, v = attention.heads(2, 2, 35, 45, 40, HALF)
    attention.check(fresh(), q, k.contiguous(), v)
    attention.check(fresh(), *attention.element_strides(q, k, v))
    q, k, v = attention.heads(1, 2, 12, 45, 40, HALF)
    attention.a_first_tile_of_minus_infinity(q, k, v)
    attention.check(fresh(), q, k, v)


def group_norm_cases(fresh: Fresh) -> None:
    x = group_norm.images(2, 12, 9, 9, dtype=HALF)
    weight, bias = group_norm.parameters(12, HALF)
    group_norm.check(fresh(), x[:, :9], weight[:9], bias[:9], 3)
    group_norm.check(fresh(), x, weight, None, 3)
    group_norm.check(fresh(), torch.full_like(x, 0.5), None, bias, 3)
    x = group_norm.images(1, 16, 6, 4, dtype=HALF).to(memory_format=torch.channels_last)
    group_norm.check(fresh(), x[:, 4:12], None, bias[:8], 2)
    group_norm.check(fresh(), group_norm.images(1, 8, 20, 16, dtype=HALF), weight[:8], bias[:8], 2)


def layer_norm_cases(fresh: Fresh) -> None:
    x, residual = (layer_norm.rows(5, 75, dtype=HALF, seed=seed) for seed in (0, 1))
    layer_norm.check(fresh(), x, x[0].clone(), x[1].clone(), residual * 8, summed=True)
    layer_norm.check(fresh(), x[:, 1:40], x[0, :39].clone())
    large = 2048 + 2 * (x > 0).to(HALF)  # neighbours in half: the sum's rounding is all that is left of 0.9
    layer_norm.check(fresh(), large, residual=residual.abs().clamp(max=0.9))
    layer_norm.check(fresh(), 1000.0 + layer_norm.rows(4, 256, dtype=FLOAT) * 1e-2)


def softmax_cases(fresh: Fresh) -> None:
    softmax.check(fresh(), softmax.rows(5, 1023, dtype=HALF))
    softmax.check(fresh(), softmax.rows(5, 77, dtype=HALF))
    x = softmax.rows(3, 601, dtype=HALF)
    x[1, :100] = -float("inf")
    softmax.check(fresh(), x)


def geglu_cases(fresh: Fresh) -> None:
    geglu.check(fresh(), geglu.rows(3, 150, dtype=HALF))


def constant_pad_cases(fresh: Fresh) -> None:
    constant_pad.check(fresh(), constant_pad.numbers(2, 3, 2, 3, 5), (1, 2, 3, 0, 0, 2))


def linear_row_cases(fresh: Fresh) -> None:
    x, weight, bias = linear_row.operands(2, 75, 9, HALF)
    linear_row.check(fresh(), x, weight, bias)
    linear_row.check(fresh(), x, weight, None)
    linear_row.check(fresh(), *linear_row.operands(1, 256, 9, HALF))


CASES = {
    "attention": attention_cases,
    "group_norm_silu": group_norm_cases,
    "layer_norm": layer_norm_cases,
    "softmax": softmax_cases,
    "geglu": geglu_cases,
    "constant_pad": constant_pad_cases,
    "linear_row": linear_row_cases,
}


def caught(name: str, emulated: Callable[..., Library], source: str | None) -> list[str]:
    """The first mode in which the cases fail, and how; empty where they pass in all."""
    for mode in ("in order", "checked", "shuffled 1", "shuffled 2"):
        try:
            CASES[name](lambda mode=mode: emulated(name, source, **MODES[mode]))  # type: ignore[misc]
        except (EmulatorError, AssertionError) as error:
            return [mode, str(error)]
    return []


@pytest.mark.parametrize("name", CASES)
def test_the_cases_pass_without_a_fault(emulated: Callable[..., Library], name: str) -> None:
    assert caught(name, emulated, None) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_planted_faults_are_caught(emulated: Callable[..., Library], mutant: Mutant) -> None:
    source = mutant.apply(text_of(mutant.file))
    assert caught(mutant.file, emulated, source) != []
