"""Kangaroo's chain is what the trained adapter says of the target's early states, and it ends where that is unsure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from parlay.drafters.heads.kangaroo import Kangaroo
from parlay.drafters.options import KANGAROO, KangarooOptions
from parlay.drafters.resources import Resources
from parlay.heads.kangaroo import KangarooAdapter
from parlay.heads.layer import Steps
from parlay.testing.random_heads import random_heads
from parlay.testing.toys import RandomLogits, ToyRunner, text_hash
from parlay.types import NO_DRAFT, WHOLE_FORM, Draft, DraftForm, Layers, Observation, SequenceView, Verdict
from tests.drafters.sight import Sight, no_runner

VOCAB = 24
TARGET = ToyRunner(RandomLogits(VOCAB), VOCAB).spec
TOKENS = [3, 1, 4, 1, 5]


def state(text: Sequence[int]) -> Tensor:
    """What enters the exit layer at the last token."""
    return torch.randn(TARGET.hidden_size, generator=torch.Generator().manual_seed(text_hash(text, 1)))


class EarlyLayers:
    """A target of which only the first layers run."""

    def forward(
        self,
        views: Sequence[SequenceView],
        paths: Sequence[Sequence[int]],
        form: DraftForm = WHOLE_FORM,
        rows: int = 1,
        inputs_KH: Tensor | None = None,
    ) -> Tensor:
        raise AssertionError("the last layers are not wanted")

    def early(self, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], layer: int, rows: int = 1) -> Tensor:
        assert (layer, rows) == (1, 1)
        return torch.stack([state([*view.tokens, *path]) for view, path in zip(views, paths, strict=True)])

    def states(
        self, views: Sequence[SequenceView], starts: Sequence[int], taps: Sequence[int]
    ) -> list[Mapping[int, Tensor]]:
        raise AssertionError("all states were shown")


@dataclass
class LayeredSight(Sight):
    layers: Layers | None = None  # type: ignore[assignment]


def draft(options: KangarooOptions, budget: int = 8) -> Draft:
    """After two steps, so that some rows are in the adapter's cache and some run now."""
    drafter = Kangaroo(Resources(VOCAB, no_runner, target=TARGET, find_head=random_heads(TARGET)), options)
    for end in (2, 4):
        view = LayeredSight(tokens=TOKENS[: end + 1], layers=EarlyLayers())
        seen = torch.stack([state(TOKENS[: place + 1]) for place in range(end)])
        drafter.observe([Observation(view, NO_DRAFT, Verdict((), ()), {1: seen})])
        (found,) = drafter.propose([view], [budget])
    return found


def expected(length: int) -> list[tuple[int, float]]:
    """The chain by the trained module, which reads the states of all tokens at once."""
    held = random_heads(TARGET)(KANGAROO, "")
    assert held is not None
    assert isinstance(held.embedding, Tensor)
    adapter = KangarooAdapter(held.artefact.layer, len(held.artefact.tensors["d2t"]))
    adapter.load_state_dict(dict(held.artefact.tensors))
    text, chain = list(TOKENS), []
    for _ in range(length):
        states_TH = torch.stack([state(text[: place + 1]) for place in range(len(text))])
        with torch.no_grad():
            read_H = adapter(states_TH[None], Steps(rows=1))[0, -1]
        probs_D = (held.embedding[adapter.draft_ids] @ read_H).softmax(-1)
        text.append(int(adapter.draft_ids[probs_D.argmax()]))
        chain.append((text[-1], float(probs_D.max())))
    return chain


def test_the_chain_is_the_trained_adapters() -> None:
    found, wanted = draft(KangarooOptions(threshold=0)), expected(6)
    assert found.tree.tokens == tuple(token for token, _ in wanted)
    assert found.scores == pytest.approx([probability for _, probability in wanted], abs=1e-4)


def test_it_ends_after_the_first_token_below_the_threshold() -> None:
    chances = [probability for _, probability in expected(6)]
    threshold = sorted(chances)[1] + 1e-3
    first = next(place for place, chance in enumerate(chances) if chance < threshold)
    assert len(draft(KangarooOptions(threshold=threshold))) == first + 1
    assert len(draft(KangarooOptions(threshold=0), budget=2)) == 2
