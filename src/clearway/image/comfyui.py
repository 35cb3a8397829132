"""ComfyUI's prompt graph -> what a person wants to know of it.

A graph maps a node's id to {"class_type": …, "inputs": {name: value or [id, slot]}}. Source: the API format
that ComfyUI saves as "prompt"; custom nodes are followed where their inputs have the usual names. Nothing
here trusts the graph: links may dangle or run in circles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOST_PASSES = 32
FARTHEST = 1000  # nodes followed from one; real graphs are less deep, hostile ones would take minutes
_TEXTS = ("text", "text_g", "text_l", "clip_l", "clip_g", "t5xxl", "prompt")
_ANY_VALUE = ("value", "text", "string", "prompt", "seed", "noise_seed", "int", "float", "number", "Value")
_LATENTS = ("latent_image", "samples", "latent", "latents", "pixels", "image")
_MODELS = ("ckpt_name", "unet_name", "model_name", "gguf_name")
_PARTS = ("noise", "guider", "sampler", "sigmas")  # the nodes where SamplerCustom keeps its settings

Inputs = Mapping[str, Any]


def is_graph(value: object) -> bool:
    """Whether a JSON value is a prompt graph: an object with at least one node in it."""
    return isinstance(value, dict) and any(
        isinstance(node, dict) and isinstance(node.get("class_type"), str) for node in value.values()
    )


def summarise(graph: object) -> dict[str, Any]:
    """The first sampling pass in Request's words, as far as the graph says.

    Keys: prompt, negative_prompt, model, loras, seed, steps, cfg_scale, sampler, scheduler, denoise, width,
    height (pixels); the two names as ComfyUI has them ("dpmpp_2m", "karras"). `further_passes` has the same
    of later samplers (hires). Empty where no KSampler, KSamplerAdvanced or SamplerCustom is found.
    """
    nodes = _nodes(graph)
    passes: list[tuple[int, dict[str, Any]]] = []
    for key in [key for key in nodes if _is_sampler(nodes[key][0])][:MOST_PASSES]:
        inputs = _gathered(nodes, key)
        size, before = _start(nodes, inputs)
        found = {
            "prompt": _text(nodes, inputs.get("positive", inputs.get("conditioning"))),
            "negative_prompt": _text(nodes, inputs.get("negative")),
            **_model(nodes, inputs.get("model")),
            "seed": _value(nodes, inputs, "seed", "noise_seed"),
            "steps": _value(nodes, inputs, "steps"),
            "cfg_scale": _value(nodes, inputs, "cfg"),
            "sampler": _value(nodes, inputs, "sampler_name"),
            "scheduler": _value(nodes, inputs, "scheduler"),
            "denoise": _value(nodes, inputs, "denoise"),
            **size,
        }
        passes.append((before, {name: value for name, value in found.items() if value is not None}))
    passes.sort(key=lambda item: item[0])
    if not passes:
        return {}
    first, *further = (found for _, found in passes)
    return first | ({"further_passes": further} if further else {})


def _nodes(graph: object) -> dict[str, tuple[str, Inputs]]:
    nodes: dict[str, tuple[str, Inputs]] = {}
    if isinstance(graph, dict):
        for key, node in graph.items():
            if isinstance(node, dict) and isinstance(node.get("class_type"), str):
                inputs = node.get("inputs")
                nodes[str(key)] = (node["class_type"], inputs if isinstance(inputs, dict) else {})
    return nodes


def _is_sampler(kind: str) -> bool:
    return kind.startswith(("KSampler", "SamplerCustom")) and kind != "KSamplerSelect"


def _link(nodes: Mapping[str, tuple[str, Inputs]], value: object) -> tuple[str, int] | None:
    """(node id, output slot) where `value` is a link to a node that is there."""
    if (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str | int)
        and str(value[0]) in nodes
    ):
        return str(value[0]), value[1] if isinstance(value[1], int) else 0
    return None


def _upstream(
    nodes: Mapping[str, tuple[str, Inputs]], value: object, *names: str
) -> Iterator[tuple[str, str, Inputs]]:
    """(id, class, inputs) of the node `value` links to, then of those reached through the inputs `names`."""
    seen: set[str] = set()
    link = _link(nodes, value)
    while link and link[0] not in seen and len(seen) < FARTHEST:
        seen.add(link[0])
        kind, inputs = nodes[link[0]]
        yield link[0], kind, inputs
        links = (_link(nodes, inputs.get(name)) for name in names)
        link = next((found for found in links if found), None)


def _gathered(nodes: Mapping[str, tuple[str, Inputs]], key: str) -> dict[str, Any]:
    """The inputs of a sampler with those of the nodes that hold its noise, guider, sampler and sigmas."""
    own = nodes[key][1]
    gathered: dict[str, Any] = {}
    for part in _PARTS:
        for _, _, inputs in _upstream(nodes, own.get(part), part):
            gathered = {**inputs, **gathered}  # the nearer node knows better
    return {**gathered, **own}


def _value(nodes: Mapping[str, tuple[str, Inputs]], inputs: Inputs, *names: str) -> Any:
    """The plain value of the first of `names` among `inputs`, also through links to nodes that hold it."""
    value: Any = next((inputs[name] for name in names if name in inputs), None)
    seen: set[str] = set()
    while (link := _link(nodes, value)) and link[0] not in seen and len(seen) < FARTHEST:
        seen.add(link[0])
        held = nodes[link[0]][1]
        value = next((held[name] for name in (*names, *_ANY_VALUE) if name in held), None)
    return value if isinstance(value, str | int | float) else None


def _text(nodes: Mapping[str, tuple[str, Inputs]], value: object) -> str | None:
    """The texts that a conditioning is made of, in order, joined by " AND " where there are several."""
    found: dict[str, None] = {}
    seen: set[tuple[str, int]] = set()
    waiting = [_link(nodes, value)]
    while waiting and len(seen) < FARTHEST:
        link = waiting.pop()
        if link is None or link in seen:
            continue
        seen.add(link)
        kind, inputs = nodes[link[0]]
        if kind == "ConditioningZeroOut":
            continue
        texts = [_value(nodes, inputs, name) for name in _TEXTS if name in inputs]
        texts = [text for text in texts if isinstance(text, str)]
        if texts:
            found.update(dict.fromkeys(texts))
        elif "positive" in inputs and "negative" in inputs:  # ControlNet and friends: two in, two out
            waiting.append(_link(nodes, inputs["negative" if link[1] == 1 else "positive"]))
        else:
            onward = [_link(nodes, item) for name, item in inputs.items() if name.startswith("cond")]
            waiting += reversed(onward)
    return " AND ".join(found) if found else None


def _model(nodes: Mapping[str, tuple[str, Inputs]], value: object) -> dict[str, Any]:
    loras: list[str] = []
    name = None
    for _, _, inputs in _upstream(nodes, value, "model", "model1"):
        lora = _value(nodes, inputs, "lora_name")
        if isinstance(lora, str):
            strength = _value(nodes, inputs, "strength_model")
            loras.append(lora if strength is None else f"{lora}:{strength}")
        name = _value(nodes, inputs, *_MODELS)
        if isinstance(name, str):
            break
        name = None
    return {"model": name, "loras": loras or None}


def _start(nodes: Mapping[str, tuple[str, Inputs]], inputs: Inputs) -> tuple[dict[str, Any], int]:
    """The size of the latents a sampler begins with, where given, and how many samplers come before it."""
    size: dict[str, Any] = {}
    before = 0
    value = next((inputs[name] for name in _LATENTS if name in inputs), None)
    for _, kind, held in _upstream(nodes, value, *_LATENTS):
        before += _is_sampler(kind)
        width, height = _value(nodes, held, "width"), _value(nodes, held, "height")
        if not size and not before and isinstance(width, int) and isinstance(height, int):
            size = {"width": width, "height": height}
    return size, before
