"""A sequence with drafted tokens after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parlay.drafters.combined.extended_view import ExtendedView, ExtendedViews
from parlay.types import WHOLE_FORM, DraftForm, NoiseKey, Request, SamplingParams, SequenceView

REQUEST = Request(id="r", prompt=(1, 2), params=SamplingParams(), key=NoiseKey(0))


class Layers:
    def __init__(self) -> None:
        self.calls: list[tuple[list[SequenceView], list[list[int]], int]] = []

    def forward(
        self,
        views: Sequence[SequenceView],
        paths: Sequence[Sequence[int]],
        form: DraftForm = WHOLE_FORM,
        rows: int = 1,
        inputs_KH: Tensor | None = None,
    ) -> Tensor:
        self.calls.append((list(views), [list(path) for path in paths], rows))
        return torch.zeros(len(views) * rows, 4)


@dataclass
class Sight:
    sequence: int = 3
    tokens: list[int] = field(default_factory=lambda: [1, 2, 5])
    request: Request = REQUEST
    prompt_length: int = 2
    layers: Any = None


def test_it_is_the_sequence_and_then_what_was_drafted() -> None:
    view = Sight()
    extended = ExtendedViews().of(view)
    assert list(extended.tokens) == [1, 2, 5]
    extended.extend([7, 8])
    assert list(extended.tokens) == [1, 2, 5, 7, 8]
    assert view.tokens == [1, 2, 5]
    assert (extended.sequence, extended.request, extended.prompt_length) == (3, REQUEST, 2)
    assert extended.layers is None


def test_from_step_to_step_it_is_one_live_list_that_follows_the_sequence() -> None:
    """So a drafter that compares what it holds with the list sees the same list, whatever became of the draft."""
    views = ExtendedViews()
    view = Sight()
    tokens = views.of(view).tokens
    for committed in ([7, 9], [], [4, 4, 4]):
        views.of(view).extend([7, 8, 6])
        view.tokens += committed
        assert views.of(view).tokens is tokens
        assert list(tokens) == view.tokens
    del view.tokens[1:]
    views.of(view)
    assert list(tokens) == [1]
    moved = Sight(tokens=[6, 6])
    assert list(views.of(moved).tokens) == [6, 6]
    views.release(3)
    views.release(99)
    assert views.of(view).tokens is not tokens


def test_the_targets_layers_know_committed_tokens_only() -> None:
    """What was drafted joins the path, also through a view of a view."""
    layers = Layers()
    view = Sight(layers=layers)
    outer = ExtendedView(view)
    outer.extend([7])
    inner = ExtendedView(outer)
    inner.extend([8])
    other = ExtendedView(Sight(4, layers=layers))
    assert outer.layers is not None
    assert inner.layers is not None
    outer.layers.forward([outer, other], [[9], []], WHOLE_FORM, 2)
    inner.layers.forward([inner], [[9]])
    assert layers.calls[0][1:] == ([[7, 9], []], 2)
    assert [one.sequence for one in layers.calls[0][0]] == [3, 4]
    assert layers.calls[1] == ([view], [[7, 8, 9]], 1)
