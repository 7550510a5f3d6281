"""What drafts are expected to be, and to cost."""

from __future__ import annotations

import pytest

from parlay.router.prices import DraftDepth


@pytest.mark.parametrize("flat", [True, False])
def test_one_node_is_one_level_however_flat_larger_drafts_are(flat: bool) -> None:
    depth = DraftDepth()
    for _ in range(100):
        depth.learn(4, 2 if flat else 4)
        depth.learn(1, 1)
    assert (depth.of(0), depth.of(1)) == (0, 1)
    assert depth.of(4) == pytest.approx(2 if flat else 4, rel=0.01)
