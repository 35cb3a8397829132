"""Errors and the choices they name."""

from clearway import errors


def test_exit_codes() -> None:
    assert errors.RequestError.exit_code == 2
    assert errors.UnavailableError.exit_code == 3


def test_nearest_names_what_is_like_it() -> None:
    assert errors.nearest("dpm++ 4m", ["Euler", "DPM++ 2M", "Heun"]).startswith("'DPM++ 2M'")


def test_nearest_names_all_where_nothing_is_like_it() -> None:
    assert errors.nearest("zzz", ["Euler", "Heun"]) == "'Euler', 'Heun'"


def test_one_line_takes_the_first() -> None:
    assert errors.one_line(ValueError("first.\nsecond")) == "first"
    assert errors.one_line(ValueError()) == "ValueError"
