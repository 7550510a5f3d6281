"""Rules that promise the distribution of the text keep it under a constraint, forced tokens in their drafts or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from parlay.engine import Limits
from parlay.testing.conformance import catalogue_specs, default_stages, subject_of
from parlay.testing.conformance.distribution import UNLIKELY, chi_square, text_distribution
from parlay.testing.conformance.stage import StageRequest, decode
from parlay.testing.toy_constraint import ToyGrammar
from parlay.types import Exactness, SamplingParams

SPECS = [spec for spec in catalogue_specs() if subject_of(spec).rule().exactness is Exactness.DISTRIBUTION]
PROMPT = (1, 0, 2, 1, 0)
LENGTH = 5
DRAWS = 500
PARAMS = SamplingParams(temperature=0.9, max_tokens=LENGTH)
FORCED = {3: (0, 1), 12: (0, 2)}
"""Seeds of grammars, and the places where they leave no choice; they leave one everywhere else."""


def grammar_of(seed: int) -> ToyGrammar:
    return ToyGrammar(vocab_size=5, length=LENGTH + 4, seed=seed, mask=4)


def masked_distribution(grammar: ToyGrammar) -> dict[tuple[int, ...], float]:
    """Every text that the grammar allows, with its probability."""

    def masked(ids: Sequence[int]) -> Tensor:
        logits_V = torch.full((5,), -torch.inf)
        allowed = grammar.following(ids[len(PROMPT) :])
        logits_V[allowed] = default_stages()["toy distribution"].logits_of(ids)[allowed]
        return logits_V

    return dict(text_distribution(masked, PROMPT, PARAMS, LENGTH))


@pytest.mark.parametrize("seed", FORCED)
def test_the_grammars_force_some_tokens_and_leave_some_free(seed: int) -> None:
    grammar = grammar_of(seed)
    for text in masked_distribution(grammar):
        widths = [len(grammar.following(text[:place])) for place in range(LENGTH)]
        assert tuple(place for place, width in enumerate(widths) if width == 1) == FORCED[seed]


CASES = [(spec, *((3, 1), (12, 4))[place % 2]) for place, spec in enumerate(SPECS)] + [(SPECS[0], 12, 4)]
"""The rules in turn with one grammar and one budget; the first one with both."""


@pytest.mark.parametrize(("spec", "seed", "budget"), CASES)
def test_texts_are_drawn_by_the_masked_distribution(spec: str, seed: int, budget: int) -> None:
    stage, grammar = default_stages()["toy distribution"], grammar_of(seed)
    strategy = subject_of(spec).strategy(stage, budget)
    jobs = [(StageRequest(PROMPT, PARAMS, number, grammar=grammar), strategy) for number in range(DRAWS)]
    samples = decode(stage.open_runner(8192), jobs, Limits(max_sequences=256, max_rows=2048, max_draft_rows=1024))
    counts, distribution = Counter(tuple(sample.tokens) for sample in samples), masked_distribution(grammar)
    assert {*counts} <= {*distribution}
    assert chi_square(counts, distribution, DRAWS) > UNLIKELY
