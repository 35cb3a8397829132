"""One call of one network as an arm: the UNet on a guidance pair, the VAE's decoder, the text encoders.

Every contender gets the same inputs, drawn per round on the device before anything is timed. A round is as
many calls as the scenario says, one after the other without waiting for the device, as a sampling loop makes
them. What each round is given is new to the contender, as a new prompt's is: what it keeps of a context holds
for that round's calls alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from clearway import device as machine
from clearway import execution
from clearway.measure.contenders import Arm, Probe, isolated_model, misrouted
from clearway.models import Model
from clearway.models._mixed import whole
from clearway.models._mixed_choice import settle
from clearway.models.model import dtype_of
from clearway.types import MIXED, Choices

if TYPE_CHECKING:
    from torch import Tensor

    from clearway.measure.compiled import Compiled
    from clearway.measure.diffusers_arms import Parts
    from clearway.measure.scenario import Scenario

Given = dict[str, Any]
TIMESTEP = 500.0  # half-way; the work is the same at all of them
TITLES = {"unet": "one UNet call, guidance pair", "vae": "VAE decode", "text": "text encoders, one window"}


def inputs(scenario: Scenario, model: Model, round: int, side_px: int = 0) -> Given:
    """The arguments of the scenario's network for one round, in the model's dtypes on its device."""
    seed, place = scenario.seeds[round % len(scenario.seeds)], str(model.device)
    drawn_on = "cpu" if model.device.kind == "mps" else place
    generator = torch.Generator(drawn_on).manual_seed(seed)

    def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=drawn_on).to(place, dtype)

    factor, channels = model.latent_factor, model.latent_channels
    height, width = scenario.height // factor, (scenario.width + side_px) // factor
    if scenario.what == "vae":
        size = (scenario.batch_size, channels, height, width)
        return {"z": drawn(*size, dtype=dtype_of(model.vae)) / model.latent_scale}
    if scenario.what == "text":
        return {"ids": [_ids(scenario.prompt, one).to(place) for one in model.tokenizers]}
    rows, dtype = scenario.batch_size * (1 if scenario.cfg_scale == 1 else 2), model.unet.dtype
    context = sum(encoder.config.hidden_size for encoder in model.text_encoders)
    given: Given = {
        "sample": drawn(rows, channels, height, width, dtype=dtype),
        "timestep": torch.full((), TIMESTEP, device=place),  # of no axis, as Diffusers' schedulers have them
        "encoder_hidden_states": drawn(rows, 77, context, dtype=dtype),
        "added_cond_kwargs": None,
    }
    if model.family.name == "sdxl":
        pooled = drawn(rows, model.text_encoders[-1].config.projection_dim, dtype=dtype)
        sizes = [scenario.height, scenario.width + side_px, 0, 0, scenario.height, scenario.width + side_px]
        ids = torch.tensor([sizes] * rows, device=place, dtype=dtype)
        given["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": ids}
    return given


def _ids(prompt: str, tokenizer: Any) -> Tensor:
    words = tokenizer.encode(prompt)[:75]
    padding = [tokenizer.pad] * (75 - len(words))
    return torch.tensor([[tokenizer.bos, *words, tokenizer.eos, *padding]])


Run = Callable[[Given], "Tensor"]


@dataclass(slots=True)
class Networks:
    """The callables of an arm's networks; which of them runs is the scenario's business."""

    unet: Callable[..., Any]
    vae: Callable[..., Any]
    texts: tuple[Callable[..., Any], ...]

    def run(self, what: str, given: Given) -> Tensor:
        """One call of the network; for text the last but one hidden states side by side.

        Arguments are just those of Diffusers' pipelines: what is compiled for these serves both.
        """
        if what == "unet":
            out: Tensor = self.unet(
                given["sample"],
                given["timestep"],
                encoder_hidden_states=given["encoder_hidden_states"],
                timestep_cond=None,
                cross_attention_kwargs=None,
                added_cond_kwargs=given["added_cond_kwargs"],
                return_dict=False,
            )[0]
            return out
        if what == "vae":
            picture: Tensor = self.vae(given["z"], return_dict=False)[0]
            return picture
        states = [encoder(ids) for encoder, ids in zip(self.texts, given["ids"], strict=True)]
        return torch.cat(states, dim=-1)


class _Calls:
    """An arm's call and probe over prepared inputs, `within` the mode that its own pipeline runs in."""

    def __init__(
        self, scenario: Scenario, model: Model, networks: Networks, within: Callable[[], Any]
    ) -> None:
        self._scenario, self._model, self._networks = scenario, model, networks
        self._within = within
        self._given = [inputs(scenario, model, round) for round in range(len(scenario.seeds))]
        self._wider: dict[int, Given] = {}

    def call(self, round: int, side_px: int = 0, calls: int | None = None) -> Tensor:
        """The last output of one round's calls."""
        given = self._given[round % len(self._given)]
        if side_px:
            given = self._wider.setdefault(side_px, inputs(self._scenario, self._model, round, side_px))
        with self._within(), machine.tf32(self._model.device, self._model.precision.tf32):
            given = pytree.tree_map_only(torch.Tensor, torch.clone, given)
            for _ in range(calls or self._scenario.calls):
                output = self._networks.run(self._scenario.what, given)
            return output

    def probe(self, round: int) -> Probe:
        """The network's output, copied before another call can overwrite it."""
        return Probe(None, self.call(round, calls=1).detach().float().clone())


def clearway_network(scenario: Scenario, model: Model, intended: dict[str, Any], note: str | None) -> Arm:
    """Clearway's call of the network, by the executor that the model's choices name."""
    routes, choices = Counter[str](), model.choices
    texts = tuple(_text(one, choices, routes) for one in model.text_encoders)
    networks = Networks(
        executor(model.unet, "unet", choices, routes),
        executor(model.vae.decode, "vae", choices, routes),
        texts,
    )
    calls = _Calls(scenario, model, networks, torch.inference_mode)
    if scenario.what == "vae" and model.precision.vae == MIXED:
        _settled(model, inputs(scenario, model, 0))
    part = "text_encoder" if scenario.what == "text" else scenario.what
    return Arm(
        call=calls.call,
        probe=calls.probe,
        proof=lambda: note or misrouted(choices, routes, (part,)),
        routes=lambda: dict(routes),
        intended=lambda: intended,
        settle=routes.clear,
    )


@torch.inference_mode()
def _settled(model: Model, given: Given) -> None:
    """Makes a mixed VAE what it is for its weights, measured with these inputs where nothing is known."""
    with machine.tf32(model.device, model.precision.tf32):
        settle(model, given["z"][:1], lambda z: model.vae.decode(z, return_dict=False)[0].float())


def _hidden(encoder: Any, ids: Tensor) -> Tensor:
    """The last but one hidden state (B, 77, D) of a text encoder."""
    found: Tensor = encoder(ids, output_hidden_states=True).hidden_states[-2]
    return found


def _plain(encoders: tuple[Any, ...]) -> tuple[Callable[..., Any], ...]:
    return tuple(MethodType(_hidden, one) for one in encoders)


def _text(encoder: Any, choices: Choices, routes: Counter[str]) -> Callable[..., Any]:
    """The executor around a text encoder, which is never compiled, as in the pipeline."""
    name = "eager" if choices.executor == "compiled" else choices.executor
    read = MethodType(_hidden, encoder)
    return execution.executor(name, read, "text_encoder", routes, fixed=choices.routes)


def executor(
    module: Callable[..., Any], part: str, choices: Choices, routes: Counter[str]
) -> Callable[..., Any]:
    """The executor that `choices` name around `module`, as the pipeline has it."""
    promised = ("encoder_hidden_states",)
    return execution.executor(choices.executor, module, part, routes, fixed=choices.routes, promised=promised)


def diffusers_network(scenario: Scenario, model: Model, parts: Parts, compiled: Compiled) -> Arm:
    """A plain call of Diffusers' or transformers' module, compiled where that is asked for."""
    holder = _Holder(parts.unet, parts.vae)
    compiled.compile(holder, parts)
    # Diffusers' pipelines run without gradients, not in inference mode: the compiler's cache tells them apart
    texts = _plain(parts.texts)
    calls = _Calls(scenario, model, Networks(holder.unet, holder.vae.decode, texts), torch.no_grad)
    count = Counter[str]()
    label = f"{scenario.what}/diffusers {compiled.label}"

    def call(round: int, side_px: int = 0) -> Tensor:
        count[label] += 1
        return calls.call(round, side_px)

    return Arm(
        call=compiled.watched(call),
        probe=calls.probe,
        proof=compiled.proof,
        routes=lambda: dict(count),
        intended=lambda: {"engine": "diffusers", "precision": asdict(model.precision), **compiled.intended()},
        close=compiled.close,
    )


@dataclass(slots=True)
class _Holder:
    """What a pipeline is to `Compiled`: something that has a UNet and a VAE."""

    unet: Any
    vae: Any


def output(scenario: Scenario, model: Model, round: int, dtype: str, place: str) -> Tensor:
    """What the network gives in `dtype` on `place`, eagerly, on a copy: the reference (float32).

    "mixed" is a VAE's on the model's own device.
    """
    target = torch.float32 if dtype == MIXED else machine.dtype(dtype)

    def moved(value: Tensor) -> Tensor:
        return value.to(place, target) if value.is_floating_point() else value.to(place)

    own = isolated_model(model)
    whole(own.vae)
    for module in (own.unet, own.vae, *own.text_encoders):
        torch.nn.Module.to(module, device=place, dtype=target)  # Diffusers' own `to` prints advice
    given = pytree.tree_map_only(torch.Tensor, moved, inputs(scenario, model, round))
    if dtype == MIXED:
        _settled(own, given)
    with torch.inference_mode():
        return Networks(own.unet, own.vae.decode, _plain(own.text_encoders)).run(scenario.what, given).float()


def cost(scenario: Scenario, model: Model) -> dict[str, Any]:
    """FLOPs of a call by torch's own counter, and bytes that must move: weights, inputs, output once."""
    from torch.utils.flop_counter import FlopCounterMode

    given = inputs(scenario, model, 0)
    modules = {"unet": (model.unet,), "vae": (model.vae.decoder,), "text": model.text_encoders}[scenario.what]
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        out = Networks(model.unet, model.vae.decode, _plain(model.text_encoders)).run(scenario.what, given)
    weights = sum(one.numel() * one.element_size() for module in modules for one in module.parameters())
    tensors = [one for one in (*pytree.tree_leaves(given), out) if isinstance(one, torch.Tensor)]
    moved = weights + sum(one.numel() * one.element_size() for one in tensors)
    return {"flops": int(counter.get_total_flops()), "bytes_moved": int(moved)}
