"""Estimates probabilities from counts: modified Kneser-Ney (Chen and Goodman 1998) or stupid back-off (Brants 2007).

Both give each n-gram a probability, and a back-off weight for its use as a context: if an id never followed the n-gram,
its probability is the weight times its probability after the n-gram without the first id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parlay.ngrams.counting import Counted
from parlay.ngrams.trie import BEGIN, Integers, Scratch, Trie, blocks

STUPID_WEIGHT = 0.4
"""Back-off weight of stupid back-off, from Brants et al."""

FALLBACK = (0.5, 1.0, 1.5)
"""Discounts for lengths with too few n-grams to estimate them, from KenLM's ``--discount_fallback``."""

Discounts = tuple[float, float, float]
"""What is subtracted from the count of an n-gram that occurred once, twice, and more often."""

Numbers = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True, eq=False)
class Estimated:
    """The numbers of a language model, linear rather than logarithms.

    ``probs[n - 1]``: for each n-gram, the probability of its last id after the others. ``weights[n - 1]``: the back-off
    weight of each n-gram, for lengths below the order. ``counts`` are as in `Counted`. ``discounts`` has an entry for
    each length, and ``guessed`` the lengths that use `FALLBACK`; both are empty unless Kneser-Ney made the numbers.
    """

    trie: Trie
    counts: tuple[Integers, ...]
    probs: tuple[Numbers, ...]
    weights: tuple[Numbers, ...]
    discounts: tuple[Discounts, ...] = ()
    guessed: tuple[int, ...] = ()


def stupid_backoff(counted: Counted, scratch: Scratch) -> Estimated:
    """Estimate relative frequencies; every back-off weight is `STUPID_WEIGHT`. The scores after a context sum to more
    than 1."""
    trie, counts = counted.trie, counted.counts
    unigrams = counts[0].astype(np.float64)
    unigrams[BEGIN] = 0
    probs: list[Numbers] = [(unigrams / unigrams.sum()).astype(np.float32)]
    weights: list[Numbers] = []
    for n in range(1, trie.order):
        found = scratch.zeros(f"probs{n + 1}", np.float32, trie.count(n + 1))
        weight = scratch.zeros(f"weights{n}", np.float32, trie.count(n))
        for first, last in trie.families(n):
            rows = slice(*trie.starts[n - 1][[first, last]].tolist())
            found[rows] = counts[n][rows] / counts[n - 1][trie.parents(n, first, last)]
            weight[first:last] = STUPID_WEIGHT
        probs.append(found)
        weights.append(weight)
    return Estimated(trie, counts, tuple(probs), tuple(weights))


def kneser_ney(counted: Counted, thresholds: Sequence[int], scratch: Scratch) -> Estimated:
    """Estimate interpolated modified Kneser-Ney, as KenLM's lmplz does. Single ids are interpolated with the uniform
    distribution.

    Below the order, an n-gram's count is the number of distinct ids before it (*adjusted counts*), or its occurrences
    if it begins a text. N-grams that occurred at most ``thresholds[n - 1]`` times will be pruned, so their share goes
    to the shorter context.
    """
    trie, (suffixes, adjusted) = counted.trie, _adjusted(counted, scratch)
    found = [_discounts(each) for each in adjusted]
    discounts = [each or FALLBACK for each in found]
    probs: list[Numbers] = [_unigrams(trie.size, adjusted[0], discounts[0])]
    weights: list[Numbers] = []
    for n in range(1, trie.order):
        above = scratch.zeros(f"probs{n + 1}", np.float32, trie.count(n + 1))
        weight = scratch.zeros(f"weights{n}", np.float32, trie.count(n))
        table = np.array([0.0, *discounts[n]])
        for first, last in trie.families(n):
            parents = trie.parents(n, first, last) - first
            rows = slice(*trie.starts[n - 1][[first, last]].tolist())
            times = adjusted[n][rows].astype(np.float64)
            kept = np.where(counted.counts[n][rows] > thresholds[n], times, 0.0)
            total = np.bincount(parents, times, last - first)
            saved = np.bincount(parents, table[np.minimum(kept, 3).astype(np.int64)] + times - kept, last - first)
            gamma = np.divide(
                saved, total, out=np.ones(last - first), where=total > 0
            )  # 1: nothing follows the context
            share = (times - table[np.minimum(times, 3).astype(np.int64)]) / total[parents]
            above[rows] = share + gamma[parents] * probs[n - 1][suffixes[n][rows]]
            weight[first:last] = gamma
        probs.append(above)
        weights.append(weight)
    guessed = tuple(n for n, each in enumerate(found, 1) if each is None)
    return Estimated(trie, counted.counts, tuple(probs), tuple(weights), tuple(discounts), guessed)


def _unigrams(size: int, adjusted: Integers, discounts: Discounts) -> Numbers:
    """Return the probability of each id. The discounted mass is shared equally by all ids that can follow another."""
    times = adjusted.astype(np.float64)
    taken = np.array([0.0, *discounts])[np.minimum(adjusted, 3)]
    alike = taken.sum() / (size - 2)  # neither `PAD` nor `BEGIN` follows another id
    probs: Numbers = (times - taken + alike) / times.sum()
    return probs.astype(np.float32)


def _adjusted(counted: Counted, scratch: Scratch) -> tuple[list[Integers], list[Integers]]:
    """Return two lists by length: the place of each n-gram's suffix without the first id, and the number of distinct
    ids that precede each n-gram."""
    trie, counts = counted.trie, counted.counts
    suffixes, adjusted = [np.empty(0, np.int64)], [counts[-1]]
    begin = slice(BEGIN, BEGIN + 1)
    for n in range(1, trie.order):
        suffix = scratch.zeros(f"suffixes{n + 1}", np.int64, trie.count(n + 1))
        before = scratch.zeros(f"adjusted{n}", np.int64, trie.count(n))
        for first, last in trie.families(n):
            rows = slice(*trie.starts[n - 1][[first, last]].tolist())
            ids = trie.tokens[n][rows].astype(np.int64)
            suffix[rows] = found = (
                ids if n == 1 else trie.continued(n, suffixes[n - 1][trie.parents(n, first, last)], ids)
            )
            np.add.at(before, found, 1)
        before[begin] = counts[n - 1][begin] if n > 1 else 0  # nothing stands before the beginning
        begin = slice(*trie.starts[n - 1][[begin.start, begin.stop]].tolist())
        suffixes.append(suffix)
        adjusted.insert(n - 1, before)
    if trie.order == 1:
        adjusted = [counts[0].copy()]
        adjusted[0][BEGIN] = 0
    return suffixes, adjusted


def _discounts(adjusted: Integers) -> Discounts | None:
    """Return the discounts of Chen and Goodman's equation 26, from the numbers of n-grams with the counts 1 to 4.

    None if the result is invalid.
    """
    found = np.zeros(6, np.int64)
    for rows in blocks(len(adjusted)):
        found += np.bincount(np.minimum(adjusted[rows], 5), minlength=6)
    _, one, two, three, four, _ = found.tolist()
    if not (one and two and three):
        return None
    share = one / (one + 2 * two)
    result = 1 - 2 * share * two / one, 2 - 3 * share * three / two, 3 - 4 * share * four / three
    return result if all(0 <= each <= most for most, each in enumerate(result, 1)) else None


def prune(model: Estimated, thresholds: Sequence[int], scratch: Scratch) -> Estimated:
    """Leave out n-grams that occurred at most as often as the threshold of their length; all single ids stay.

    ``thresholds`` never fall with length, so if an n-gram stays, its context stays, too.
    """
    trie = model.trie
    names = ("tokens", "counts", "probs", "weights")
    columns = dict(zip(names, (trie.tokens, model.counts, model.probs, model.weights), strict=True))
    for n in range(1, trie.order):
        done = 0
        for first, last in trie.families(n):
            rows = slice(*trie.starts[n - 1][[first, last]].tolist())
            kept = model.counts[n][rows] > thresholds[n]
            sums = np.append(0, np.cumsum(kept))
            begins = done + sums[trie.starts[n - 1][first:last] - rows.start]
            stays = slice(None) if n == 1 else model.counts[n - 1][first:last] > thresholds[n - 1]
            scratch.append(f"kept_starts{n}", begins[stays])
            for name, of_lengths in columns.items():
                if n < len(of_lengths):
                    scratch.append(f"kept_{name}{n + 1}", of_lengths[n][rows][kept])
            done += int(sums[-1])
        scratch.append(f"kept_starts{n}", np.array([done]))
    starts = tuple(scratch.read(f"kept_starts{n}", np.int64) for n in range(1, trie.order))
    tokens, counts, probs, weights = (
        (*of_lengths[:1], *(scratch.read(f"kept_{name}{n + 1}", each.dtype) for n, each in enumerate(of_lengths) if n))
        for name, of_lengths in columns.items()
    )
    return Estimated(Trie(trie.size, tokens, starts), counts, probs, weights, model.discounts, model.guessed)
