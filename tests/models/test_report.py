"""What the report says, before and after something ran."""

from clearway.models._report import Ran, Report


def test_names_are_few_or_counted() -> None:
    report = Report()
    assert str(report).startswith("nothing here")
    for name in ("unet.a", "unet.b", "unet.c", "vae.a"):
        report.place("geglu", name)
        report.leave("it is hooked", name)
    report.place("attention", "unet.a")
    assert str(report).splitlines() == [
        "attention: unet.a",
        "geglu: 3 in unet, 1 in vae",
        "left alone, it is hooked: 3 in unet, 1 in vae",
    ]


def test_what_ran_is_told_as_it_happens() -> None:
    report = Report(ran={"unet": (ran := Ran()), "vae": Ran()})
    assert not report.reasons()
    ran.calls["unet/cuda_graph"] += 3
    ran.calls["unet/eager"] += 1
    ran.reasons["torch.autocast is at work"] += 1
    assert report.reasons() == {"unet": {"torch.autocast is at work": 1}}
    assert str(report).splitlines() == [
        "unet ran 3 times by cuda_graph",
        "unet ran once by eager",
        "unet ran eagerly once: torch.autocast is at work",
    ]
