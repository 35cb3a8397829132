"""What `clearway select` chose for a model on this machine: stored with its evidence, applied when it draws.

A selection is one file of selected/ in the state folder, named after a digest of its key: device, driver,
torch and kernel language, diffusers, the sources of ops, executors and accelerate, the model's family and the
shapes of its parameters, its dtypes and the size class. Where any of these is another, there is none,
and the model runs as DEFAULTS say for its kind of device. What changes pictures is kept apart, in
adopted.json, by the model's path: it is there only if the user adopted it by name.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from clearway import home
from clearway.errors import UnavailableError, one_line
from clearway.models.model import Model
from clearway.types import Choices, Precision

if TYPE_CHECKING:
    from clearway.request import Request

FOLDER, ADOPTED = "selected", "adopted.json"
SCHEMA = 1
PACKAGE = Path(__file__).parents[1]
SOURCES = ("ops/*", "execution/*.py", "guidance/*.py", "models/accelerate.py", "models/_*.py")

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "cuda": {"executor": "cuda_graph", "layout": "channels_last", "packed_qkv": True},
    "cpu": {"executor": "flat", "ops": ()},
}
"""How networks run on a kind of device where nothing was selected: fields of Choices, with every op in place
where `ops` are not named. Kinds that are not here run plainly."""
PLAIN = "CLEARWAY_PLAIN"
"""The environment variable that turns off both what was selected and DEFAULTS."""

_aside: ContextVar[bool] = ContextVar("clearway_chosen_aside", default=False)
_plainly: ContextVar[bool] = ContextVar("clearway_chosen_plainly", default=False)
MARK = "_clearway_chosen"
"""Where a UNet holds the choices that `applied` put in place in it; `restore` takes it away with them."""
_digests: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class _Users:
    """How many generations each thread has at work with a model's modules."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.threads = Counter[int]()


_users: WeakKeyDictionary[Any, _Users] = WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class Adopted:
    """What the user adopted by name though it changes pictures: dtypes, and request fields left open."""

    precision: Precision | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()


def size_class(width: int, height: int) -> int:
    """log2 of the pixels, rounded: 512 x 512 is 18, 512 x 768 to 768 x 768 are 19, 1024 x 1024 is 20."""
    return round(math.log2(width * height))


def key(model: Model, width: int, height: int) -> dict[str, Any]:
    """Everything a selection depends on; sides in pixels."""
    return {
        **_machine(model.device.kind),
        "family": model.family.name,
        "parameters": _parameters(model),
        "precision": asdict(model.precision),
        "size_class": size_class(width, height),
    }


def find(model: Model, width: int, height: int) -> dict[str, Any] | None:
    """The selection for pictures of this size, as `store` was given it; None where there is none."""
    wanted = key(model, width, height)
    return _sound(home.read_json(FOLDER, _name(wanted)), wanted)


def store(model: Model, width: int, height: int, content: Mapping[str, Any]) -> bool:
    """Keeps a selection: "choices" (as a dict), "batch_size" or None, "tuned" tables, evidence; JSON values.

    False where the disk did not keep it.
    """
    made = key(model, width, height)
    return home.write_json({**content, "schema": SCHEMA, "key": made}, FOLDER, _name(made))


def forget(model: Model, width: int, height: int) -> bool:
    """Deletes the selection for this size; False where there was none, UnavailableError where it stays."""
    target = home.path(FOLDER, _name(key(model, width, height)))
    if not target.is_file():
        return False
    try:
        target.unlink(missing_ok=True)
    except OSError as error:
        raise UnavailableError(f"the selection could not be deleted: {one_line(error)}") from error
    return True


def outdated(model: Model, width: int, height: int) -> list[tuple[str, list[str]]]:
    """Selections for this very model that do not hold: (date, what differs, a phrase each), newest first."""
    wanted, found = key(model, width, height), []
    for path in home.path(FOLDER).glob("*.json"):
        content = home.read_json(FOLDER, path.name)
        held = content.get("key")
        if isinstance(held, dict) and held.get("parameters") == wanted["parameters"] and held != wanted:
            differs = [
                f"{name} was {held.get(name)} and is {value}"
                for name, value in wanted.items()
                if held.get(name) != value
            ]
            found.append((str(content.get("date", "")), differs))
    return sorted(found, reverse=True)


def default(kind: str) -> Choices:
    """How networks run on devices of `kind` where nothing was selected and no caller names choices."""
    fields = None if plain() else DEFAULTS.get(kind)
    if fields is None:
        return Choices()
    from clearway.models.accelerate import OPS

    return Choices(**{"ops": OPS, **fields})


def plain() -> bool:
    """Whether the user wants networks run plainly: within `plainly`, or where CLEARWAY_PLAIN is set."""
    return _plainly.get() or os.environ.get(PLAIN, "0") not in ("", "0")


@contextmanager
def plainly(wanted: bool = True) -> Iterator[None]:
    """Within it, where `wanted`, neither what was selected nor DEFAULTS hold; what a caller names does."""
    token = _plainly.set(wanted or _plainly.get())
    try:
        yield
    finally:
        _plainly.reset(token)


def described(choices: Choices) -> str:
    """Choices in a few words: "by cuda_graph, channels_last, 7 ops in place", or "plainly"."""
    usual = Choices()
    if choices == usual:
        return "plainly"
    parts = [f"by {choices.executor}"]
    parts += [choices.layout] if choices.layout != usual.layout else []
    parts += [f"guidance rows {choices.rows}"] if choices.rows != usual.rows else []
    parts += [f"{len(choices.ops)} ops in place"] if choices.ops else []
    parts += ["packed QKV"] if choices.packed_qkv else []
    parts += [f"{op} by {name}" for op, name in choices.routes]
    return ", ".join(parts)


def applied(model: Model, width: int | None = None, height: int | None = None) -> Model:
    """The model run as was chosen for pictures of this size (None: its default), else as DEFAULTS say.

    Choices that a caller named are left alone. So are ops that were put in place by hand, unless something
    was selected: of DEFAULTS only the executor holds then. Modules are shared and changed: what was put in
    place here for another size is taken away again.
    """
    run, change = _planned(model, width, height)
    if change is not None:
        from clearway.models.accelerate import apply

        apply(model, change)
        if change != Choices():
            vars(model.unet)[MARK] = change
    return run


@contextmanager
def in_use(model: Model, width: int | None = None, height: int | None = None) -> Iterator[Model]:
    """`applied`; until it ends no other thread puts something else in place in these modules by it.

    It waits for the threads that are at work with them, unless it has nothing to change.
    """
    with _lock:
        users = _users.setdefault(model.unet, _Users())
    me = threading.get_ident()
    with users.condition:
        users.condition.wait_for(
            lambda: users.threads.keys() <= {me} or _planned(model, width, height)[1] is None
        )
        run = applied(model, width, height)
        users.threads[me] += 1
    try:
        yield run
    finally:
        with users.condition:
            users.threads[me] -= 1
            if not users.threads[me]:
                del users.threads[me]
            users.condition.notify_all()


def _planned(model: Model, width: int | None, height: int | None) -> tuple[Model, Choices | None]:
    """The model as `applied` gives it, and what has to be put in place for that; None: nothing."""
    held = vars(model.unet).get(MARK)
    if _aside.get() or model.choices not in (Choices(), held):
        return model, None
    found = _selected(model, width or model.defaults.width, height or model.defaults.height)
    wanted = choices_from(found["choices"]) if found else default(model.device.kind)
    if not found and held is None and wanted != Choices() and _accelerated(model):
        return replace(model, choices=Choices(executor=wanted.executor)), None
    change = wanted if wanted != (held or Choices()) else None
    return (model if wanted == model.choices else replace(model, choices=wanted)), change


def filled(request: Request, model: Model) -> Request:
    """The request with the batch size that was chosen, where it leaves that open."""
    if _aside.get() or request.batch_size is not None or request.exact_batch or request.count == 1:
        return request
    defaults = model.defaults
    found = _selected(model, request.width or defaults.width, request.height or defaults.height)
    size = found.get("batch_size") if found else None
    return replace(request, batch_size=min(size, request.count)) if isinstance(size, int) else request


def tuned(model: Model, width: int, height: int) -> Mapping[str, Mapping[str, str]] | None:
    """The tuned tables that the model's selection for this size was measured with, none being a table too.

    None where its choices are not those of a selection: the device's own tables hold then.
    """
    found = None if _aside.get() else _selected(model, width, height)
    if found is None or choices_from(found["choices"]) != model.choices:
        return None
    tables: Mapping[str, Mapping[str, str]] | None = found.get("tuned")
    return tables


@contextmanager
def set_aside() -> Iterator[None]:
    """Within it nothing that was chosen is used: for measuring, where each arm says itself how it runs."""
    token = _aside.set(True)
    try:
        yield
    finally:
        _aside.reset(token)


def adopted(path: Path, kind: str, *, aside: bool | None = None) -> Adopted:
    """What was adopted for the model at `path` on devices of `kind`, on this machine as it is now.

    Nothing within `set_aside`; `aside` False asks all the same.
    """
    found = home.read_json(FOLDER, ADOPTED).get(f"{kind}:{path}")
    aside = _aside.get() if aside is None else aside
    if aside or not isinstance(found, dict) or found.get("machine") != _machine(kind):
        return Adopted()
    try:
        named = found["precision"]
        precision = Precision(**named) if named else None
        return Adopted(precision, dict(found["request"]), tuple(found["names"]))
    except (KeyError, TypeError, ValueError):
        return Adopted()


def adopt(
    model: Model, name: str, precision: Mapping[str, Any] | None, request: Mapping[str, Any]
) -> Adopted | None:
    """Adds dtypes by part and request fields to what is adopted for the model; None if the disk refused.

    What was adopted before and decides one of the same things is given up for it.
    """
    kind = model.device.kind
    before, everything = adopted(model.path, kind, aside=False), home.read_json(FOLDER, ADOPTED)
    stored = everything.get(f"{kind}:{model.path}")
    held = stored.get("decided") if isinstance(stored, dict) and before.names else None
    mine = [*(precision or ()), *request]
    decided = {other: keys for other, keys in dict(held or {}).items() if not set(keys) & set(mine)}
    gone = {key for other, keys in dict(held or {}).items() if other not in decided for key in keys}
    dtypes = before.precision or model.precision
    after = Adopted(
        replace(dtypes, **precision) if precision else before.precision,
        {**{key: value for key, value in before.request.items() if key not in gone}, **request},
        (*(other for other in before.names if other in decided), name),
    )
    content = {
        "machine": _machine(kind),
        "precision": asdict(after.precision) if after.precision else None,
        "request": dict(after.request),
        "names": list(after.names),
        "decided": {**decided, name: mine},
    }
    everything[f"{kind}:{model.path}"] = content
    return after if home.write_json(everything, FOLDER, ADOPTED) else None


def abandon(model: Model) -> tuple[str, ...]:
    """Drops all that was adopted for the model on its device; the names. UnavailableError where it stays."""
    everything = home.read_json(FOLDER, ADOPTED)
    found = everything.pop(f"{model.device.kind}:{model.path}", None)
    if found is None:
        return ()
    if not home.write_json(everything, FOLDER, ADOPTED):
        raise UnavailableError("the state folder cannot be written: what was adopted stays in use")
    return tuple(found.get("names", ())) if isinstance(found, dict) else ()


def choices_from(values: Mapping[str, Any]) -> Choices:
    """Choices from their JSON; TypeError or ValueError where it is none."""
    made = Choices(**values)
    routes = tuple((str(op), str(implementation)) for op, implementation in made.routes)
    return replace(made, ops=tuple(map(str, made.ops)), routes=routes)


@functools.cache
def diffusers() -> str:
    """The version of Diffusers, whose classes the networks are; reading it anew takes half a millisecond."""
    return importlib.metadata.version("diffusers")


@functools.cache
def sources() -> str:
    """A digest of every source file that decides how a network is run."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in PACKAGE.glob(pattern) if path.is_file()}):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _selected(model: Model, width: int, height: int) -> dict[str, Any] | None:
    """The selection to run by: one that decided something, or that came to its end without doing so."""
    found = None if plain() else find(model, width, height)
    if found is None or choices_from(found["choices"]) != Choices() or found.get("batch_size"):
        return found
    return None if found.get("outcome", {}).get("complete") is False else found


def _accelerated(model: Model) -> bool:
    """Whether ops are in place in the model's networks already."""
    from clearway.models._attention import Processor
    from clearway.models._bound import Bound

    return any(
        isinstance(held.get("forward"), Bound) or isinstance(held.get("processor"), Processor)
        for part in (model.unet, model.vae)
        for held in map(vars, part.modules())
    )


def _machine(kind: str) -> dict[str, Any]:
    from clearway.ops import state

    return {
        "identity": state.identity(kind),
        "diffusers": diffusers(),
        "sources": sources(),
    }


def _parameters(model: Model) -> str:
    """A digest of the names and shapes of all parameters: finetunes of one network share it."""
    if model.unet not in _digests:
        parts = {"unet": model.unet, "vae": model.vae}
        parts |= {f"text{number}": part for number, part in enumerate(model.text_encoders)}
        shapes = [
            f"{label}.{name}{tuple(parameter.shape)}"
            for label, part in parts.items()
            for name, parameter in part.named_parameters()
        ]
        _digests[model.unet] = hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]
    return _digests[model.unet]


def _name(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16] + ".json"


def _sound(content: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """The content, if it is a selection for just this key."""
    if content.get("schema") != SCHEMA or content.get("key") != wanted:
        return None
    tables = content.get("tuned", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        return None
    try:
        choices_from(content["choices"])
    except (KeyError, TypeError, ValueError):
        return None
    return content
