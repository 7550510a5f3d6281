"""Writes continuations with a draft model, token by token, for many sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from parlay.drafters.draft_models.draft_sequences import DraftSequence, DraftSequences
from parlay.types import Request, Runner, SequenceView


@dataclass(slots=True)
class DraftView:
    """A target's sequence as its draft model reads it: in the model's own ids, or with guessed tokens at the end."""

    origin: SequenceView
    tokens: list[int]
    layers: None = None

    @property
    def sequence(self) -> int:
        return self.origin.sequence

    @property
    def request(self) -> Request:
        return self.origin.request

    @property
    def prompt_length(self) -> int:
        return self.origin.prompt_length


@dataclass(slots=True, eq=False)
class Chain:
    """One continuation, in the draft model's ids, with the probability of each token."""

    view: DraftView
    sequence: DraftSequence
    budget: int
    ids: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    path_prob: float = 1.0


Choose = Callable[[Tensor, Sequence[Chain]], list[tuple[int, float] | None]]
"""For each row of logits and its chain, chooses the next id and its probability; None ends the chain."""


class ChainWriter:
    """Continues sequences with a draft model, in its own ids. Ends paths that are less likely than ``min_p``."""

    def __init__(self, runner: Runner, min_p: float) -> None:
        self._runner = runner
        self._min_p = min_p
        self._sequences = DraftSequences(runner)

    def write(self, views: Sequence[DraftView], budgets: Sequence[int], choose: Choose) -> list[Chain | None]:
        """Write one chain for each sequence. None if the draft model has no room, or no tokens to read."""
        readable = [budget if view.tokens else 0 for view, budget in zip(views, budgets, strict=True)]
        jobs = self._sequences.jobs(views, readable)
        chains = {place: Chain(views[place], job.sequence, job.budget) for place, job in jobs.items()}
        self._run(list(chains.values()), choose)
        return [chains.get(place) for place in range(len(views))]

    def _run(self, chains: Sequence[Chain], choose: Choose) -> None:
        """Write all chains together, token by token. Their ids join the draft model's cache as if committed."""
        while chains:
            out = self._runner.forward([chain.sequence.segment() for chain in chains])
            choices = choose(out.logits_RV, chains)
            growing = []
            for chain, choice in zip(chains, choices, strict=True):
                self._sequences.keep(chain.sequence)
                if choice is not None and self._grow(chain, *choice):
                    growing.append(chain)
            chains = growing

    def _grow(self, chain: Chain, token: int, probability: float) -> bool:
        """Append the token, if the path is likely enough. Returns whether the chain goes on."""
        chain.path_prob *= probability
        if not chain.path_prob >= self._min_p:  # written so that NaN ends the chain
            return False
        chain.ids.append(token)
        chain.probabilities.append(probability)
        chain.sequence.pending = (token,)
        return len(chain.ids) < chain.budget

    def release(self, sequence: int) -> None:
        self._sequences.release(sequence)
