"""Modules filled with tensors: dtypes, missing and misshapen ones, memory that runs out."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from clearway.device import Device
from clearway.errors import RequestError, UnavailableError
from clearway.models.build import classes, diffusers_module, fill, listed, text_module
from clearway.models.keys import Source
from clearway.models.weights import Weights

CPU = Device("cpu")
TEXT = {
    "vocab_size": 60, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1,    "max_position_embeddings": 7, "eos_token_id": 59, "bos_token_id": 58,
}  # fmt: skip


def meta() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


def put(module: torch.nn.Module, tensors: dict[str, torch.Tensor], **options: Any) -> tuple[str, ...]:
    weights = Weights(
        {key: tuple(value.shape) for key, value in tensors.items()}, tensors.__getitem__, shared=True
    )
    options = {"device": CPU, "dtype_name": "float32", "what": "the part"} | options
    return fill(module, {key: Source(key) for key in tensors}, weights, **options)


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {key: torch.randn(value.shape) for key, value in meta().state_dict().items()}


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_a_module_gets_its_tensors(name: str) -> None:
    module, tensors = meta(), whole()
    assert put(module, tensors, dtype_name=name) == ()
    for key, value in module.state_dict().items():
        assert torch.equal(value, tensors[key].to(getattr(torch, name)))
        assert value.data_ptr() != tensors[key].data_ptr()
    assert not module.training and not any(p.requires_grad for p in module.parameters())


def test_missing_tensors_are_an_error_or_a_note() -> None:
    tensors = whole()
    del tensors["0.weight"], tensors["0.bias"]
    with pytest.raises(RequestError, match=r"the part is incomplete: 2 tensors \(0\.bias, 0\.weight\) are"):
        put(meta(), tensors)
    module = meta()
    notes = put(module, tensors, optional=("0.",))
    assert len(notes) == 1 and "the part lacks 2 tensors" in notes[0]
    assert module.state_dict()["0.weight"].abs().sum() == 0


def test_shapes_and_kinds_of_numbers_must_fit() -> None:
    with pytest.raises(RequestError, match=r"0\.bias has the shape \(4,\), and \(3,\) would fit"):
        put(meta(), whole() | {"0.bias": torch.zeros(4)})
    with pytest.raises(RequestError, match="quantized files are not supported"):
        put(meta(), whole() | {"0.bias": torch.zeros(3, dtype=torch.int8)})


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")],
)
def test_want_of_memory_is_a_sentence(error: Exception) -> None:
    def read(name: str) -> torch.Tensor:
        raise error

    weights = Weights(dict.fromkeys(whole(), ()), read)
    sources = {key: Source(key) for key in whole()}
    with pytest.raises(UnavailableError, match="the part does not fit into the memory of cpu"):
        fill(meta(), sources, weights, device=CPU, dtype_name="float32", what="the part")


def test_other_errors_keep_their_trace() -> None:
    weights = Weights(dict.fromkeys(whole(), ()), lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sources = {key: Source(key) for key in whole()}
        fill(meta(), sources, weights, device=CPU, dtype_name="float32", what="")


@pytest.mark.parametrize("projected", [False, True])
def test_text_encoders_by_published_names(projected: bool) -> None:
    module = text_module(TEXT | {"projection_dim": 5}, projected, "the text encoder")
    torch.manual_seed(0)
    tensors = {
        (key if key.startswith("text_") else f"text_model.{key}"): torch.randn(value.shape)
        for key, value in module.state_dict().items()
    }
    put(module, tensors)
    with torch.inference_mode():
        output = module(torch.tensor([[58, 3, 59]]), output_hidden_states=True)
    assert output.last_hidden_state.shape == (1, 3, 8) and len(output.hidden_states) == 2
    assert not any(buffer.is_meta for buffer in module.buffers())


def test_descriptions_that_do_not_build_are_sentences() -> None:
    for config in ({"block_out_channels": (32, 7)}, {"layers_per_block": "x"}, {"norm_num_groups": 0}):
        with pytest.raises(RequestError, match="the UNet cannot be built") as error:
            diffusers_module(classes().unet, config, "the UNet")
        assert "\n" not in str(error.value)
    with pytest.raises(RequestError, match="cannot be built"):
        text_module(TEXT | {"hidden_act": "nonsense"}, False, "the text encoder")


def test_the_collector_is_left_as_it_was() -> None:
    classes.cache_clear()
    classes()
    assert gc.isenabled()


def test_listed() -> None:
    assert listed(["a"]) == "1 tensor (a)"
    assert listed("badc") == "4 tensors (a, b, c, …)"
