"""Which calls leave negative guidance out."""

from clearway.guidance import below


def test_none_without_a_threshold() -> None:
    assert below(0.0) is None


def test_odd_calls_below_the_threshold() -> None:
    skip = below(1.0)
    assert skip is not None
    assert [skip(call, 0.5) for call in range(4)] == [False, True, False, True]
    assert not skip(1, 1.0)  # at the threshold nothing is skipped


def test_all_steps() -> None:
    skip = below(1.0, all_steps=True)
    assert skip is not None
    assert all(skip(call, 0.99) for call in range(4))
    assert not skip(0, 1.5)
