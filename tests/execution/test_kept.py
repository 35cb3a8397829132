"""What is kept is what would be computed anew: by identity and version, in a frame by content."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from clearway.execution.kept import Frame, Kept, within
from clearway.ops import ahead


class Doubling:
    """compute() for a source and a weight, counting."""

    def __init__(self, source: torch.Tensor, weight: torch.Tensor) -> None:
        self.source, self.weight, self.calls = source, weight, 0

    def __call__(self) -> tuple[torch.Tensor]:
        self.calls += 1
        return (self.source * self.weight,)


def test_the_same_source_is_computed_once_and_a_change_in_place_again() -> None:
    kept, source, weight = Kept(), torch.ones(3), torch.full((3,), 2.0)
    made = Doubling(source, weight)
    for _ in range(2):
        assert torch.equal(kept.get(source, [weight], made)[0], torch.full((3,), 2.0))
    assert made.calls == 1
    source[:2].add_(1)  # through a view
    assert torch.equal(kept.get(source, [weight], made)[0], torch.tensor([4.0, 4.0, 2.0]))
    weight.mul_(2)
    assert torch.equal(kept.get(source, [weight], made)[0], torch.tensor([8.0, 8.0, 4.0]))
    assert (made.calls, len(kept)) == (3, 1)


def test_another_source_or_weight_is_another_value() -> None:
    kept, weight = Kept(), nn.Parameter(torch.ones(2), requires_grad=False)
    one, other = torch.zeros(2), torch.ones(2)
    assert kept.get(one, [weight], Doubling(one, weight))[0].sum() == 0
    assert kept.get(other, [weight], Doubling(other, weight))[0].sum() == 2
    weight.data = torch.full((2,), 3.0)  # as Module.to does
    assert kept.get(other, [weight], Doubling(other, weight))[0].sum() == 6


def test_values_go_with_their_source_and_never_grow_beyond_the_limit() -> None:
    kept, weight = Kept(limit=2), torch.ones(1)
    sources = [torch.full((1,), float(value)) for value in range(5)]
    for source in sources:
        kept.get(source, [weight], Doubling(source.clone(), weight))
    assert len(kept) == 2
    del source, sources
    gc.collect()
    assert len(kept) == 0


def test_without_versions_it_needs_a_promise() -> None:
    kept, weight = Kept(), torch.ones(1)
    with torch.inference_mode():
        source = torch.ones(1)
        made = Doubling(source, weight)
        kept.get(source, [weight], made)
        kept.get(source, [weight], made)
        assert made.calls == 2
        kept.get(source, [weight], made, promised=True)
        kept.get(source, [weight], made, promised=True)
        assert made.calls == 3


def test_autocast_keeps_nothing_and_copies_start_empty() -> None:
    kept, source, weight = Kept(), torch.ones(1), torch.ones(1)
    made = Doubling(source, weight)
    with torch.autocast("cpu"):
        kept.get(source, [weight], made)
    assert len(kept) == 0
    kept.get(source, [weight], made)
    assert [len(copied) for copied in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept)))] == [0, 0]
    kept.forget()
    assert len(kept) == 0


def test_a_frame_holds_buffers_that_refresh_fills_again() -> None:
    kept, source, weight = Kept(), torch.ones(2), torch.ones(2)
    frame, made = Frame((source,)), Doubling(source, weight)
    with within(frame):
        (first,) = kept.get(source, [weight], made)
        (again,) = kept.get(source, [weight], made)
        assert first is again
        inside = source * 5  # made in the graph: so is what reads it
        assert kept.get(inside, [weight], Doubling(inside, weight))[0].sum() == 10
    source.fill_(7)
    assert frame.refresh() == 0
    assert frame.refresh([source]) == 1
    assert first.sum() == 14
    weight.fill_(2)
    assert frame.refresh() == 1
    assert (first.sum(), len(kept)) == (28, 0)
    weight.data += 1  # raises no version
    assert frame.refresh() == 0
    kept.forget()
    assert (frame.refresh(), frame.refresh(), first.sum()) == (1, 0, 42)


def test_every_way_in_which_a_weight_changes_is_seen_once_all_is_settled() -> None:
    """Of two values the one whose weight is another is made anew, and nothing where nothing is."""
    kepts, source, unread = (Kept(), Kept()), torch.ones(2), torch.ones(2)
    weights = [nn.Parameter(torch.ones(2), requires_grad=False) for _ in kepts]
    frame = Frame((source, unread))
    made = [Doubling(source, weight) for weight in weights]

    def enter() -> None:
        with within(frame):
            for kept, weight, one in zip(kepts, weights, made, strict=True):
                kept.get(source, [weight], one)

    enter()
    assert (frame.refresh(), frame.refresh([unread])) == (0, 0)
    with torch.inference_mode():
        other = torch.full((2,), 3.0)

    changes = (
        lambda: weights[1].add_(1),
        lambda: setattr(weights[1], "data", torch.full((2,), 5.0)),
        lambda: setattr(weights[1], "data", weights[1].data.to(torch.float64)),
        lambda: kepts[1].forget(),
        lambda: setattr(weights[1], "data", other),  # which has no version of its own
    )
    for change in changes:
        before = [one.calls for one in made]
        change()
        assert (frame.refresh([unread]), frame.refresh([unread])) == (1, 0)
        assert [one.calls for one in made] == [before[0], before[1] + 1]
    assert frame.refresh([source]) == 2
    third = Kept()
    with within(frame):
        (last,) = third.get(source, [weights[0]], Doubling(source, weights[0]))
    source.fill_(9)
    assert (frame.refresh([source]), last.sum()) == (3, 18)


def test_what_is_made_of_weights_alone_is_held_beside_what_is_made_of_an_input() -> None:
    kept, context_kept, weight = Kept(), Kept(), torch.full((2,), 3.0)
    made, context = Doubling(torch.ones(2), weight), torch.ones(2)
    for _ in range(2):  # outside of a frame nothing is kept
        assert torch.equal(kept.of_weights([weight], made)[0], weight)
    assert made.calls == 2 and len(kept) == 0
    frame = Frame((context,))
    with within(frame):
        kept.of_weights([weight], made)  # nothing is held of an input yet: made in the graph
        assert not frame.held and frame.holds()
        context_kept.get(context, [], lambda: (context * 2,))
        (first,) = kept.of_weights([weight], made)
        assert kept.of_weights([weight], made)[0] is first and made.calls == 4
    assert not frame.holds()
    assert frame.refresh() == 0 and frame.holds()
    weight.mul_(2)
    assert not frame.holds()
    assert frame.refresh() == 1 and torch.equal(first, torch.full((2,), 6.0))
    weight.data += 1  # which no version counts
    assert frame.holds() and frame.refresh() == 0
    assert frame.refresh([context]) == 2 and torch.equal(first, torch.full((2,), 7.0))
    weight.data += 1
    context_kept.forget()  # as where an adapter was merged
    assert not frame.holds()
    assert frame.refresh() == 2 and torch.equal(first, torch.full((2,), 8.0))


def test_a_run_that_only_builds_kernels_writes_into_no_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, context_kept, weight = Kept(), Kept(), torch.full((2,), 3.0)
    frames = [Frame((torch.ones(2),)) for _ in range(2)]
    for frame in frames:
        with within(frame):
            context_kept.get(frame.sources[0], [], lambda one=frame.sources[0]: (one * 2,))
    with within(frames[0]):
        (held,) = kept.of_weights([weight], Doubling(torch.ones(2), weight))
    monkeypatch.setattr(ahead, "gathering", object)
    with within(frames[1]):
        (built,) = kept.of_weights([weight], lambda: (torch.full((2,), float("nan")),))
    assert built is not held and torch.equal(held, torch.full((2,), 3.0))


def test_graphs_of_several_sizes_share_what_is_made_of_a_weight() -> None:
    kept, context_kept, weight = Kept(), Kept(), torch.full((2,), 3.0)
    frames, found = [], []
    for _ in range(2):
        frame = Frame((torch.ones(2),))
        with within(frame):
            context_kept.get(frame.sources[0], [], lambda one=frame.sources[0]: (one * 2,))
            found += kept.of_weights([weight], Doubling(torch.ones(2), weight))
        frames.append(frame)
        weight.data += 1  # the second one is made of the weight as it is then
    assert found[0] is found[1] and torch.equal(found[0], torch.full((2,), 4.0))
    assert len(kept._shared) == 1
    del frames, frame, found
    gc.collect()
    assert len(kept._shared) == 0


def test_what_is_made_of_weights_that_nobody_counts_is_made_in_the_graph() -> None:
    kept, context_kept = Kept(), Kept()
    with torch.inference_mode():
        uncounted = torch.ones(2)
    frame, made = Frame((torch.ones(2),)), Doubling(torch.ones(2), uncounted)
    with within(frame):
        context_kept.get(frame.sources[0], [], lambda: (frame.sources[0] * 2,))
        for _ in range(2):
            kept.of_weights([uncounted], made)
    assert made.calls == 2
