"""Eager execution calls and counts."""

from clearway.execution import Eager


def test_every_call_is_counted_under_its_part() -> None:
    run = Eager(lambda x, *, y: x + y, "unet")
    assert [run(1, y=2), run(3, y=4)] == [3, 7]
    assert run.routes == {"unet/eager": 2}


def test_it_passes_on_what_an_executor_inside_says() -> None:
    class Inner:
        ran = "compiled"

        def __call__(self, x: int) -> int:
            return x

        def sentences(self, name: str) -> list[str]:
            return [f"{name}: it was compiled twice"]

    run = Eager(Inner(), "unet")
    assert run(3) == 3 and run.routes == {"unet/compiled": 1}
    assert run.sentences("the UNet") == ["the UNet: it was compiled twice"]
    assert Eager(lambda x: x, "unet").sentences("the UNet") == []
