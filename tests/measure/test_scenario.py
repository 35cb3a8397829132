"""Scenarios: the named ones are sound and say what the requirements ask for; changes carry their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clearway import sampling
from clearway.device import Device
from clearway.errors import RequestError
from clearway.measure import scenario
from clearway.measure.scenario import Scenario
from clearway.types import Precision

CPU = Device("cpu")


@pytest.mark.parametrize("name", scenario.names())
def test_every_named_scenario_is_sound(name: str) -> None:
    one = scenario.find(name)
    assert one.name == name and one.title
    sampling.resolve(one.sampler, one.schedule)
    assert one.twin is None or scenario.find(one.twin).twin in (name, None, f"{one.twin}-ngms")
    assert scenario.from_dict(json.loads(json.dumps(one.as_dict())), "again") == one


def test_the_tuned_workload_runs_as_twins_that_differ_in_guidance_alone() -> None:
    for size, sides in (("512", (512, 512)), ("384x640", (384, 640))):
        engine, less = scenario.find(f"sd15-tuned-{size}"), scenario.find(f"sd15-tuned-{size}-ngms")
        assert (engine.width, engine.height) == sides
        assert (engine.sampler, engine.schedule, engine.steps) == ("DPM++ SDE", "Karras", 5)
        assert engine.cfg_scale == 1.15 and engine.work == "same" and less.work == "less work"
        differ = {key for key, value in engine.as_dict().items() if less.as_dict()[key] != value}
        assert differ == {"name", "title", "twin", "ngms", "notes"}
        on_gpu = engine.precision_on(Device("cuda", 0))
        assert (on_gpu.unet, on_gpu.vae) == ("float16", "float32")


def test_dtypes_are_half_on_a_gpu_and_plain_on_the_cpu_unless_named() -> None:
    assert Scenario(name="a").precision_on(CPU) == Precision()
    assert Scenario(name="a").precision_on(Device("mps")).vae == "float16"
    assert Scenario(name="a", precision={"vae": "bf16"}).precision_on(CPU).vae == "bfloat16"


def test_rounds_take_the_seeds_in_turn_and_a_new_size_is_wider() -> None:
    one = Scenario(name="a", seeds=(7, 9), count=2, batch_size=2)
    assert [one.request(round).seed for round in range(3)] == [7, 9, 7]
    assert one.request(0, 64).width == one.width + 64 and one.request(0).seeds() == (7, 8)


def test_a_change_is_in_the_name_and_words_are_not() -> None:
    one = scenario.find("embedded").changed({"steps": "2", "vae": "float16", "seeds": "3,4"})
    assert one.name == "embedded (steps=2, vae=float16, seeds=3,4)"
    assert one.steps == 2 and one.precision == {"vae": "float16"} and one.seeds == (3, 4)
    secret = scenario.find("embedded").changed({"prompt": "a secret", "model": "/home/me/mine.safetensors"})
    assert "secret" not in secret.name and "/home" not in secret.name
    assert secret.name != scenario.find("embedded").changed({"prompt": "another", "model": "x"}).name
    assert scenario.find("embedded").changed({}) is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stebs": "2"}, "nearest: 'steps'"),
        ({"steps": "many"}, "steps cannot be 'many'"),
        ({"steps": "0"}, "steps 0 is out of range"),
        ({"name": "x"}, "no 'name'"),
        ({"what": "all"}, "what 'all' is not known"),
        ({"vae": "float8"}, "dtype 'float8'"),
        ({"seeds": "-1"}, "seeds must be"),
    ],
)
def test_a_change_that_cannot_be_is_said(changes: dict[str, str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        scenario.find("embedded").changed(changes)


def test_a_file_of_ones_own_is_read_and_a_wrong_one_explained(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"name": "mine", "steps": 3}')
    assert scenario.find(str(mine)).steps == 3
    for text, words in (
        ("[]", "one JSON object"),
        ('{"steps": 3}', "has no name"),
        ('{"name": "a", "steps": "3"}', "steps cannot be '3'"),
        ('{"name": "a", "steps": true}', "steps cannot be True"),
        ('{"name": "a", "prescision": {}}', "nearest: 'precision'"),
        ('{"name": "a", "precision": {"unets": "float16"}}', "precision of 'unets'"),
        ('{"name": "a", "seeds": []}', "no seeds"),
        ("{", "cannot be read"),
    ):
        mine.write_text(text)
        with pytest.raises(RequestError, match=words):
            scenario.find(str(mine))
    with pytest.raises(RequestError, match="nearest: 'embedded'"):
        scenario.find("embeded")


def test_every_gives_those_named_or_all() -> None:
    assert [one.name for one in scenario.every(["ops", "embedded"])] == ["ops", "embedded"]
    assert [one.name for one in scenario.every()] == scenario.names()


def test_networks_alone_are_called_several_times_a_round() -> None:
    assert scenario.find("unet-sdxl").calls == scenario.find("vae-1024").calls == 10
    assert scenario.find("sdxl-30").calls == 1
    for wrong in ({"calls": 0, "what": "unet"}, {"calls": 2}, {"calls": 2, "what": "ops"}):
        with pytest.raises(RequestError, match="calls a round"):
            scenario.from_dict({"name": "a", **wrong}, "here")
