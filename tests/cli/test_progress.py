"""The bar and Ctrl-C."""

import signal
import sys
import threading

import pytest
import torch

from clearway import Cancelled, StepDone
from clearway.cli.progress import Progress, stoppable


def step(number: int) -> StepDone:
    return StepDone(number, 3, 1.0, torch.zeros(1))


def test_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress(step(1))
    assert capsys.readouterr().err == ""


def test_a_bar_with_speed_and_time_left_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress() as progress:
        for number in (1, 2, 3):
            progress(step(number))
    assert "3/3" in capsys.readouterr().err


def test_the_first_ctrl_c_waits_for_a_step_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stoppable() as listen:
        listen.begin()
        listen(step(1))
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Cancelled, match="stopped after step 2 of 3"):
            listen(step(2))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_before_drawing_ctrl_c_stops_at_once_and_is_not_lost() -> None:
    with stoppable() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        # even where something swallowed that exception (a finaliser does), drawing does not begin
        with pytest.raises(Cancelled):
            stop.begin()


def test_outside_the_main_thread_it_does_nothing() -> None:
    done: list[bool] = []

    def work() -> None:
        with stoppable() as listen:
            listen(step(1))
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
