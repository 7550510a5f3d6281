"""No two entries of the catalogue are one machine under two names: somewhere their proposals differ.

The mechanisms by which near relatives differ have inputs of their own in `tests/drafters`; this holds for every pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import pytest

from parlay.strategies.catalogue import catalogue
from parlay.testing.conformance import default_stages, subject_of
from parlay.testing.conformance.stage import StageRequest, decode
from parlay.testing.conformance.universal import CAPACITY, prompt
from parlay.types import Draft, Drafter, Needs, Observation, SamplingParams, SequenceView, Strategy, Tree

BUDGET = 7
STAGE = default_stages()["toy"]
ENTRIES = [name for name, entry in catalogue().items() if entry.factory]


class Proposal(NamedTuple):
    """A tree, and whether its probes see a prefix or begin within the model: the target guesses other things then."""

    tree: Tree
    prefixed: bool
    joining: bool

    @classmethod
    def of(cls, draft: Draft) -> Proposal:
        inputs = draft.inputs
        return cls(draft.tree, bool(inputs and inputs.prefix), bool(inputs and inputs.join))


class Witness:
    """Passes everything on to a drafter and remembers what it proposed."""

    def __init__(self, inner: Drafter) -> None:
        self.proposed: list[Proposal] = []
        self._inner = inner

    @property
    def needs(self) -> Needs:
        return self._inner.needs

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        drafts = self._inner.propose(views, budgets)
        self.proposed += [Proposal.of(draft) for draft in drafts]
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        self._inner.observe(observations)

    def release(self, sequence: int) -> None:
        self._inner.release(sequence)


def asks() -> list[StageRequest]:
    """A text that comes again, with and without something to copy from, greedy and sampled."""
    text = prompt(STAGE, 3, 40)
    return [
        StageRequest(text, SamplingParams(temperature=0.0, max_tokens=30)),
        StageRequest(text, SamplingParams(temperature=0.0, max_tokens=30)),
        StageRequest(
            text[:9], SamplingParams(temperature=1.0, max_tokens=30), seed=2, references=(text[4:], text[20:])
        ),
    ]


@cache
def proposals(name: str) -> tuple[Proposal, ...]:
    """What the entry's first toy proposes, request after request."""
    entry = catalogue()[name]
    subject = subject_of(f"{name}:{entry.toys[0]}" if entry.toys[0] else name)
    made = subject.strategy(STAGE, BUDGET)
    (drafter,) = made.drafters
    witness = Witness(drafter)
    runner = STAGE.open_runner(CAPACITY)
    for ask in asks():
        decode(runner, [(ask, Strategy(name, (witness,), made.rule, made.policy))])
    return tuple(witness.proposed)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_drafts_here(name: str) -> None:
    assert any(len(proposal.tree) for proposal in proposals(name))


@pytest.mark.parametrize("name", ENTRIES)
def test_no_other_entry_proposes_the_same(name: str) -> None:
    assert [other for other in ENTRIES if proposals(other) == proposals(name)] == [name]
