"""Constrained texts: masked plain decoding's tokens, and none that the constraint forbids."""

from __future__ import annotations

from dataclasses import replace

from parlay.engine import Limits
from parlay.testing.conformance.compare import Excuse
from parlay.testing.conformance.stage import Stage, StageRequest, Subject
from parlay.testing.conformance.universal import GREEDY, VARIETY, KitLength, agree, prompt
from parlay.testing.toy_constraint import ToyGrammar

LENGTH = 20


def constrained(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """Whatever the budget and the drafts, alone, beside others, forked, and put back for want of memory.

    A committed token that is not allowed is an error of its request, under every rule.
    """
    asks = [
        StageRequest(
            prompt(stage, 31 + index, 8 + 9 * index),
            replace(params, max_tokens=LENGTH),
            seed=index,
            grammar=ToyGrammar(stage.vocab_size, LENGTH - 6 + 4 * index, seed=index),
        )
        for index, params in enumerate((GREEDY, VARIETY[0], VARIETY[2], VARIETY[5]))
    ]
    excuses = agree(stage, [(ask, subject.strategy(stage, 3 * budget)) for budget, ask in enumerate(asks)])
    siblings = [replace(asks[1], sample_index=index, group="siblings") for index in range(2)]
    shared = subject.strategy(stage, 4)
    jobs = [(ask, shared) for ask in (*siblings, *asks[2:])]
    return excuses + agree(stage, jobs, Limits(max_rows=48, max_draft_rows=12), capacity=112)
