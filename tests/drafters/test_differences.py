"""No two drafters are one machine under two names: for each pair there is an input on which they propose differently.

To add a drafter: its spec in `DRAFTERS`, and an input on which it differs from its nearest relatives in `INPUTS`, with
what each of them proposes there and the reason, which is a difference between the papers' mechanisms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import pytest

from parlay.drafters.resources import Resources
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import Drafter, NoiseKey, Request, SamplingParams, Tree
from tests.drafters.sight import no_runner

BUDGET = 3


def made(spec: str) -> Drafter:
    drafter = build(parse(spec), Resources(100, no_runner))
    assert drafter is not None
    return drafter


DRAFTERS: dict[str, str] = {
    "prompt-lookup": "prompt-lookup",
    "lookup-decoding": "lookup-decoding",
    "reference-copy": "reference-copy",
    "reference-copy, resync": "reference-copy:resync=true",
    "aggressive": "aggressive",
    "adaptive-ngram": "adaptive-ngram",
}
"""Drafters that need no model: name in the tables below -> spec."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Input:
    """A text, and what some drafters propose after it: the tokens of a chain, none for no draft."""

    reason: str
    prompt: Ids
    output: Ids = ()
    references: tuple[Ids, ...] = ()
    proposals: Mapping[str, Ids] = field(default_factory=dict)

    @property
    def request(self) -> Request:
        return Request(id="r", prompt=self.prompt, params=SamplingParams(), key=NoiseKey(0), references=self.references)


@dataclass
class Sight:
    sequence: int
    tokens: Sequence[int]
    request: Request
    prompt_length: int


INPUTS: dict[str, Input] = {
    "most often or last": Input(
        "Counting drafters take the most frequent follower, copying ones that of the latest match.",
        prompt=(1, 2, 8, 1, 2, 9, 1, 3, 7),
        output=(1,),
        proposals={"prompt-lookup": (3, 7, 1), "adaptive-ngram": (2, 9, 1), "lookup-decoding": (2, 9, 1)},
    ),
    "seen once": Input(
        "Lookup decoding wants two sightings of a single token; the others believe the first.",
        prompt=(1, 2, 3, 4, 9),
        output=(1,),
        proposals={"prompt-lookup": (2, 3, 4), "adaptive-ngram": (2, 3, 4), "lookup-decoding": ()},
    ),
    "no references": Input(
        "LLMA copies from references alone; aggressive decoding takes the prompt for its source.",
        prompt=(1, 2, 3, 4, 5),
        output=(1,),
        proposals={
            "prompt-lookup": (2, 3, 4),
            "reference-copy": (),
            "reference-copy, resync": (),
            "aggressive": (2, 3, 4),
        },
    ),
    "first or last document": Input(
        "LLMA takes the first document that matches, prompt lookup the most recent one; counts know of neither.",
        prompt=(50,),
        output=(9, 1, 2),
        references=((8, 1, 2, 3), (7, 1, 2, 4)),
        proposals={"prompt-lookup": (4,), "reference-copy": (3,), "adaptive-ngram": (), "lookup-decoding": ()},
    ),
    "before there is output": Input(
        "Aggressive decoding and predictions begin with the source; what matches needs something to match.",
        prompt=(50,),
        references=((1, 2, 3),),
        proposals={
            "aggressive": (1, 2, 3),
            "reference-copy, resync": (1, 2, 3),
            "reference-copy": (),
            "prompt-lookup": (),
        },
    ),
    "ambiguous": Input(
        "After a change 2 is found three times: aggressive decoding waits, LLMA takes the first, a prediction goes on.",
        prompt=(50,),
        output=(2, 3, 4, 9, 2),
        references=((2, 3, 4, 5, 2, 6, 2, 7),),
        proposals={
            "aggressive": (),
            "reference-copy": (3, 4, 5),
            "reference-copy, resync": (6, 2, 7),
            "prompt-lookup": (3, 4, 9),
        },
    ),
    "the prompt's end": Input(
        "LLMA matches the output, of which there is none; prompt lookup matches the prompt's last tokens too.",
        prompt=(1, 2),
        references=((1, 2, 3),),
        proposals={"prompt-lookup": (3,), "reference-copy": (), "aggressive": (1, 2, 3)},
    ),
}


def propose(name: str, given: Input) -> Tree:
    view = Sight(0, [*given.prompt, *given.output], given.request, len(given.prompt))
    return made(DRAFTERS[name]).propose([view], [BUDGET])[0].tree


@pytest.mark.parametrize("name", INPUTS)
def test_each_proposes_what_its_paper_says(name: str) -> None:
    given = INPUTS[name]
    proposals = {drafter: propose(drafter, given).tokens for drafter in given.proposals}
    assert proposals == given.proposals, given.reason


@pytest.mark.parametrize(("one", "other"), list(combinations(DRAFTERS, 2)))
def test_every_pair_differs_somewhere(one: str, other: str) -> None:
    assert any(propose(one, given) != propose(other, given) for given in INPUTS.values())
