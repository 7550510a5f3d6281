"""U7: stops and lengths inside an accepted block, and everything else that a request can ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parlay.testing.conformance.compare import Excuse
from parlay.testing.conformance.stage import Stage, StageRequest, Subject
from parlay.testing.conformance.universal import GREEDY, VARIETY, KitLength, agree, prompt

LENGTH = 24


def asks(stage: Stage) -> Iterator[StageRequest]:
    """Requests that end everywhere in a block of drafted tokens, for every reason there is, greedy and sampled."""
    for params in (GREEDY, VARIETY[0]):
        base = StageRequest(prompt(stage, 7, 20), replace(params, max_tokens=LENGTH, logprobs=2), seed=3)
        text = stage.expected(base).output
        for length in (0, 1, 2, 3, 5):
            yield replace(base, params=replace(base.params, max_tokens=length))
        for at in range(0, 12, 3):
            stop = frozenset({text[at]})
            yield replace(base, stop_ids=stop)
            yield replace(base, stop_ids=stop, params=replace(base.params, min_tokens=at + 2))
            yield replace(base, stop_sequence=tuple(text[at : at + 2]))
            yield replace(base, stop_sequence=tuple(text[at : at + 2]), params=replace(base.params, min_tokens=at + 3))


def endings(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """Tokens, reason and logprobs are the reference's wherever a request ends; the token that completes a stop counts,
    later ones do not exist."""
    shared = subject.strategy(stage, 9)
    return agree(stage, [(ask, shared) for ask in asks(stage)])
