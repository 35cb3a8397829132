"""Results of groups joined to one."""

import numpy as np

from clearway import Request, Result
from clearway.result import joined


def group(seed: int, note: str) -> Result:
    return Result(
        images=np.full((1, 8, 16, 3), seed, np.uint8), seeds=(seed,), infotexts=(f"Seed: {seed}",),
        request=Request(), timings_ms={"vae": float(seed)}, routes={"vae/eager": seed}, notes=(note,),
    )  # fmt: skip


def test_pictures_are_laid_end_to_end_and_totals_are_the_last() -> None:
    result = joined([group(1, "a"), group(2, "a")])
    assert result.images[:, 0, 0, 0].tolist() == [1, 2]
    assert result.seeds == (1, 2) and result.infotexts == ("Seed: 1", "Seed: 2")
    assert result.timings_ms == {"vae": 2.0} and result.routes == {"vae/eager": 2}
    assert result.notes == ("a",)
    assert [image.size for image in result.pillow()] == [(16, 8), (16, 8)]


def test_what_a_listener_was_given_is_not_the_joined_ones() -> None:
    for groups in ([group(1, "a")], [group(1, "a"), group(2, "b")]):
        result = joined(groups, told=True)
        result.images[:] = 9
        assert [int(one.images.max()) for one in groups] == [one.seeds[0] for one in groups]
    alone = group(1, "a")
    assert joined([alone]).images is alone.images  # nobody else has it, so it is not copied
