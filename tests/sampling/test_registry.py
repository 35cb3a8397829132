"""Names: every way of naming a sampler and a schedule, and what is said about the wrong ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearway.errors import RequestError
from clearway.sampling import Sampler, check_options, resolve, samplers, schedules
from clearway.sampling.registry import checked_options

DOCS = Path(__file__).parent.parent.parent / "docs" / "samplers.md"
SAMPLER_NAMES = [(name, one.label) for one in samplers() for name in (one.label, *one.aliases)]
SCHEDULE_NAMES = [(name, one.label) for one in schedules() for name in (one.label, *one.aliases)]


def cased(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from([text, text.lower(), text.upper(), text.title(), f"  {text} "])


@given(name=st.sampled_from(SAMPLER_NAMES), schedule=st.sampled_from(SCHEDULE_NAMES), data=st.data())
def test_any_name_in_any_case_with_the_schedule_behind_it_or_beside_it(name, schedule, data) -> None:
    written, label = data.draw(cased(name[0])), name[1]
    beside = resolve(written, data.draw(cased(schedule[0])))
    behind = resolve(f"{written.strip()} {schedule[0]}", data.draw(st.sampled_from([None, "Automatic"])))
    assert beside == behind
    assert beside[0].label == label
    assert beside[1] == (
        schedule[1] if schedule[1] != "Automatic" else beside[0].default_schedule or "Automatic"
    )
    assert resolve(*beside) == beside


@pytest.mark.parametrize(
    ("name", "schedule", "expected"),
    [
        ("DPM++ 2M Karras", None, ("DPM++ 2M", "Karras")),
        ("DPM++ 2M Karras", "automatic", ("DPM++ 2M", "Karras")),
        ("Euler Karras", "Automatic", ("Euler", "Karras")),  # A1111 loses Karras here
        ("Euler Karras", "karras", ("Euler", "Karras")),
        ("DPM++ 2M", None, ("DPM++ 2M", "Karras")),
        ("DPM++ SDE", "Exponential", ("DPM++ SDE", "Exponential")),
        ("k_euler_ancestral", None, ("Euler a", "Automatic")),
        ("k_euler_a", "uniform", ("Euler a", "Uniform")),
        ("DDIM", None, ("DDIM", "Automatic")),
        ("DDIM", "DDIM", ("DDIM", "DDIM")),
        ("Euler DDIM", None, ("Euler", "DDIM")),
        ("euler a", None, ("Euler a", "Automatic")),
    ],
)
def test_known_pairs(name: str, schedule: str | None, expected: tuple[str, str]) -> None:
    sampler, label = resolve(name, schedule)
    assert (sampler.label, label) == expected


def test_a_wrong_sampler_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(RequestError) as caught:
        resolve("DPM++ 4M", None)
    wanted = "sampler 'DPM++ 4M' is not known; nearest: 'DPM++ 2M', 'DPM++ SDE' (all: clearway samplers)"
    assert str(caught.value) == wanted


def test_a_wrong_schedule_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"schedule 'Karas' is not known; nearest: 'Karras'"):
        resolve("Euler", "Karas")


@pytest.mark.parametrize(
    "name", ["", "Karras", "DPM++ 4M Karras", "Euler Beta", "Euler aKarras", "Automatic"]
)
def test_what_is_no_sampler_is_never_replaced(name: str) -> None:
    with pytest.raises(RequestError, match="is not known; nearest"):
        resolve(name, None)


def test_two_different_schedules_are_an_error() -> None:
    with pytest.raises(
        RequestError, match="names schedule 'Karras' and 'Exponential' was asked for; give one"
    ):
        resolve("Euler Karras", "Exponential")


def test_names_are_unique_and_facts_are_complete() -> None:
    for names in (SAMPLER_NAMES, SCHEDULE_NAMES):
        owners: dict[str, str] = {}
        for name, label in names:
            assert owners.setdefault(name.lower(), label) == label
    known = {one.label for one in schedules()}
    for one in samplers():
        assert one.source and one.noise in ("none", "ancestral", "brownian") and one.order >= 1
        assert {one.default_schedule, one.own_schedule} - {None} <= known
        assert all(re.fullmatch(r"[a-z_]+", option) for option in one.options)
    assert all(one.source for one in schedules())


def test_the_facts_of_a1111() -> None:
    facts = {one.label: one for one in samplers()}
    assert {label for label, one in facts.items() if one.second_order} == {"Heun", "DPM++ SDE"}
    assert {label for label, one in facts.items() if one.default_schedule} == {"DPM++ 2M", "DPM++ SDE"}
    assert facts["DPM++ SDE"].noise == "brownian" and facts["Euler a"].noise == "ancestral"
    assert isinstance(facts["DDIM"], Sampler) and facts["DDIM"].own_schedule == "Timesteps"


def test_options_are_checked_and_none_is_silence() -> None:
    assert checked_options("it", ("eta", "s_tmax"), {"eta": 1, "s_tmax": float("inf"), "rho": None}) == {
        "eta": 1.0,
        "s_tmax": float("inf"),
    }
    with pytest.raises(RequestError, match=r"it takes no rho; it takes eta, s_tmax"):
        checked_options("it", ("eta", "s_tmax"), {"rho": 7.0})
    for wrong in (-1.0, float("nan"), float("inf"), "1", True):
        with pytest.raises(RequestError, match="eta"):
            checked_options("it", ("eta",), {"eta": wrong})


def test_every_label_alias_and_option_is_in_the_docs() -> None:
    rows = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| label"):
            rows.setdefault(line.split("|")[1].strip(), []).append(line)
    for one in (*samplers(), *schedules()):
        assert any(
            all(f"`{name}`" in row for name in (*one.aliases, *one.options))
            for row in rows.get(one.label, [])
        ), one.label
    for one in samplers():
        row = "".join(rows[one.label])
        assert f"| {one.order} |" in row and f"| {one.noise} |" in row
        assert f"| {one.default_schedule or one.own_schedule or 'Automatic'} |" in row


def test_importing_the_room_is_light() -> None:
    code = "import sys, clearway.sampling; print(sorted({'torch', 'torchsde', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_options_are_checked_against_sampler_and_schedule() -> None:
    euler_a, label = resolve("Euler a", "Karras")
    check_options(euler_a, label, {"eta": 0.5, "rho": 5.0})
    with pytest.raises(RequestError, match="takes no s_churn"):
        check_options(euler_a, label, {"s_churn": 1.0})
    with pytest.raises(RequestError, match="schedule 'Exponential' takes no rho"):
        check_options(euler_a, "Exponential", {"rho": 5.0})
    ddim, automatic = resolve("DDIM")
    with pytest.raises(RequestError, match="schedule 'Timesteps' takes no sigma_max"):
        check_options(ddim, automatic, {"sigma_max": 5.0})
