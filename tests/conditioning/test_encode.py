"""Plans through text encoders of the real classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import clearway
from builders import tiny_sd1, tiny_sdxl
from clearway.conditioning import encode
from clearway.errors import RequestError
from clearway.execution.executor import CudaGraph, Pool, TorchCapture
from clearway.models import Model
from clearway.prompt import plan
from fake_capture import Recorder
from never_waits import never_waits


@pytest.fixture(scope="module")
def sd1(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return clearway.load(str(tiny_sd1(tmp_path_factory.mktemp("sd1"))), device="cpu")


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return clearway.load(str(tiny_sdxl(tmp_path_factory.mktemp("sdxl"))), device="cpu")


def context(model: Model, prompt: str, **options: int) -> torch.Tensor:
    return encode(plan(prompt, ""), model, width=64, height=64, **options)[0].at(0).context


def test_plain_text_is_the_encoders_own_output(sd1: Model) -> None:
    tokenizer, encoder = sd1.tokenizers[0], sd1.text_encoders[0]
    ids = [tokenizer.bos, *tokenizer.encode("a red apple"), tokenizer.eos]
    ids += [tokenizer.pad] * (77 - len(ids))
    expected = encoder(torch.tensor([ids])).last_hidden_state
    torch.testing.assert_close(context(sd1, "a red apple"), expected)


def test_clip_skip_is_an_earlier_layer_through_the_final_norm(sd1: Model) -> None:
    encoder = sd1.text_encoders[0]
    first = context(sd1, "a red apple", clip_skip=1)
    second = context(sd1, "a red apple", clip_skip=2)
    assert not torch.equal(first, second)
    norm = getattr(encoder, "text_model", encoder).final_layer_norm
    torch.testing.assert_close(second.mean(dim=-1), norm.bias.mean().expand(1, 77), atol=0.5, rtol=0)
    layers = encoder.config.num_hidden_layers
    assert torch.isfinite(context(sd1, "a red apple", clip_skip=layers)).all()
    with pytest.raises(RequestError, match=f"clip_skip {layers + 1} is out of range"):
        context(sd1, "a red apple", clip_skip=layers + 1)


def test_windows_are_laid_end_to_end(sd1: Model) -> None:
    long = context(sd1, "apple " * 75 + "pear")
    assert long.shape[1] == 154
    torch.testing.assert_close(long[:, :77], context(sd1, "apple " * 75))
    torch.testing.assert_close(long[:, 77:], context(sd1, "pear"))


def test_emphasis_rescales_its_own_window_only(sd1: Model) -> None:
    plain, stressed = (context(sd1, "apple " * 75 + word) for word in ("pear", "(pear:1.5)"))
    torch.testing.assert_close(plain[:, :77], stressed[:, :77])
    second = stressed[:, 77:]
    torch.testing.assert_close(second.mean(), plain[:, 77:].mean(), atol=1e-5, rtol=1e-4)
    ratio = second[0, 1] / plain[0, 78]  # the stressed token, weighted and rescaled
    others = second[0, 0] / plain[0, 77]
    torch.testing.assert_close(ratio / others, torch.full_like(ratio, 1.5), atol=1e-3, rtol=1e-3)


def test_sdxl_joins_two_encoders_and_pools_the_first_window(sdxl: Model) -> None:
    positive, negative = encode(plan("apple " * 75 + "pear", "x"), sdxl, width=64, height=32)
    one = positive.at(0)
    widths = [encoder.config.hidden_size for encoder in sdxl.text_encoders]
    assert one.context.shape == (1, 154, sum(widths))
    assert one.size_ids is not None and one.size_ids.tolist() == [[32, 64, 0, 0, 32, 64]]
    first_window = encode(plan("apple " * 75, "x"), sdxl, width=64, height=32)[0].at(0)
    torch.testing.assert_close(one.pooled, first_window.pooled)
    assert negative.at(0).context.abs().sum() > 0


def test_sdxl_layers_are_the_second_last_without_norm(sdxl: Model) -> None:
    made = context(sdxl, "a red apple")
    tokenizer, encoder = sdxl.tokenizers[0], sdxl.text_encoders[0]
    ids = [tokenizer.bos, *tokenizer.encode("a red apple"), tokenizer.eos]
    ids += [tokenizer.pad] * (77 - len(ids))
    states = encoder(torch.tensor([ids]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(made[..., : states[-2].shape[-1]], states[-2])
    assert torch.equal(made, context(sdxl, "a red apple", clip_skip=2))  # SDXL has no clip skip


def test_an_empty_negative_prompt_is_zero_for_sdxl_only(sd1: Model, sdxl: Model) -> None:
    for model, zero in ((sd1, False), (sdxl, True)):
        negative = encode(plan("x", ""), model, width=64, height=64)[1].at(0)
        assert (negative.context.abs().sum() == 0) == zero


class Captured:
    """Makes an encoder's executor replay graphs, and keeps it."""

    def __init__(self, backend: Callable[[], Any] = Recorder) -> None:
        self.made: dict[str, CudaGraph] = {}
        self.pools: dict[str, Pool] = {}
        self.backend = backend

    def __call__(self, run: Callable[..., Any], part: str) -> CudaGraph:
        pool = self.pools.setdefault(part, Pool(self.backend()))
        self.made[part] = CudaGraph(run, part, Counter(), pool)
        return self.made[part]

    def counts(self) -> list[dict[str, int]]:
        return [dict(run.routes) for run in self.made.values()]


PROMPTS = ("a red apple", "(a:1.3) pear", "apple " * 75 + "pear", "")


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
@pytest.mark.parametrize("clip_skip", [1, 2])
def test_one_captured_graph_encodes_every_prompt(
    family: str, clip_skip: int, request: pytest.FixtureRequest
) -> None:
    model, run = request.getfixturevalue(family), Captured()
    for prompt in PROMPTS:
        sizes: dict[str, Any] = {"width": 64, "height": 64, "clip_skip": clip_skip}
        for mine, plain in zip(
            encode(plan(prompt, "blurry"), model, **sizes, run=run),
            encode(plan(prompt, "blurry"), model, **sizes),
            strict=True,
        ):
            torch.testing.assert_close(mine.at(0).context, plain.at(0).context, rtol=0, atol=0)
            if family == "sdxl":
                torch.testing.assert_close(mine.at(0).pooled, plain.at(0).pooled, rtol=0, atol=0)
    for number, (part, encoder) in enumerate(run.made.items()):
        assert part == ("text_encoder", "text_encoder_2")[number]
        assert set(encoder.routes) == {f"{part}/cuda_graph"} and not encoder.reasons
        assert (encoder.pool.made, encoder.pool.evicted) == (1, 0)


def test_a_graph_keeps_only_what_is_read(sdxl: Model) -> None:
    run = Captured()
    encode(plan("x", ""), sdxl, width=64, height=64, run=run)
    for encoder, (part, executor) in zip(sdxl.text_encoders, run.made.items(), strict=True):
        (graph,) = executor.pool.held.values()
        hidden, pooled = graph.output
        assert hidden.shape == (1, 77, encoder.config.hidden_size)
        assert (pooled is None) == (part == "text_encoder")


def test_layers_have_graphs_of_their_own(sd1: Model) -> None:
    run, found = Captured(), []
    for clip_skip in (1, 2, 1):
        both = encode(plan("x", ""), sd1, width=64, height=64, clip_skip=clip_skip, run=run)
        found.append(both[0].at(0).context)
    assert run.pools["text_encoder"].made == 2
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_what_cannot_be_captured_is_encoded_eagerly(sd1: Model) -> None:
    run = Captured(lambda: Recorder(RuntimeError("operation not permitted when stream is capturing")))
    made = encode(plan("x", ""), sd1, width=64, height=64, run=run)[0].at(0).context
    assert torch.equal(made, context(sd1, "x"))
    assert run.counts() == [{"text_encoder/eager": 2}]
    (told,) = run.made["text_encoder"].sentences("the text encoder")
    assert told.startswith("the text encoder ran eagerly: it cannot be captured")


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_on_a_device_a_graph_encodes_without_waiting(family: str, tmp_path: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = (tiny_sd1 if family == "sd1" else tiny_sdxl)(tmp_path / family)
    model, run = clearway.load(str(folder), device="cuda"), Captured(TorchCapture)
    for prompt in PROMPTS:
        plain = encode(plan(prompt, "blurry"), model, width=64, height=64)
        encode(plan(prompt, "blurry"), model, width=64, height=64, run=run)
        with never_waits():
            made = encode(plan(prompt, "blurry"), model, width=64, height=64, run=run)
        for mine, theirs in zip(made, plain, strict=True):
            # transformers makes a mask while a graph is captured, and none elsewhere: another kernel
            torch.testing.assert_close(mine.at(0).context, theirs.at(0).context, rtol=4e-3, atol=4e-3)
    for encoder in run.made.values():
        assert encoder.pool.made == 1 and not encoder.reasons
