"""An n-gram language model of a corpus drafts: the likeliest continuations of the latest tokens, as one tree."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path

from parlay.drafters.per_sequence import OneByOne
from parlay.drafters.resources import Resources
from parlay.drafters.stores.datastore_file import check_tokens, fingerprint
from parlay.ngrams.model import NgramModel
from parlay.options import NotNamed, Options, UsageError, option
from parlay.types import NO_DRAFT, Draft, ParlayError, SequenceView, Tree

SOURCE = "ngram-lm"


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramLmOptions(Options):
    """Options of n-gram model drafts: the model, and how its drafts grow."""

    file: str = option("", "the n-gram model; `parlay ngram build` makes one", opens=True)
    width: int = option(4, "maximum children of a node", low=1, high=64)
    min_prob: float = option(0.05, "minimum probability of a drafted path", low=0, high=1)


class NgramLm(OneByOne):
    """Drafts with a back-off n-gram model of a corpus (Stern, Shazeer and Uszkoreit 2018 verify any model's guesses).

    The tree grows best first by path probability: each node gets the ``width`` likeliest tokens after its path, until
    there are ``k`` nodes or no path of ``min_prob`` is left. Nothing grows below a stop token. A node's score is its
    probability given its parent. The sequence's own n-grams are not counted: combine it with another drafter for that,
    as in ``union``.
    """

    def __init__(self, resources: Resources, options: NgramLmOptions) -> None:
        if not options.file:
            raise NotNamed(
                f"strategy {SOURCE} needs file=PATH, an n-gram model: make one with `parlay ngram build CORPUS -o PATH`"
            )
        self._model = open_ngrams(f"strategy {SOURCE}", options.file, resources)
        self._width, self._min_prob = options.width, options.min_prob

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        model, stops = self._model, view.request.stop_ids
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        state = model.state(view.tokens[-model.order :])
        offers = self._offers(model.followers(state, self._width), 1.0, -1, 0)
        states, offered = [state], len(offers)  # the state at the root, then after each node
        heapq.heapify(offers)
        while offers and len(tokens) < budget:
            path, _, parent, token, score = heapq.heappop(offers)
            tokens.append(token)
            parents.append(parent)
            scores.append(score)
            states.append(model.next(states[parent + 1], token))
            if token not in stops:
                for offer in self._offers(model.followers(states[-1], self._width), -path, len(tokens) - 1, offered):
                    heapq.heappush(offers, offer)
                    offered += 1
        if not tokens:
            return NO_DRAFT
        return Draft(Tree(tuple(tokens), tuple(parents)), sources=(SOURCE,) * len(tokens), scores=tuple(scores))

    def _offers(
        self, followers: list[tuple[int, float]], path: float, parent: int, offered: int
    ) -> list[tuple[float, int, int, int, float]]:
        """Children that are likely enough, with sort keys: by path probability, and if equal the first offered."""
        return [
            (-path * chance, number, parent, token, min(1.0, chance))
            for number, (token, chance) in enumerate(followers, offered)
            if path * chance >= self._min_prob
        ]


def open_ngrams(reader: str, file: str, resources: Resources) -> NgramModel:
    """Open an n-gram model for ``reader``. Raises UsageError if its tokens are not the target's."""
    try:
        model = resources.open_ngrams(file) if resources.open_ngrams else NgramModel.open(Path(file))
    except ParlayError as error:
        raise UsageError(f"{reader}: {error}") from None
    tokens = "" if resources.tokenizer is None else fingerprint(resources.tokenizer)
    check_fits(reader, file, model, resources.vocab_size, tokens)
    return model


def check_fits(reader: str, name: str, model: NgramModel, vocab_size: int, tokens: str) -> None:
    """Raises UsageError for a model of words, or of tokens other than the target's, whose fingerprint is ``tokens``."""
    header = model.header
    if header.words:
        raise UsageError(f"{reader}: {name} is a model of words: build it with --model and the target")
    check_tokens(reader, name, header, vocab_size, tokens)
