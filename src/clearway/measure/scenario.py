"""Scenarios: what a benchmark runs, as data. The named ones lie in bench/scenarios/, one JSON file each.

A scenario says what is asked for and nothing of how it is run: that is the contenders' part. A changed
scenario (`changed`) carries its changes in its name, so that no record passes for another's.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from clearway.device import Device, dtype_for
from clearway.errors import RequestError, nearest, one_line
from clearway.request import Request
from clearway.types import Precision

WHATS = ("whole", "unet", "vae", "text", "ops")
HALF = Precision(unet="float16", text_encoder="float16", vae="float16", sampling="float32")
"""What a scenario means on a device other than the CPU where it names no dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One piece of work. `what` is a whole generation, one call of a network, or the ops on real shapes.

    `model` is "embedded", a random model's name ("sd15-random", "sdxl-random") or what `load` takes; sides in
    pixels; every round takes the next of `seeds`. `count` pictures run in groups of `batch_size`; a network
    is called `calls` times in a round, one call after the other without waiting for the device. `precision`
    names dtypes by part; the rest is half on a GPU and float32 on the CPU. `twin` names the scenario that
    differs in one thing. Raises RequestError for values that cannot be run.
    """

    name: str
    title: str = ""
    what: str = "whole"
    model: str = "embedded"
    width: int = 512
    height: int = 512
    steps: int = 20
    sampler: str = "DPM++ 2M"
    schedule: str = "Karras"
    cfg_scale: float = 7.0
    prompt: str = "a red apple on a wooden table"
    negative: str = ""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    batch_size: int = 1
    count: int = 1
    calls: int = 1
    ngms: float = 0.0
    ngms_all_steps: bool = False
    precision: Mapping[str, str] = field(default_factory=dict)
    twin: str | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        if self.what not in WHATS:
            raise RequestError(
                f"scenario {self.name}: what {self.what!r} is not known; it is one of {', '.join(WHATS)}"
            )
        parts = [one for one in Precision.__slots__ if one != "tf32"]
        for part, name in self.precision.items():
            if part not in parts:
                raise RequestError(
                    f"scenario {self.name}: precision of {part!r} is not known; it has {', '.join(parts)}"
                )
            dtype_for(part, name)
        if not self.seeds:
            raise RequestError(f"scenario {self.name} has no seeds; one is enough")
        if self.calls < 1 or (self.calls > 1 and self.what in ("whole", "ops")):
            raise RequestError(
                f"scenario {self.name}: {self.calls} calls a round; a network takes 1 or more, all else 1"
            )
        self.request(0)

    def request(self, round: int, side_px: int = 0) -> Request:
        """The order of one round; `side_px` wider than the scenario says, for measuring a new size."""
        return Request(
            prompt=self.prompt,
            negative_prompt=self.negative,
            width=self.width + side_px,
            height=self.height,
            steps=self.steps,
            cfg_scale=self.cfg_scale,
            sampler=self.sampler,
            schedule=self.schedule,
            seed=self.seeds[round % len(self.seeds)],
            count=self.count,
            batch_size=self.batch_size,
            ngms=self.ngms,
            ngms_all_steps=self.ngms_all_steps,
        )

    def precision_on(self, device: Device) -> Precision:
        """The dtypes by part on `device`, as torch's own names."""
        base = Precision() if device.kind == "cpu" else HALF
        named = {part: dtype_for(part, name) for part, name in self.precision.items()}
        return replace(base, **named)  # type: ignore[arg-type]

    @property
    def work(self) -> str:
        """ "less work" where guidance is left out, else "same"."""
        return "less work" if self.ngms else "same"

    def changed(self, changes: Mapping[str, str]) -> Scenario:
        """This scenario with fields set from text, and a name that says which; itself without any.

        `precision` parts are changed by name ("vae=float32").
        """
        if not changes:
            return self
        values = self.as_dict()
        for key, text in changes.items():
            if key in Precision.__slots__ and key != "tf32":
                values["precision"] = {**values["precision"], key: text}
            elif key in values and key not in ("name", "precision"):
                values[key] = _from_text(key, text)
            else:
                known = [*(one for one in values if one not in ("name", "precision")), *Precision.__slots__]
                raise RequestError(f"a scenario has no {key!r}; nearest: {nearest(key, known)}")
        said = ", ".join(f"{key}={_said(key, text)}" for key, text in changes.items())
        return from_dict({**values, "name": f"{self.name} ({said})"}, self.name)

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, for JSON."""
        return {**asdict(self), "precision": dict(self.precision), "seeds": list(self.seeds)}


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "str | None": (str, type(None)),
    "tuple[int, ...]": (list, tuple),
    "Mapping[str, str]": (dict,),
}


def from_dict(values: Any, where: str) -> Scenario:
    """The scenario that a JSON object describes; RequestError, beginning with `where`, if it is none."""
    if not isinstance(values, dict):
        raise RequestError(f"{where} holds no scenario, which is one JSON object")
    known = {one.name: one for one in fields(Scenario)}
    for key, value in values.items():
        if key not in known:
            raise RequestError(f"{where}: a scenario has no {key!r}; nearest: {nearest(key, known)}")
        kinds = _KINDS[str(known[key].type)]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise RequestError(f"{where}: {key} cannot be {value!r:.60}")
    if not values.get("name"):
        raise RequestError(f"{where}: the scenario has no name")
    seeds = values.get("seeds", (1,))
    if not all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in seeds):
        raise RequestError(f"{where}: seeds must be whole numbers from 0")
    try:
        return Scenario(**{**values, **({"seeds": tuple(seeds)} if "seeds" in values else {})})
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error


def folder() -> Path:
    """Where the named scenarios lie: beside this file in an installed package, else in the checkout."""
    packaged = Path(__file__).parent / "scenarios"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "bench" / "scenarios"


def names() -> list[str]:
    """The named scenarios, in alphabetical order."""
    try:
        return sorted(path.stem for path in folder().glob("*.json"))
    except OSError:
        return []


def find(name: str) -> Scenario:
    """The scenario called `name`, or that of the JSON file at this path; RequestError where there is none."""
    path = Path(name) if name.endswith(".json") else folder() / f"{name}.json"
    if not name.endswith(".json") and name not in names():
        raise RequestError(f"scenario {name!r} is not known; nearest: {nearest(name, names())}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} cannot be read as a scenario ({one_line(error)})") from error
    return from_dict(values, path.name)


def every(chosen: Iterable[str] = ()) -> list[Scenario]:
    """The scenarios of these names; all named ones where none is given."""
    return [find(name) for name in (list(chosen) or names())]


def _said(key: str, text: str) -> str:
    """What a name says of a change: of words only a number that tells them apart, of a path its last part."""
    if key in ("prompt", "negative", "title", "notes"):
        return f"#{zlib.crc32(text.encode()):08x}"
    return Path(text).name if key == "model" and ("/" in text or "\\" in text) else text


def _from_text(key: str, text: str) -> Any:
    """A field's value from the command line: JSON where it is JSON, seeds also as 1,2,3, else the text."""
    if key == "seeds" and text and not text.startswith("["):
        text = f"[{text}]"
    if {one.name: str(one.type) for one in fields(Scenario)}[key] in ("str", "str | None"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(f"{key} cannot be {text!r:.60}") from error
