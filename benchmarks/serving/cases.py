"""Draws the requests of the soak test from a seed.

Prompts and sampling parameters are few, so that few plain texts are needed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from benchmarks.strategies.__main__ import everything
from parlay import SamplingParams
from parlay.cli.race_prompts import CALL, COPY, EDIT, PROSE
from parlay.llm.request_options import RequestOptions

Kind = Literal["complete", "cancelled", "malformed", "failing"]
Leave = Literal["close", "cancel", "forget", "timeout"]
K = TypeVar("K", bound=str)

FAILING = "benchmarks.serving.failing:Failing"
SHARES: dict[Kind, float] = {"cancelled": 0.10, "malformed": 0.05, "failing": 0.01}
INEXACT = ("draft-model:rule=rejection", "prompt-lookup:rule=typical")
"""Strategies tested in addition to the catalogue: a rule that keeps only the distribution, and one without
guarantee."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request. ``leave`` says how its client leaves, after ``patience`` events or, with a timeout, hundredths of
    a second."""

    kind: Kind
    prompt: str
    params: SamplingParams
    options: RequestOptions
    whole: bool = False
    leave: Leave | None = None
    patience: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """Return the fields on which its plain text depends."""
        return self.prompt, repr(self.params)


def prompts(count: int) -> list[str]:
    """Return ``count`` texts of up to some hundred tokens: parts of a few texts, and several of them together."""
    texts = [work.text for work in (PROSE, EDIT, CALL, COPY)]
    short = [text[: 40 * length] for length in (1, 2, 4, 8) for text in texts]
    long = ["\n\n".join(texts[: number % 4 + 1]) * (number % 3 + 1) for number in range(8)]
    return [text for pair in itertools.zip_longest(short, long) for text in pair if text is not None][:count]


SAMPLING = (
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.8, seed=1, max_tokens=32),
    SamplingParams(temperature=1, seed=2, max_tokens=12, n=2, logprobs=2),
    SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=48, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=32, top_k=20, frequency_penalty=0.5, stop=["\n\n", "the"]),
    SamplingParams(temperature=0, max_tokens=64, min_tokens=8, logit_bias={10: 2.0}),
    SamplingParams(temperature=1.2, seed=5, max_tokens=16, min_p=0.05, presence_penalty=0.4),
)


def cases(count: int, seed: int, texts: Sequence[str], sampling: Sequence[SamplingParams]) -> list[Case]:
    """Return ``count`` requests. The strategies take turns, so each gets its share."""
    chance = random.Random(seed)
    kinds = drawn_kinds(count, chance, SHARES)
    turn = itertools.cycle([*everything(), *INEXACT])
    return [_case(kind, next(turn), chance.choice(texts), chance.choice(sampling), chance) for kind in kinds]


def drawn_kinds(count: int, chance: random.Random, shares: Mapping[K, float]) -> list[K | Literal["complete"]]:
    """Return a kind for each request, in random order. Every kind is as frequent as its share says."""
    kinds: list[K | Literal["complete"]] = [
        kind for kind, share in shares.items() for _ in range(max(1, round(share * count)))
    ]
    kinds += ["complete"] * (count - len(kinds))
    chance.shuffle(kinds)
    return kinds


def _case(kind: Kind, strategy: str, prompt: str, params: SamplingParams, chance: random.Random) -> Case:
    options = RequestOptions(
        strategy=f"{FAILING}:policy=fixed,after={chance.randrange(4)}" if kind == "failing" else strategy,
        documents=(prompt,) if chance.random() < 0.3 else (),
        salt=chance.choice(("", "one", "two")),
        priority=chance.choice((0, 0, 0, 1)),
    )
    if kind != "cancelled":
        return Case(kind, prompt, params, options, whole=chance.random() < 0.3)
    leave: Leave = chance.choice(("close", "cancel", "forget", "timeout"))
    return Case(kind, prompt, params, options, leave=leave, patience=chance.randrange(1, 6))
