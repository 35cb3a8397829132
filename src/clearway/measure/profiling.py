"""One generation measured stage by stage, and what measuring costs: the runs behind `clearway profile`.

The same request is run unprofiled, with its stages listened to, with every module listened to, and counted;
all but the first are shortened where a generation takes long. Totals come from unprofiled runs alone.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psutil

from clearway.clock import waiting
from clearway.measure.ceilings import Ceilings
from clearway.measure.counts import counting
from clearway.measure.inside import Inner, inner
from clearway.measure.rows import Row, row_name, rows, without
from clearway.measure.stages import CALL, RUN, Recorder, listening, parts
from clearway.models import chosen
from clearway.models._mixed_choice import HALF
from clearway.types import MIXED, Event, PicturesDone, StageDone

if TYPE_CHECKING:
    from clearway.measure.clock import Timer
    from clearway.models import Model
    from clearway.request import Request
    from clearway.result import Result

QUICK_S = 4.0  # a generation up to this long is run several times, whole
PAIRS_S = 6.0  # for these runs, unprofiled and profiled in turn
SHORT_S = 8.0  # a longer one is profiled over so few steps that they take about this long
LEAST_PAIRS, MOST_PAIRS = 2, 5
INSIDE_STEPS = 3
BUSY = 1.2  # load a core before anything was measured
WAIT = "wait for the device"

Listener = Callable[[Event], None]


@dataclass
class Profile:
    """Everything `clearway profile` says; times in ms, shares as parts of the whole."""

    request: Request
    result: Result
    first_ms: float
    unprofiled_ms: list[float]
    profiled_ms: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    calls_ms: dict[str, list[float]] = field(default_factory=dict)
    inside: list[Inner] = field(default_factory=list)
    compiler: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    runs: dict[str, Recorder] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def whole_ms(self) -> float:
        """An unprofiled generation, saving included."""
        return statistics.median(self.unprofiled_ms)

    @property
    def overhead(self) -> float:
        """How much longer a profiled run takes, as a part of an unprofiled one; noise makes it negative."""
        return statistics.median(self.profiled_ms) / self.whole_ms - 1


@dataclass
class Profiler:
    """Runs one request again and again.

    `draw` is `pipeline.generate`; `save` is what a door does with finished pictures, told whether they are to
    be kept (the first run's); `ceilings` gives the machine's for a dtype; `meter` makes memory meters.
    """

    model: Model
    draw: Callable[[Request, Model, Listener], Result]
    save: Callable[[Result, bool], None]
    timer: Timer
    ceilings: Callable[[str], Ceilings]
    meter: Callable[[], Any] | None = None
    on_event: Listener | None = None

    def profile(self, request: Request) -> Profile:
        """The profile of `request`."""
        before = compiler()
        load = psutil.getloadavg()[0] / (psutil.cpu_count() or 1)
        first = replace(request, steps=1, count=1)
        if (
            self.model.device.kind == "cpu" and chosen.plain()
        ):  # else made ready by size, at first sight of it
            first = replace(first, width=64, height=64)
        first_ms, _, _ = self._plain(first, keep=None)
        whole_ms, stage_ms, result = self._plain(request, keep=True)
        made = Profile(result.request, result, first_ms, [whole_ms])
        if load > BUSY:
            made.notes.append(
                f"other programs keep this machine busy (load {load:.1f} a core), so times vary more"
            )
        request, scale = made.request, dict[str, float]()
        stages, inside, counted = (Recorder(self.timer, meter=meter) for meter in (self.meter, None, None))
        if whole_ms <= QUICK_S * 1000:
            made.profiled_ms.append(self._listened(request, stages))
            pairs = min(MOST_PAIRS, max(LEAST_PAIRS, int(PAIRS_S * 1000 / max(2 * whole_ms, 1e-9))))
            for _ in range(pairs - 1):
                made.unprofiled_ms.append(self._plain(request, keep=False)[0])
                made.profiled_ms.append(self._listened(request, Recorder(self.timer, meter=self.meter)))
            steps = min(INSIDE_STEPS, request.steps or 1)
            self._listened(replace(request, steps=steps, count=1), inside, inside=True)
            self._counted(replace(request, steps=1, count=1), counted, made)
        else:
            short, scale = _shortened(request, whole_ms, stage_ms)
            self._listened(short, stages)
            called = sum(span.kind == CALL and span.name == "unet" for span in stages.spans)
            if called and (calls := _called(result.routes, "unet")):  # a last step may call fewer times
                scale["sampling"] = calls / scale["noise"] / called * scale["vae"]
            # operations this slow are not slowed down by being counted
            self._counted(replace(short, steps=1, count=1), counted, made)
            inside = counted
            if short != request:
                made.notes.append(
                    f"a generation takes {whole_ms / 1000:.0f} s, so {short.steps} of {request.steps} steps "
                    f"and {short.count} of {request.count} pictures were profiled and scaled to the whole"
                )
        made.rows = rows(stages, counted, scale, self._dtype, self.ceilings)
        if self.model.device.kind == "cpu":
            made.rows = without(made.rows, WAIT)
        if scale:
            for row in made.rows:
                row.calls = _called(result.routes, row.name.removesuffix(" decode")) or row.calls
            made.profiled_ms.append(sum(row.host_ms for row in made.rows))
        made.calls_ms = _calls(stages)
        made.inside = self._modules(made, [inside], counted)
        if any(one.slow for one in made.inside):  # named only when it is slow again
            again = Recorder(self.timer)
            self._listened(replace(request, steps=1, count=1), again, inside=True)
            made.inside = self._modules(made, [inside, again], counted)
        made.compiler = {name: count - before.get(name, 0) for name, count in compiler().items()}
        made.graphs = graphs(replace(self.model, choices=result.choices), result.routes)
        made.runs = {"generation": stages, "modules": inside}
        return made

    def _plain(self, request: Request, keep: bool | None) -> tuple[float, dict[str, float], Result]:
        """(ms, ms by stage, result) of an unprofiled run with its saving; keep None: nothing is saved."""
        stage_ms: dict[str, float] = defaultdict(float)
        begun = mark = self.timer.now()

        def listen(event: Event) -> None:
            nonlocal mark
            if isinstance(event, StageDone):
                stage_ms[event.name] += (self.timer.now() - mark) * 1000
                mark = self.timer.now()
            if keep is not None and isinstance(event, PicturesDone):
                self.save(event.result, keep)
            self._tell(event)

        self.timer.synchronize()
        begun = mark = self.timer.now()
        with waiting():
            result = self.draw(request, self.model, listen)
        self.timer.synchronize()
        return (self.timer.now() - begun) * 1000, dict(stage_ms), result

    def _listened(self, request: Request, recorder: Recorder, inside: bool = False) -> float:
        """ms of a run that `recorder` listens to, `inside` its modules too."""

        def listen(event: Event) -> None:
            if isinstance(event, PicturesDone):
                with recorder.stage("save"):
                    self.save(event.result, False)
            self._tell(event)

        model = self.model
        if inside and model.choices.executor != "eager":  # to look inside, modules must run one by one
            model = replace(model, choices=replace(model.choices, executor="eager"))
        self.timer.synchronize()
        with (
            waiting(),
            listening(recorder, model if inside else None),
            recorder.span("generation", RUN) as run,
        ):
            self.draw(request, model, listen)
        self.timer.synchronize()
        return run.seconds * 1000

    def _counted(self, request: Request, recorder: Recorder, made: Profile) -> None:
        with counting(recorder, self.model.device.kind) as mode:
            self._listened(request, recorder, inside=True)
        made.unknown = dict(mode.unknown)

    def _tell(self, event: Event) -> None:
        if self.on_event:
            self.on_event(event)

    def _dtype(self, row: str) -> str:
        precision = self.model.precision
        for start, dtype in (
            ("text", precision.text_encoder),
            ("unet", precision.unet),
            ("vae", precision.vae),
        ):
            if row.startswith(start) and dtype == MIXED:  # the higher ceilings, which its half parts have
                return HALF.get(self.model.device.kind, "float32")
            if row.startswith(start):
                return dtype
        return precision.sampling

    def _modules(self, made: Profile, inside: list[Recorder], counted: Recorder) -> list[Inner]:
        shares = {row.name: row.share for row in made.rows}
        names = {span.name: row_name(span) for span in inside[0].spans if span.kind == CALL}
        networks = {
            part: (statistics.mean(times), shares.get(names.get(part, part), 0.0))
            for part, times in made.calls_ms.items()
        }
        types = {
            f"{part}.{name}": type(module).__name__
            for part, root in parts(self.model).items()
            for name, module in root.named_modules()
        }
        return inner(inside, counted, types, networks, lambda part: self.ceilings(self._dtype(part)))


def compiler() -> dict[str, int]:
    """What torch's compiler has done in this process, where it was used: graphs, breaks, recompilations."""
    if "torch._dynamo" not in sys.modules:
        return {}
    from torch._dynamo.utils import counters

    return {
        "graphs": int(counters["stats"]["unique_graphs"]),
        "graph breaks": sum(counters["graph_break"].values()),
        "recompilations": sum(counters["recompiles"].values()),
        "CUDA graphs skipped": int(counters["inductor"]["cudagraph_skips"]),
    }


def graphs(model: Model, routes: Mapping[str, int]) -> dict[str, int]:
    """What executors captured for this model, and how many calls missed what was asked for."""
    found: dict[str, int] = {}
    for part, root in parts(model).items():
        built = vars(root).get("_clearway_built")
        for held in getattr(built, "held", {}).values():
            if not hasattr(held, "captured"):  # recorded calls, not graphs
                continue
            for name in ("captured", "evicted"):
                if count := int(getattr(held, name, 0)):
                    found[f"{part} {name}"] = found.get(f"{part} {name}", 0) + count
        if (
            not part.startswith("text")
            and model.choices.executor != "eager"
            and (missed := routes.get(f"{part}/eager"))
        ):
            found[f"{part} calls without a graph"] = missed
    return found


def _called(routes: Mapping[str, int], part: str) -> int:
    """How often a network was called, by whatever executor."""
    return sum(count for route, count in routes.items() if route.partition("/")[0] == part)


def _calls(recorder: Recorder) -> dict[str, list[float]]:
    """The ms of each network call, in order."""
    found: dict[str, list[float]] = defaultdict(list)
    for span in sorted(recorder.spans, key=lambda span: span.begin):
        if span.kind == CALL:
            device_s = recorder.device_seconds(span)
            found[span.name].append(1000 * (span.seconds if device_s is None else device_s))
    return dict(found)


def _shortened(
    request: Request, whole_ms: float, stage_ms: Mapping[str, float]
) -> tuple[Request, dict[str, float]]:
    """A request of the same kind that takes about SHORT_S, and by stage how often the whole does it."""
    steps, count = request.steps or 1, min(request.count, request.batch_size or 1)
    groups, pictures = -(-request.count // count), request.count / count
    sampling_ms = stage_ms.get("sampling", 0.0)
    step_ms = max(sampling_ms / steps / groups, 1e-9)
    rest_ms = (whole_ms - sampling_ms) / pictures
    fewer = max(1, min(steps, int((SHORT_S * 1000 - rest_ms) / step_ms)))
    scale = {"sampling": steps / fewer * pictures, "noise": groups, "vae": pictures, "save": pictures}
    return replace(request, steps=fewer, count=count), scale
