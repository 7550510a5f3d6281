"""Chains that a draft model draws from its own distribution, for rules that compare it with the target's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.drafters.draft_models.draft_sequences import DraftJob, DraftSequences
from parlay.sampling import noise
from parlay.sampling.distributions import distribution, pick
from parlay.sampling.noise import Purpose
from parlay.types import NO_DRAFT, Draft, ParlayError, Runner, SequenceView, trees


class DrawnChains:
    """Drafts one chain per sequence, drawn token by token from the draft model's distribution after processors.

    The token that takes the path's probability below ``min_p`` is the last one; it stays, because it was drawn. Several
    drawers for one sequence use different ``lane`` numbers, so that their draws are independent.
    """

    def __init__(self, runner: Runner, sequences: DraftSequences, source: str, min_p: float, lane: int = 0) -> None:
        self._runner = runner
        self._sequences = sequences
        self._source = source
        self._min_p = min_p
        self._lane = lane

    def write(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """Draw chains. Their tokens join the draft model's cache as if they were committed."""
        plans = [_Chain(job, self._lane) for job in jobs]
        active = plans
        while active:
            out = self._runner.forward([plan.job.sequence.segment() for plan in active])
            for plan, logits_V in zip(active, out.logits_RV, strict=True):
                self._sequences.keep(plan.job.sequence)
                plan.job.sequence.pending = plan.draw(logits_V)
            active = [plan for plan in active if plan.goes_on(self._min_p)]
        return [plan.draft(self._source) for plan in plans]


class _Chain:
    def __init__(self, job: DraftJob, lane: int) -> None:
        self.job = job
        self._lane = lane
        self._tokens: list[int] = []
        self._distributions: list[Tensor] = []
        self._scores: list[float] = []
        self._path_prob = 1.0

    def draw(self, logits_V: Tensor) -> tuple[int, ...]:
        """Draw one more token; empty if the logits are unusable."""
        probs_V = drawable(logits_V, self.job.view, self._tokens)
        if probs_V is None:
            return ()
        token = draw_token(probs_V, self.job.view, len(self._tokens), self._lane)
        self._tokens.append(token)
        self._distributions.append(probs_V)
        self._scores.append(float(probs_V[token]))
        self._path_prob *= self._scores[-1]
        return (token,)

    def goes_on(self, min_p: float) -> bool:
        return bool(self.job.sequence.pending) and len(self._tokens) < self.job.budget and self._path_prob >= min_p

    def draft(self, source: str) -> Draft:
        if not self._tokens:
            return NO_DRAFT
        return Draft(
            trees.chain_tree(self._tokens),
            kind="iid",
            sources=(source,) * len(self._tokens),
            scores=tuple(self._scores),
            probs=torch.stack(self._distributions),
        )


def drawable(logits_V: Tensor, view: SequenceView, path: Sequence[int]) -> Tensor | None:
    """The distribution that the request samples from after that path; None if the logits are unusable."""
    try:
        return distribution(logits_V, view, path)
    except ParlayError:
        return None


def stream(view: SequenceView, depth: int, number: int) -> int:
    """The random stream of a draw, unique to this step, ``depth`` tokens below its root."""
    step = len(view.tokens)
    return noise.stream(view.request.key, step + depth, Purpose.DRAFT, step, number)


def draw_token(probs_V: Tensor, view: SequenceView, depth: int, number: int) -> int:
    return pick(probs_V.cpu().numpy(), noise.uniform_of(stream(view, depth, number)))
