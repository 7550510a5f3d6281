"""What drafts are expected to be, and to cost."""

from __future__ import annotations

import pytest

from parlay.router.arms import Arm, ArmState
from parlay.router.prices import DraftDepth


@pytest.mark.parametrize("flat", [True, False])
def test_one_node_is_one_level_however_flat_larger_drafts_are(flat: bool) -> None:
    depth = DraftDepth()
    for _ in range(100):
        depth.learn(4, 2 if flat else 4)
        depth.learn(1, 1)
    assert (depth.of(0), depth.of(1)) == (0, 1)
    assert depth.of(4) == pytest.approx(2 if flat else 4, rel=0.01)


def test_what_larger_drafts_take_follows_from_drafts_of_one_size() -> None:
    """A tree of four nodes has one to four levels, and each level takes time. A tree of twelve nodes has few more."""
    arm = ArmState(Arm("head", 16), 0)
    for step in range(200):
        levels = 1 + step % 4
        arm.seconds.learn(levels, 1.0 + 0.25 * levels, 20.0)
        arm.depth.learn(4, levels)
    assert arm.drafting(4) == pytest.approx(1.6, rel=0.1)
    assert arm.drafting(12) == pytest.approx(1.0 + 0.25 * arm.depth.of(12), rel=0.05)
    assert arm.drafting(12) < 2 * arm.drafting(4)
