"""Drafts by an n-gram model: the likeliest paths, and models that don't fit the target."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from parlay.drafters.counting.ngram_lm import NgramLm
from parlay.drafters.counting.ngram_lm import NgramLmOptions as Options
from parlay.drafters.resources import Resources
from parlay.ngrams import NgramModel, NgramOptions, Vocabulary, build_from_ids
from parlay.options import UsageError
from parlay.testing.conformance.stages import ngram_model
from parlay.testing.toy_tokenizers import toy_tokenizer
from tests.drafters.sight import GREEDY, drafted, no_runner

RESOURCES = Resources(20, no_runner)
TEXTS = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [7, 8, 6]]


def test_the_tree_has_the_likeliest_continuations_first() -> None:
    drafter = NgramLm(replace(RESOURCES, open_ngrams=lambda _: ngram_model(TEXTS, 20)), Options(file="m"))
    draft = drafted(drafter, [9, 1, 2], 3)
    assert draft.tree.tokens[:2] == (3, 4)
    assert draft.tree.parents[:2] == (-1, 0)
    assert all(0 < score <= 1 for score in draft.scores)
    assert len(drafted(drafter, [9, 1, 2], 1)) == 1


def likeliest_paths(model: NgramModel, text: list[int], width: int, count: int, stops: set[int]) -> list[float]:
    """Probabilities of the nodes in the order in which they join the tree, from whole distributions."""
    waiting, found = [(1.0, ())], list[float]()
    while waiting and len(found) <= count:
        waiting.sort(key=lambda each: -each[0])
        path, tokens = waiting.pop(0)
        found.append(path)
        if not stops.intersection(tokens[-1:]):
            probs, _ = model.distribution(model.state([*text, *tokens]))
            chosen = sorted(range(len(probs)), key=lambda token: -probs[token])[:width]
            waiting += [(path * float(probs[token]), (*tokens, token)) for token in chosen]
    return found[1:]


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_is_the_best_first_one_of_the_distribution(seed: int, tmp_path: Path) -> None:
    """And nothing grows below a token that ends the text."""
    chance = random.Random(seed)
    texts = [[min(19, int(chance.expovariate(0.3))) for _ in range(40)] for _ in range(12)]
    build_from_ids(tmp_path / "m", texts, Vocabulary(20), NgramOptions(order=3))
    model, stops = NgramModel.open(tmp_path / "m"), {1, 2}
    drafter = NgramLm(RESOURCES, Options(file=str(tmp_path / "m"), width=3, min_prob=0))
    for request, ends in ((GREEDY, set()), (replace(GREEDY, stop_ids=frozenset(stops)), stops)):
        draft = drafted(drafter, texts[0][:7], 25, request)
        paths = dict[int, float]({-1: 1.0})
        for node, (parent, score) in enumerate(zip(draft.tree.parents, draft.scores, strict=True)):
            paths[node] = paths[parent] * score
            assert parent < 0 or draft.tree.tokens[parent] not in ends
        found = [paths[node] for node in range(len(draft))]
        assert found == pytest.approx(likeliest_paths(model, texts[0][:7], 3, 25, ends), rel=1e-4)


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
