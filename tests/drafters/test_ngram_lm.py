"""Drafts by an n-gram model: the likeliest paths, and models that don't fit the target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parlay.drafters.counting.ngram_lm import NgramLm
from parlay.drafters.counting.ngram_lm import NgramLmOptions as Options
from parlay.drafters.resources import Resources
from parlay.ngrams import NgramOptions, Vocabulary, build_from_ids
from parlay.options import UsageError
from parlay.testing.conformance.stages import ngram_model
from parlay.testing.toy_tokenizers import toy_tokenizer
from tests.drafters.sight import drafted, no_runner

RESOURCES = Resources(20, no_runner)
TEXTS = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [7, 8, 6]]


def test_the_tree_has_the_likeliest_continuations_first() -> None:
    drafter = NgramLm(replace(RESOURCES, open_ngrams=lambda _: ngram_model(TEXTS, 20)), Options(file="m"))
    draft = drafted(drafter, [9, 1, 2], 3)
    assert draft.tree.tokens[:2] == (3, 4)
    assert draft.tree.parents[:2] == (-1, 0)
    assert all(0 < score <= 1 for score in draft.scores)
    assert len(drafted(drafter, [9, 1, 2], 1)) == 1


def test_a_model_of_another_tokenizer_vocabulary_or_of_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="parlay ngram build"):
        NgramLm(RESOURCES, Options())
    with pytest.raises(UsageError, match="nowhere"):
        NgramLm(RESOURCES, Options(file=str(tmp_path / "nowhere")))
    build_from_ids(tmp_path / "m", TEXTS, Vocabulary(20, "other", "abc"), NgramOptions(order=2))
    with pytest.raises(UsageError, match="another tokenizer"):
        NgramLm(replace(RESOURCES, tokenizer=toy_tokenizer(20)), Options(file=str(tmp_path / "m")))
    with pytest.raises(UsageError, match="vocabulary of 20"):
        NgramLm(Resources(10, no_runner), Options(file=str(tmp_path / "m")))
