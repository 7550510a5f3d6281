"""Copies: tokens that followed the same tokens earlier in a text, which a head drafts as often as they come next."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from parlay.drafters.heads.copies import MOST_SAME, Copy, find_copy, raise_copies


@pytest.mark.parametrize(
    ("text", "path", "copy"),
    [
        ([1, 2, 3, 1, 2], (), Copy(3, 2, 1.0)),
        ([1, 2, 3, 1], (2,), Copy(3, 2, 1.0)),  # what is drafted counts as text
        (
            [9, 2, 4, 1, 2, 3, 9, 2, 5, 1, 2],
            (),
            Copy(3, 2, 1.0),
        ),  # the place that agrees in more tokens, not the latest
        ([1, 2, 3, 1, 2, 4, 1, 2], (), Copy(4, 2, 0.5)),  # of equal ones the latest
        ([2, 3, 2, 3, 2, 4, 2], (), Copy(3, 1, 2 / 3)),  # the most frequent one, not the latest
        ([*range(20), *range(12)], (), Copy(12, MOST_SAME, 1.0)),
        # of many followers the latest eight count: 1 followed twice, before these
        ([9, 1, 9, 1, *[token for other in range(20, 28) for token in (9, other)], 9], (), Copy(27, 1, 0.1)),
        ([1, 2, 3, 4], (), None),
        ([1, 2, 3], (4,), None),
        ([1], (), None),
    ],
)
def test_the_copy_followed_where_the_text_agrees_in_the_most_tokens(
    text: Sequence[int], path: Sequence[int], copy: Copy | None
) -> None:
    assert find_copy(text, path) == copy


def test_a_text_of_one_token_is_not_searched_to_its_beginning() -> None:
    """Else each draft behind a long one would take milliseconds."""

    class Counted(list[int]):
        asked = 0

        def __getitem__(self, place: int) -> int:  # type: ignore[override]
            Counted.asked += not isinstance(place, slice)
            return super().__getitem__(place)

    assert find_copy(Counted([7] * 30_000)) == Copy(7, MOST_SAME, 1.0)
    assert Counted.asked < 500


def test_a_copy_gets_its_chance_and_no_logit_is_lowered() -> None:
    logits_RD = torch.tensor([[2.0, 1.0, 0.0, -3.0], [0.0, 0.0, 0.0, 30.0], [2.0, 1.0, 0.0, -math.inf]])
    before_RD, ids_D, text = logits_RD.clone(), torch.tensor([10, 11, 12, 13]), [1, 2, 13, 1, 2, 13, 1, 2]
    raise_copies(logits_RD, ids_D, [text] * 3, [()] * 3)
    copy, chances_D = find_copy(text), before_RD[0].softmax(-1)
    assert copy is not None
    others = 1 - float(chances_D[3])
    expected = copy.log_odds(math.log(chances_D[3] / others), math.log(chances_D[0] / others))
    assert logits_RD[0].softmax(-1)[3] == pytest.approx(1 / (1 + math.exp(-expected)), rel=1e-4)
    assert logits_RD[0].softmax(-1)[3] > 3 * chances_D[3]
    assert torch.equal(logits_RD[0, :3], before_RD[0, :3])
    assert torch.equal(logits_RD[1:], before_RD[1:])  # the head is surer; another tenant's token stays hidden


def test_tokens_that_the_head_cannot_draft_change_nothing() -> None:
    logits_RD = torch.tensor([[2.0, 1.0]])
    raise_copies(logits_RD, torch.tensor([1, 2]), [[1, 2, 13, 1, 2]], [()])
    assert logits_RD.tolist() == [[2.0, 1.0]]
