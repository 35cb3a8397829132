"""`clearway profile` from its words to its report, its JSON and its trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from clearway.cli.main import build_parser, main
from clearway.cli.profile_text import WIDTH, lines
from clearway.errors import UnavailableError
from clearway.measure import ceilings, profiling, trace
from clearway.models import chosen, load
from fake_timer import FakeTimer

FAST = ["--size", "64x64", "--steps", "2", "--seed", "5", "--sampler", "Euler"]


@pytest.fixture
def run(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        ceilings, "measure", lambda device, dtype, timer: ceilings.Ceilings(dtype, 1e12, 1e11, 1e-6)
    )
    monkeypatch.setattr(profiling, "MOST_PAIRS", 1)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["profile", *arguments, "--model", str(model)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_it_takes_what_generate_takes() -> None:
    generate, profile = (vars(build_parser().parse_args([name, "x"])) for name in ("generate", "profile"))
    assert set(generate) - set(profile) == set()


def test_the_report_says_all_there_is_to_say(run) -> None:
    code, out, err = run("a red apple", *FAST)
    assert (code, err) == (0, "")
    for words in (
        "'a red apple'", "64 x 64, 2 steps, Euler", "A generation takes", "Listening to it makes that",
        "stage", "share", "of max", "GB/s", "driver MiB", "prompt parse", "text_encoder", "unet", "guidance",
        "sampler arithmetic", "vae decode", "encode and save", "idle gaps", "Maxima measured on this machine",
        "On the CPU device time is host time", "Inside ", "unet: 2 calls measured",
        "Routes: ", "unet/flat 2", "Graphs: none made", "Waits: ", "0 in the loop",
        "Bottleneck: ", "What to try", "at most",
    ):  # fmt: skip
        assert words in " ".join(out.split()) or words in out, words
    assert max(map(len, out.splitlines())) <= WIDTH
    assert {path.name for path in Path().iterdir()} <= {"home"}


def test_json_holds_more_than_the_text(run) -> None:
    code, out, _ = run("x", *FAST, "--json", "-n", "green")
    found = json.loads(out)
    assert code == 0 and found["paths"] == []
    rows = {row["name"]: row for row in found["stages"]}
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert rows["unet"]["calls"] == 2 and rows["unet"]["flops"] > 0 and rows["unet"]["of_matmul"] > 0
    assert rows["unet"]["driver_peak_bytes"] > 2**20 and rows["unet"]["device_ms"] is None
    assert found["overhead"] == pytest.approx(found["profiled_ms"][0] / found["whole_ms"] - 1)
    assert found["whole_ms"] in found["unprofiled_ms"]
    assert found["provenance"]["settings"]["precision"]["unet"] == "float32"
    assert found["request"]["seed"] == 5 and found["routes"]["unet/flat"] == 2
    assert found["provenance"]["settings"]["choices"]["executor"] == "flat"
    assert {one["kind"] for one in found["advice"]} >= {"same arithmetic"}
    assert all(0 < one["bound"] < 1 for one in found["advice"])
    paths = {one["path"] for one in found["modules"]}
    assert {path for _, path in found["descent"]} <= paths and len(paths) > 50
    assert all(len(line) <= WIDTH for line in lines(found))


def test_a_planted_slow_layer_is_named(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's clock is moved on by nothing but itself (a microsecond) and one layer (200 ms)."""
    from diffusers.models.attention import FeedForward

    from clearway.measure import clock

    inner, first, timers = FeedForward.forward, [], []

    class Timer(FakeTimer):
        def __init__(self, device: object) -> None:
            super().__init__()
            timers.append(self)

        def now(self) -> float:
            self.spend(1e-6)
            return super().now()

    def slow(self: FeedForward, *args: object, **kwargs: object) -> object:
        first.append(self)
        if self is first[0]:
            timers[-1].spend(0.2)
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(clock, "HostTimer", Timer)

    monkeypatch.setattr(FeedForward, "forward", slow)
    code, out, _ = run("x", *FAST, "--plain")  # recorded calls would leave out what is no arithmetic
    assert code == 0
    text = " ".join(out.split())
    assert "Bottleneck: unet.down_blocks.0.attentions.0.transformer_blocks.0.ff (FeedForward) takes 2" in text
    assert "look at unet.down_blocks.0.attentions.0.transformer_blocks.0.ff;" in text
    assert "transformer_blocks.0.ff (FeedForward) SLOW" in text


def test_a_trace_is_written(run) -> None:
    code, out, _ = run("x", *FAST, "--trace", "t.json", "--json")
    assert code == 0 and json.loads(out)["stages"]
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"generation", "unet", "sampling", "save", "vae.decoder"} <= names


def test_a_trace_that_cannot_be_written_costs_no_more_than_itself(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise UnavailableError("no space is left")

    monkeypatch.setattr(trace, "write", full)
    code, out, err = run("x", *FAST, "--trace", "t.json", "--json")
    assert code == 3 and "no space is left" in err and json.loads(out)["stages"]


def test_pictures_are_kept_where_it_is_asked_and_repeat(run) -> None:
    code, out, _ = run("a red apple", *FAST, "--json", "-o", "a.png", "--evidence", "--count", "2")
    assert code == 0 and json.loads(out)["paths"] == ["a.png", "a-2.png"]
    assert json.loads(Image.open("a.png").text["clearway"])["routes"]["unet/flat"] == 2
    code, out, _ = run("--from", "a.png", "--json")
    assert code == 0 and json.loads(out)["request"]["prompt"] == "a red apple"
    assert run("x", *FAST, "-o", "a.png")[0] == 2


WRONG = {
    "no prompt": [],
    "sampler": ["x", "--sampler", "DPM++ 4M"],
    "trace in no folder": ["x", "--trace", "no/such/folder/t.json"],
    "trace is a folder": ["x", "--trace", "."],
}


@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG.keys())
def test_a_mistake_is_one_sentence_and_code_2(run, arguments: list[str], monkeypatch) -> None:
    monkeypatch.setattr(profiling, "Profiler", lambda *_: pytest.fail("something was measured"))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and err.startswith("clearway: ") and err.count("\n") == 1


def test_what_was_adopted_is_profiled_as_it_is_drawn(run, model: Path) -> None:
    adopted = {"steps": 2, "sampler": "DPM++ 2M", "schedule": "Karras"}
    chosen.adopt(load(str(model), device="cpu"), "2 steps", {}, adopted)
    code, out, err = run("x", "--size", "64x64", "--device", "cpu", "--json")
    found = json.loads(out)["request"]
    assert code == 0 and "adopted for this model" in err
    assert (found["steps"], found["sampler"], found["schedule"]) == (2, "DPM++ 2M", "Karras")
    found = json.loads(run("x", "--size", "64x64", "--device", "cpu", "--sampler", "Euler", "--json")[1])[
        "request"
    ]
    assert (found["steps"], found["sampler"], found["schedule"]) == (2, "Euler", "Automatic")
