"""Sentences about a placement: every decision with its size, or nothing."""

from dataclasses import replace

import pytest

from clearway.models import _placement_text
from clearway.models._options import STREAMED, VISITING, Fit, Order, Way
from clearway.models.estimate import Parts

GIB = 2**30
PARTS = Parts(GIB, 4 * GIB, GIB // 2, 0, GIB, 2 * GIB, GIB)
ORDER = Order(width=512, height=512, steps=20)
GRAPHS = ("text", "unet", "vae")


def told(way: Way, first: Way, keep_bytes: int = 0) -> tuple[str, ...]:
    fit = Fit(way, {"unet": 3 * GIB}, (False, 0.0), keep_bytes)
    return _placement_text.notes(fit, first, PARTS, 8 * GIB, 6 * GIB, "cuda:0")


def test_what_stays_as_it_was_is_not_mentioned() -> None:
    assert told(Way(graphs=GRAPHS), Way(graphs=GRAPHS)) == ()


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        (Way(text=VISITING), "the text encoders (1.0 GiB) are on it only while at work"),
        (Way(vae=VISITING), "the VAE (0.5 GiB) is on it only while at work"),
        (
            Way(VISITING, VISITING, VISITING),
            "the text encoders (1.0 GiB), the UNet (4.0 GiB) and the VAE (0.5 GiB) "
            "are on it only while at work",
        ),
        (Way(unet=STREAMED), "the UNet (4.0 GiB) comes block by block, 1.5 GiB of it staying"),
        (Way(batch=2), "2 at a time are drawn and not 4"),
        (Way(batch=4, joined=False), "guidance's halves run one after the other"),
    ],
)
def test_each_decision_has_its_sentence(way: Way, sentence: str) -> None:
    first = Way(batch=4)
    way = replace(way, batch=4) if way.batch == 1 else way
    (note,) = told(way, first, 3 * GIB // 2)
    assert note == (
        "all of the model at once needs about 8.0 GiB of cuda:0 and 6.0 GiB is free for it: "
        f"{sentence} (about 3.0 GiB at most)"
    )


def test_lost_graphs_are_named() -> None:
    assert "the UNet and the VAE run without graphs" in told(Way(), Way(graphs=GRAPHS))[0]
    assert "the VAE runs without a graph" in told(Way(graphs=("unet",)), Way(graphs=GRAPHS))[0]


def test_tiles_say_why() -> None:
    assert "as was asked: the picture differs" in _placement_text.tiles_note(GIB, GIB, True)
    assert "whole needs about 2.0 GiB and 1.0 GiB is free" in _placement_text.tiles_note(2 * GIB, GIB, False)


def test_the_refusal_names_the_largest_smaller_size_that_fits() -> None:
    """A search of whose needs we know: 4 kB a pixel."""

    def search(order: Order, room_bytes: int) -> Fit | None:
        return None if order.width * order.height * 4096 > room_bytes else Fit(Way(), {}, (False, 0.0))

    sentence = str(_placement_text.refusal(replace(ORDER, count=2), "cuda:0", 7 * GIB // 10, search))
    assert sentence == (
        "512 x 512 with 2 pictures needs about 1.0 GiB of cuda:0 at the least, with its parts moved in one "
        "by one, and 0.7 GiB is free; 384 x 384 would need 0.6 GiB"
    )
    assert "a smaller model" in str(_placement_text.refusal(ORDER, "cuda:0", 1000, search))
