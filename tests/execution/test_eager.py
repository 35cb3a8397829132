"""Eager execution calls and counts."""

from clearway.execution import Eager


def test_every_call_is_counted_under_its_part() -> None:
    run = Eager(lambda x, *, y: x + y, "unet")
    assert [run(1, y=2), run(3, y=4)] == [3, 7]
    assert run.routes == {"unet/eager": 2}
