"""An n-gram language model: scores texts, and gives the likeliest tokens or the whole distribution after a context."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from parlay.ngrams import model_file
from parlay.ngrams.trie import BEGIN, END, FIRST, UNKNOWN, Integers
from parlay.options import user_path
from parlay.types import FieldError

State = tuple[int, ...]
"""A context: the trie places of its last id, its last two ids and so on, up to the order - 1; -1 for unseen ones."""

NO_CONTEXT: State = ()

_REMEMBERED = 1 << 14  # contexts in each of two caches: for the likeliest and for the most frequent followers


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How likely each token of a text is after the tokens before it.

    ``log10[i]``: the logarithm, to the base 10, of token i's probability. ``lengths[i]``: the length of the longest
    known n-gram that ends with token i. ``unknown[i]``: whether token i is a word outside the vocabulary. If the end of
    the text was scored, it counts as the last token.
    """

    log10: npt.NDArray[np.float64]
    lengths: Integers
    unknown: npt.NDArray[np.bool_]

    @property
    def total(self) -> float:
        return float(self.log10.sum())

    @property
    def perplexity(self) -> float:
        """The perplexity, unknown words included; infinity above 1e308."""
        return _perplexity(self.log10)

    @property
    def perplexity_known(self) -> float:
        """The perplexity without unknown words; NaN if all words are unknown."""
        known = self.log10[~self.unknown]
        return _perplexity(known) if len(known) else float("nan")

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(
            np.concatenate([part.log10 for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.unknown for part in parts]),
        )


class NgramModel:
    """A model that is memory-mapped from a file; several threads may use it at once.

    A text is whitespace-separated words, for a model of words, or ids of the tokenizer that the model was built with.
    """

    def __init__(self, stored: model_file.Stored) -> None:
        self.header = stored.header
        self.order = stored.header.order
        self.words = stored.words
        self.counts = stored.counts
        self.trie = trie = stored.trie
        self._probs, self._prob_tables = stored.probs, stored.prob_tables
        self._backoffs, self._backoff_tables = stored.backoffs, stored.backoff_tables
        self._token_views = [each.data for each in trie.tokens]
        self._start_views = [each.data for each in trie.starts]
        self._word_ids = {word: place for place, word in enumerate(stored.words, FIRST)}
        self._best = lru_cache(_REMEMBERED)(self._find_best)
        self._most_frequent = lru_cache(_REMEMBERED)(self._find_most_frequent)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Map a model that `parlay ngram build` made. Raises BadNgramFile, with a message of one line, for any other
        file."""
        return cls(model_file.read(user_path(path)))

    # ----------------------------------------------------------------------------------------------------- whole texts

    def encode(self, text: str | Sequence[int]) -> Integers:
        """Return the trie's ids of a text. Raises ValueError if it is words and the model uses token ids, or the
        reverse."""
        if isinstance(text, str) != self.header.words:
            wants = "words" if self.header.words else "token ids of its tokenizer"
            raise ValueError(f"this n-gram model scores {wants}: give it a {'text' if self.header.words else 'list'}")
        if isinstance(text, str):
            return np.array([self._word_ids.get(word, UNKNOWN) for word in text.split()], np.int64)
        ids = np.asarray(text, np.int64)
        return np.where((ids >= 0) & (ids < self.header.vocab_size), ids + FIRST, UNKNOWN)

    def scores(self, text: str | Sequence[int], *, begin: bool = True, end: bool = True) -> Scores:
        """Score a text. ``begin``: a whole text begins with its first token. ``end``: it ends there, and its end is
        scored."""
        ids = np.concatenate([[BEGIN], self.encode(text), [END] if end else []]).astype(np.int64)
        if not begin:
            ids = ids[1:]
        found = self.trie.endings(ids)
        logs, lengths = self._numbers(1, ids).astype(np.float64), np.ones(len(ids), np.int64)
        for n in range(2, self.order + 1):
            context = np.append(-1, found[n - 2][:-1])
            seen, hits = np.flatnonzero(context >= 0), np.flatnonzero(found[n - 1] >= 0)
            logs[seen] += self._weights(n - 1, context[seen])
            logs[hits] = self._numbers(n, found[n - 1][hits])
            lengths[hits] = n
        first = int(begin)
        return Scores(logs[first:], lengths[first:], ids[first:] == UNKNOWN)

    def score(self, text: str | Sequence[int], *, begin: bool = True, end: bool = True) -> float:
        """Return log10 of the probability of a whole text: the term to add to a model's own score in rescoring."""
        return self.scores(text, begin=begin, end=end).total

    def perplexity(self, text: str | Sequence[int]) -> float:
        """Return the perplexity of a text, its end included."""
        return self.scores(text).perplexity

    def numbers(self, n: int, places: Integers) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return log10 of the probabilities and back-off weights of the n-grams of n ids at ``places`` in the trie."""
        backoffs = self._weights(n, places) if n < self.order else np.zeros(len(places), np.float32)
        return self._numbers(n, places), backoffs

    def _numbers(self, n: int, places: Integers) -> npt.NDArray[np.float32]:
        """Return log10 of the probabilities of n-grams of n ids."""
        values, table = self._probs[n - 1][places], self._prob_tables[n - 1]
        return values if table is None else table[values]

    def _weights(self, n: int, places: Integers) -> npt.NDArray[np.float32]:
        values, table = self._backoffs[n - 1][places], self._backoff_tables[n - 1]
        return values if table is None else table[values]

    def _number(self, n: int, place: int) -> float:
        value, table = self._probs[n - 1][place], self._prob_tables[n - 1]
        return float(value if table is None else table[value])

    def _weight(self, n: int, place: int) -> float:
        value, table = self._backoffs[n - 1][place], self._backoff_tables[n - 1]
        return float(value if table is None else table[value])

    # -------------------------------------------------------------------------------------------------- token by token

    def state(self, text: str | Sequence[int], *, begin: bool = False) -> State:
        """Return the context after a text."""
        ids = self.encode(text)[-self.order :].tolist()
        state = (BEGIN,) if begin and self.order > 1 else NO_CONTEXT
        for each in ids:
            state = self._after(state, each)
        return state

    def next(self, state: State, token: int) -> State:
        """Return the context one token later; in a model of words, a token is an index into ``words``."""
        return self._after(state, self._id(token))

    def _after(self, state: State, id: int) -> State:
        if self.order == 1:
            return NO_CONTEXT
        longer = [self._child(n, place, id) for n, place in enumerate(state[: self.order - 2], 2)]
        return (id, *longer)

    def _child(self, n: int, parent: int, id: int) -> int:
        """Return the place of the n-gram of n ids that extends the n-gram at ``parent`` by ``id``; -1 if there is
        none."""
        if parent < 0:
            return -1
        tokens, starts = self._token_views[n - 1], self._start_views[n - 2]
        end = starts[parent + 1]
        place = bisect_left(tokens, id, starts[parent], end)
        return place if place < end and tokens[place] == id else -1

    def log10(self, state: State, token: int) -> float:
        """Return log10 of the probability of a token after a context."""
        return self._log10(state, self._id(token))

    def _id(self, token: int) -> int:
        return token + FIRST if 0 <= token < self.header.vocab_size else UNKNOWN

    def _log10(self, state: State, id: int) -> float:
        weight = 0.0
        for n in range(len(state), 0, -1):
            place = state[n - 1]
            child = self._child(n + 1, place, id)
            if child >= 0:
                return weight + self._number(n + 1, child)
            weight += self._weight(n, place) if place >= 0 else 0.0
        return weight + self._number(1, id)

    def followers(self, state: State, most: int) -> list[tuple[int, float]]:
        """Return the ``most`` likeliest next tokens and their probabilities, likeliest first.

        The end of the text is left out. Raises ValueError unless ``most`` is at least 1.
        """
        if most < 1:
            raise FieldError("most", f"must be at least 1, got {most}")
        found: list[tuple[float, int]] = []
        best: list[float] = []  # the ``most`` likeliest so far, as a heap
        weight, longer = 0.0, list[tuple[int, int]]()
        for n, place in [*((n, state[n - 1]) for n in range(len(state), 0, -1) if state[n - 1] >= 0), (0, 0)]:
            if len(best) == most and best[0] >= weight:
                break  # a shorter context gives no token more than its weight
            for id, log in self._likeliest(n, place, most):
                if all(self._child(m + 1, other, id) < 0 for m, other in longer):
                    found.append((-weight - log, id))
                    heapq.heappush(best, weight + log)
                    if len(best) > most:
                        heapq.heappop(best)
                if len(best) == most and best[0] >= weight + log:
                    break  # the remaining followers of this context are no likelier
            if n:
                weight += self._weight(n, place)
                longer.append((n, place))
        return [(id - FIRST, 10**-log) for log, id in heapq.nsmallest(most, found)]

    def _likeliest(self, n: int, place: int, first: int) -> Iterator[tuple[int, float]]:
        """Yield all followers of one context of n ids, likeliest first.

        At first ``first`` followers are searched for, then twice as many, and so on.
        """
        given = 0
        while len(best := self._best(n, place, first)) > given:
            yield from best[given:]
            given, first = first, 2 * first

    def _find_best(self, n: int, place: int, most: int) -> list[tuple[int, float]]:
        """Return the likeliest followers of one context of n ids, with log10 of their probabilities."""
        if n:
            rows = np.arange(*self.trie.starts[n - 1][place : place + 2].tolist())
            ids = self.trie.tokens[n][rows]
            rows, ids = rows[ids >= FIRST], ids[ids >= FIRST]
        else:
            rows = ids = np.arange(FIRST, self.trie.size)
        logs = self._numbers(n + 1, rows)
        largest = _largest(logs, most)
        return list(zip(ids[largest].tolist(), logs[largest].tolist(), strict=True))

    def distribution(self, state: State) -> tuple[npt.NDArray[np.float64], float]:
        """Return the probabilities ``[V]`` of all tokens after a context, and the probability of the end of the text.

        The rest up to 1 is the probability of unknown words. Scores of stupid back-off sum to more than 1.
        """
        probs = self._alone.copy()
        for n, place in enumerate(state, 1):
            if place >= 0:
                rows = np.arange(*self.trie.starts[n - 1][place : place + 2].tolist())
                probs *= 10 ** self._weight(n, place)
                probs[self.trie.tokens[n][rows]] = 10 ** self._numbers(n + 1, rows).astype(np.float64)
        return probs[FIRST:], float(probs[END])

    @cached_property
    def _alone(self) -> npt.NDArray[np.float64]:
        """Probabilities of all ids without a context."""
        probs: npt.NDArray[np.float64] = 10 ** self._numbers(1, np.arange(self.trie.size)).astype(np.float64)
        return probs

    def continuation(
        self, text: str | Sequence[int], most: int, temperature: float = 1.0, seed: int | None = None
    ) -> list[int]:
        """Sample at most ``most`` tokens after a text from this model alone; stops at the end of the text."""
        chance, state = np.random.default_rng(seed), self.state(text, begin=True)
        written: list[int] = []
        while len(written) < most:
            probs, end = self.distribution(state)
            laws = np.append(probs, end)
            if temperature:
                laws = np.exp((np.log(laws) - np.log(laws.max())) / temperature)
                token = int(chance.choice(len(laws), p=laws / laws.sum()))
            else:
                token = int(laws.argmax())
            if token == len(probs):
                break
            written.append(token)
            state = self.next(state, token)
        return written

    def count(self, text: str | Sequence[int]) -> int:
        """Return how often an n-gram occurred in the texts. Raises ValueError if the model keeps no counts."""
        n, place = self._place(text, self.order)
        return int(self.counts[n - 1][place]) if place >= 0 else 0

    def counted(self, text: str | Sequence[int], most: int) -> tuple[int, dict[int, int]]:
        """Return how often any token followed an n-gram, and its most frequent followers with their counts, sorted.

        Raises ValueError where the model keeps no counts.
        """
        n, place = self._place(text, self.order - 1)
        if place < 0:
            return 0, {}
        total, followers = self._most_frequent(n, place, most)
        return total, dict(followers)

    def _find_most_frequent(self, n: int, place: int, most: int) -> tuple[int, list[tuple[int, int]]]:
        begin, end = self._start_views[n - 1][place], self._start_views[n - 1][place + 1]
        ids, counts = self.trie.tokens[n][begin:end], self.counts[n][begin:end]
        ids, counts = ids[ids >= FIRST], counts[ids >= FIRST]
        largest = _largest(counts, most)
        return int(counts.sum()), [
            (id - FIRST, times) for id, times in zip(ids[largest].tolist(), counts[largest].tolist(), strict=True)
        ]

    def _place(self, text: str | Sequence[int], most: int) -> tuple[int, int]:
        """Return length and place of an n-gram of a model with counts."""
        if not self.counts:
            raise ValueError("this n-gram model keeps no counts: build it with --counts, or with stupid back-off")
        ids = self.encode(text).tolist()
        if not 0 < len(ids) <= most:
            raise ValueError(f"an n-gram of {len(ids)} tokens: this model has 1 to {most}")
        place = ids[0]
        for n, each in enumerate(ids[1:], 2):
            place = self._child(n, place, each)
        return len(ids), place


def _perplexity(log10: npt.NDArray[np.float64]) -> float:
    with np.errstate(over="ignore"):
        return float(10 ** -log10.mean())


def _largest(values: npt.NDArray[Any], most: int) -> Integers:
    """Return the places of the largest values, largest first; of equal values the first."""
    if len(values) > most:
        floor = np.partition(values, len(values) - most)[len(values) - most]
        above = np.flatnonzero(values > floor)
        among = np.sort(np.concatenate([above, np.flatnonzero(values == floor)[: most - len(above)]]))
    else:
        among = np.arange(len(values))
    return among[np.argsort(-values[among], kind="stable")]
