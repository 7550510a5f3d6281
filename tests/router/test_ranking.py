"""The best nodes of a batch: as many as asked for, none better left out, and never without the nodes above them."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from hypothesis import given
from hypothesis import strategies as st

from parlay.router.ranking import Candidates, best, best_of

CHANCES = st.sampled_from((0.25, 0.5, 1.0))  # few values, so that there are equals


@st.composite
def chains(draw: st.DrawFn) -> Candidates:
    reaches = list(accumulate(draw(st.lists(CHANCES, max_size=6)), mul))
    return range(len(reaches)), reaches


@given(st.lists(chains(), max_size=4), st.data())
def test_the_best_of_all_drafts_are_kept_first_ones_of_equals(drafts: list[Candidates], data: st.DataObject) -> None:
    ranked = sorted([reach for _, reaches in drafts for reach in reaches], reverse=True)
    count = data.draw(st.integers(0, len(ranked)))
    slowly = sorted(
        (-reach, place, node) for place, draft in enumerate(drafts) for node, reach in zip(*draft, strict=True)
    )
    kept = best(drafts, ranked, count)
    assert {(place, node) for place, nodes in enumerate(kept) for node in nodes} == {
        (place, node) for _, place, node in slowly[:count]
    }
    assert all(list(nodes) == list(range(len(nodes))) for nodes in kept), "a node is kept without those above it"


def test_the_best_of_one_draft() -> None:
    assert list(best_of(([0, 2, 3], [0.5, 0.2, 0.4]), 2)) == [0, 3]
    assert list(best_of(([0], [0.5]), 2)) == [0]
