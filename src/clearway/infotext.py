"""Infotext: the parameters of a picture as one text, in the A1111 WebUI's format, written and read back.

    prompt (any number of lines)
    Negative prompt: … (any number of lines; left out where empty)
    Steps: 20, Sampler: Euler a, Schedule type: Automatic, CFG scale: 7, Seed: 1, Size: 512x512, …

What the format cannot carry, whoever writes it: white space around the lines of a prompt, empty lines at its
start, a prompt line that starts with "Negative prompt:", fewer than three parameters; and a value that looks
like 512x512 (it is split), or that has white space or double quotes around it and needs no quoting itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clearway.errors import RequestError
from clearway.types import MIXED, Precision

if TYPE_CHECKING:
    from clearway.request import Request

NEGATIVE = "Negative prompt:"
FEWEST = 3  # a last line with fewer parameters belongs to the prompt
DDIM_ETA = ("DDIM", "DDIM CFG++", "PLMS", "UniPC")  # their eta is the WebUI's "Eta DDIM"

_QUOTED = re.compile(r'"(?:\\.|[^\\"])+"')
_SIZE = re.compile(r"(\d+)x(\d+)")
_WORD = re.compile(r"\w")
_KEY_SIGN = re.compile(r"[\w \-/]")
_WHOLE = re.compile(r"[+-]?\d+(?:\.0*)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Parameters:
    """An infotext taken apart. `values` are texts by key; a size "WxH" is two of them, key-1 and key-2."""

    prompt: str = ""
    negative_prompt: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


def build(prompt: str, negative_prompt: str, parameters: Mapping[str, object]) -> str:
    """The infotext of a picture.

    None is left out, a key equal to its value stands alone, and a value is quoted as JSON exactly where it
    holds a comma, a colon or a line feed. Whole floats are written as the WebUI's page gives them (7, not
    7.0). Source: behaviour of the WebUI v1.10.1 (`create_infotext`).
    """
    items = [
        key if key == value else f"{key}: {_quote(_text(value))}"
        for key, value in parameters.items()
        if value is not None
    ]
    negative = f"\n{NEGATIVE} {negative_prompt}" if negative_prompt else ""
    return f"{prompt}{negative}\n{', '.join(items)}".strip()


def parameters(
    request: Request,
    *,
    seed: int,
    version: str,
    model_name: str | None = None,
    model_hash: str | None = None,
    schedule_label: str | None = None,
    precision: Precision | None = None,
    ngms_used: bool = False,
    memory_budget_bytes: int | None = None,
    vae_tiling: str | None = None,
    extras: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """What `build` writes of one picture of a resolved `request`, in the WebUI's order.

    `seed` is the picture's own, `schedule_label` the schedule that ran (else the request's), `ngms_used`
    whether at least one negative call was skipped, `memory_budget_bytes` the budget where it decided a route,
    `vae_tiling` the tiles ("64/16") of a VAE that decoded by tiles,
    `version` Clearway's ("0.1.0"). `extras` precede the
    dtypes. Source: behaviour of the WebUI v1.10.1; the dtypes are Clearway's own, written where they are
    not float32.
    """
    ngms = ngms_used and request.ngms > 0
    size = None if request.width is None or request.height is None else f"{request.width}x{request.height}"
    values: dict[str, object] = {
        "Steps": request.steps,
        "Sampler": request.sampler,
        "Schedule type": schedule_label or request.schedule,
        "CFG scale": request.cfg_scale,
        "Seed": seed,
        "Size": size,
        "Model hash": model_hash,
        "Model": model_name,
        "Clip skip": request.clip_skip if request.clip_skip > 1 else None,
        "RNG": request.rng if request.rng != "GPU" else None,
        "Eta DDIM" if request.sampler in DDIM_ETA else "Eta": request.eta,
        "Sigma churn": request.s_churn,
        "Sigma tmin": request.s_tmin,
        "Sigma tmax": request.s_tmax,
        "Sigma noise": request.s_noise,
        "Schedule min sigma": request.sigma_min,
        "Schedule max sigma": request.sigma_max,
        "Schedule rho": request.rho,
        "NGMS": request.ngms if ngms else None,
        "NGMS all steps": True if ngms and request.ngms_all_steps else None,
        "Memory budget": memory_budget_bytes,
        "VAE tiling": vae_tiling,
    }
    own = _dtypes(precision or Precision()) | {"Version": f"Clearway {version}"}
    twice = (extras or {}).keys() & (values.keys() | own.keys())
    if twice:
        raise ValueError(f"extras name what Clearway writes itself: {', '.join(sorted(twice))}")
    merged = values | dict(extras or {}) | own
    return {key: value for key, value in merged.items() if value is not None}


def parse(text: str) -> Parameters:
    """The prompt, the negative prompt and the parameters of `text`; of any text, and without raising.

    The last line holds the parameters if it has at least three; otherwise all lines are prompt.
    Source: behaviour of the WebUI v1.10.1 (`parse_generation_parameters`) without the defaults it fills in,
    and keeping empty values, which it drops. Time is linear in the text's length.
    """
    *lines, last = text.strip().split("\n")
    pairs = _pairs(last)
    if len(pairs) < FEWEST:
        lines.append(last)
        pairs = []
    prompt: list[str] = []
    negative: list[str] = []
    part = prompt
    for line in lines:
        line = line.strip()
        if line.startswith(NEGATIVE):
            part = negative
            line = line[len(NEGATIVE) :].strip()
        if line or part:  # empty lines count between and after lines, not before
            part.append(line)
    values: dict[str, str] = {}
    for key, raw in pairs:
        value = _unquote(raw)
        size = _SIZE.fullmatch(value)
        if size:
            values[f"{key}-1"], values[f"{key}-2"] = size.groups()
        else:
            values[key] = value
    return Parameters("\n".join(prompt), "\n".join(negative), values)


def request_fields(text: str) -> dict[str, Any]:
    """Arguments for `Request` from an infotext of Clearway, the WebUI, Forge or SD.Next.

    What the text does not say is absent, and so open; old sampler names ("DPM++ 2M Karras") come as they are;
    `unread` says what is not applied. Raises RequestError where there are no parameters or one cannot be
    read.
    """
    found = parse(text)
    if not found.values:
        raise RequestError(
            "no generation parameters were found in the text; its last line would be like "
            "'Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 512x512'"
        )
    fields: dict[str, Any] = {"prompt": found.prompt, "negative_prompt": found.negative_prompt}
    for key, value in found.values.items():
        if key in _FIELDS:
            name, read = _FIELDS[key]
            fields[name] = read(key, value)
    schedule = _SDNEXT_SIGMAS.get(found.values.get("Sampler sigma", "").strip())
    if schedule:
        fields.setdefault("schedule", schedule)
    return fields


def precision_fields(text: str) -> dict[str, Any]:
    """Arguments for `Precision` from one of Clearway's own infotexts, complete; empty for anybody else's.

    Raises RequestError for a dtype that Clearway does not have.
    """
    values = parse(text).values
    if not _is_ours(values):
        return {}
    fields: dict[str, Any] = {name: _dtype(key, values.get(key, "float32")) for key, name in _DTYPES.items()}
    return fields | {"tf32": _truth("TF32", values.get("TF32", "False"))}


def unread(text: str) -> tuple[str, ...]:
    """The parameters in `text` that neither `request_fields` nor `precision_fields` applies, in order.

    Names and versions (Model, App, …) are left out.
    """
    values = parse(text).values
    known = {*_FIELDS, *_ABOUT}
    if _is_ours(values):
        known |= {*_DTYPES, "TF32"}
    names: dict[str, None] = {}
    for key, value in values.items():
        if key == "Sampler sigma" and value.strip() in _SDNEXT_SIGMAS:
            continue
        elif key not in known and _NEUTRAL.get(key) != value.strip():
            half = key[-2:] in ("-1", "-2") and {f"{key[:-1]}1", f"{key[:-1]}2"} <= values.keys()
            names[key[:-2] if half else key] = None
    return tuple(names)


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if any(sign in text for sign in ",:\n") else text


def _unquote(text: str) -> str:
    if len(text) < 2 or not text.startswith('"') or not text.endswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text


def _pairs(line: str) -> list[tuple[str, str]]:
    r"""(key, raw value) as findall of `\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)` gives them.

    The expression itself takes quadratic time on long words without a colon, hence by hand: each colon is met
    once, and the key is the longest run of key signs before it that starts with a word sign.
    """
    pairs: list[tuple[str, str]] = []
    start = 0  # where the last match, or the last colon without a key, ended
    colon = line.find(":")
    while colon >= 0:
        begin = colon
        while begin > start and _KEY_SIGN.match(line[begin - 1]):
            begin -= 1
        while begin < colon and not _WORD.match(line[begin]):
            begin += 1
        if colon - begin < 2:
            start = colon + 1
            colon = line.find(":", start)
            continue
        value = colon + 1
        while value < len(line) and line[value].isspace():
            value += 1
        quoted = _QUOTED.match(line, value)
        if quoted and (quoted.end() == len(line) or line[quoted.end()] == ","):
            end = quoted.end()
        else:
            end = line.find(",", value)
            end = len(line) if end < 0 else end
        pairs.append((line[begin:colon], line[value:end]))
        start = end + 1
        colon = line.find(":", start)
    return pairs


def _dtypes(precision: Precision) -> dict[str, object]:
    found: dict[str, object] = {
        key: getattr(precision, name)
        for key, name in _DTYPES.items()
        if getattr(precision, name) != "float32"
    }
    return found | ({"TF32": True} if precision.tf32 else {})


def _is_ours(values: Mapping[str, str]) -> bool:
    return values.get("Version", "").startswith("Clearway ")


def _whole(key: str, value: str) -> int:
    found = value.strip()
    if not _WHOLE.fullmatch(found) or len(found) > 100:
        raise _unreadable(key, value, "a whole number")
    return int(found.partition(".")[0])


def _number(key: str, value: str) -> float:
    found = float(value) if _NUMBER.fullmatch(value.strip()) else math.nan
    if not math.isfinite(found):
        raise _unreadable(key, value, "a number")
    return found


def _number_or_inf(key: str, value: str) -> float:
    return math.inf if value.strip() == "inf" else _number(key, value)


def _name(key: str, value: str) -> str:
    if not value.strip():
        raise _unreadable(key, value, "a name")
    return value.strip()


def _truth(key: str, value: str) -> bool:
    found = value.strip().lower()
    if found not in ("true", "false"):
        raise _unreadable(key, value, "True or False")
    return found == "true"


def _tiled(key: str, value: str) -> bool:
    """Clearway writes the sides of tiles and overlaps in latents ("64/16")."""
    return value.strip().lower() not in ("false", "0", "")


def _rng(key: str, value: str) -> str:
    if value.strip() not in ("GPU", "CPU", "NV"):
        raise _unreadable(key, value, "GPU, CPU or NV")
    return value.strip()


def _dtype(key: str, value: str) -> str:
    known = ("float32", "float16", "bfloat16", *((MIXED,) if _DTYPES[key] == "vae" else ()))
    if value.strip() not in known:
        raise _unreadable(key, value, f"{', '.join(known[:-1])} or {known[-1]}")
    return value.strip()


def _unreadable(key: str, value: str, wanted: str) -> RequestError:
    shown = value if len(value) <= 60 else value[:57] + "…"
    return RequestError(f"{key} {shown!r} in the parameters cannot be read; it would be {wanted}")


_FIELDS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "Steps": ("steps", _whole),
    "Sampler": ("sampler", _name),
    "Schedule type": ("schedule", _name),
    "CFG scale": ("cfg_scale", _number),
    "Seed": ("seed", _whole),
    "Size-1": ("width", _whole),
    "Size-2": ("height", _whole),
    "Clip skip": ("clip_skip", _whole),
    "RNG": ("rng", _rng),
    "Eta": ("eta", _number),
    "Eta DDIM": ("eta", _number),
    "Sigma churn": ("s_churn", _number),
    "Sigma tmin": ("s_tmin", _number),
    "Sigma tmax": ("s_tmax", _number_or_inf),
    "Sigma noise": ("s_noise", _number),
    "Schedule min sigma": ("sigma_min", _number),
    "Schedule max sigma": ("sigma_max", _number),
    "Schedule rho": ("rho", _number),
    "NGMS": ("ngms", _number),
    "NGMS all steps": ("ngms_all_steps", _truth),
    "Memory budget": ("memory_budget_bytes", _whole),
    "VAE tiling": ("vae_tiling", _tiled),
}
_DTYPES = {
    "Dtype": "unet",
    "VAE dtype": "vae",
    "Text encoder dtype": "text_encoder",
    "Sampling dtype": "sampling",
}
_ABOUT = ("Model", "Model hash", "Version", "App", "Backend", "Pipeline", "User", "Comment")
_NEUTRAL = {"Emphasis": "Original", "Operations": "txt2img", "Parser": "a1111"}  # what Clearway does anyway
_SDNEXT_SIGMAS = {"karras": "Karras", "exponential": "Exponential"}
