"""REST (He et al. 2023): what followed the latest tokens in a corpus, the most frequent continuations as one tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parlay.drafters.per_sequence import OneByOne
from parlay.drafters.resources import Resources
from parlay.drafters.stores.datastore_file import Datastore, check_tokens, fingerprint
from parlay.drafters.stores.suffix_array import Integers
from parlay.options import NotNamed, Options, UsageError, option, user_path
from parlay.types import NO_DRAFT, Draft, SequenceView, Tree

SOURCE = "datastore"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalOptions(Options):
    """Options of retrieval: the datastore, and which matches in it count."""

    file: str = option("", "the datastore; `parlay datastore build` makes one", opens=True)
    max_match: int = option(16, "maximum tokens of a match", low=1, high=256)
    min_match: int = option(2, "minimum tokens of a match", low=1, high=256)
    branch: int = option(10, "tokens to take after a match, which bounds the depth of a draft", low=1, high=256)
    matches: int = option(5000, "maximum matches that are counted", low=1, high=100_000)


class Retrieval(OneByOne):
    """Retrieval-based speculative decoding, REST (He et al. 2023, arXiv:2311.08252).

    Searches a datastore for the longest suffix of the sequence, of ``max_match`` down to ``min_match`` tokens. The next
    ``branch`` tokens are taken after up to ``matches`` of its occurrences, every prefix of these continuations is
    counted, and the most frequent prefixes are the draft. They form a tree, because no prefix is more frequent than a
    shorter one. If there are more occurrences, a sample is spread evenly over them, sorted by what follows, so that
    counts keep their ratios (the reference implementation takes the first).

    A node's score is its count over its parent's, after a discount on the count that falls with the number of tokens
    matched so far: what followed two common tokens once is not certain. See `_scores`.
    """

    def __init__(self, resources: Resources, options: RetrievalOptions) -> None:
        if not options.file:
            raise NotNamed(
                f"strategy {SOURCE} needs file=PATH, a datastore: make one with `parlay datastore build CORPUS -o PATH`"
            )
        if options.min_match > options.max_match:
            raise UsageError(
                f"strategy {SOURCE}: min_match {options.min_match} is more than max_match {options.max_match}"
            )
        self._store = _open(options.file, resources)
        self._longest, self._shortest = options.max_match, options.min_match
        self._branch, self._matches = options.branch, options.matches

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        length, start, end = self._store.longest(view.tokens[-self._longest :], self._shortest)
        if not length:
            return NO_DRAFT
        found = end - start
        looked_at = min(found, self._matches)
        places = start + np.arange(looked_at) * found // looked_at
        after = self._store.suffixes[places].astype(np.int64) + length
        ahead = np.arange(min(self._branch, budget))
        continuations = self._store.tokens.take(
            after + ahead[:, None], mode="clip"
        )  # safe, because the text ends with a border
        return _most_frequent(continuations, self._store.header.vocab_size, budget, length)


def _open(file: str, resources: Resources) -> Datastore:
    """Open the datastore. Raises UsageError if its vocabulary or tokenizer is not the target's."""
    store = resources.open_datastore(file) if resources.open_datastore else Datastore.open(user_path(file))
    tokens = "" if resources.tokenizer is None else fingerprint(resources.tokenizer)
    check_tokens(f"strategy {SOURCE}", file, store.header, resources.vocab_size, tokens)
    return store


def _most_frequent(continuations_DR: Integers, border: int, budget: int, length: int) -> Draft:
    """The tree of the ``budget`` most frequent prefixes; if equal, shorter ones first, then in sorted order.

    Column r is the continuation of match r, and row d its token at depth d + 1; a border ends it. Columns are sorted,
    so equal prefixes are adjacent, and a prefix is identified by its depth and its first column.
    """
    columns = continuations_DR.shape[1]
    changes_DR = np.ones(continuations_DR.shape, bool)
    np.not_equal(continuations_DR[:, 1:], continuations_DR[:, :-1], out=changes_DR[:, 1:])
    inside_DR = continuations_DR != border
    for depth in range(1, len(continuations_DR)):  # ufunc.accumulate is ten times slower
        changes_DR[depth] |= changes_DR[depth - 1]
        inside_DR[depth] &= inside_DR[depth - 1]
    firsts = changes_DR.ravel().nonzero()[0]  # prefix -> its depth times columns, plus its first column
    counts = np.diff(firsts, append=changes_DR.size)
    chosen = _largest(counts, inside_DR.ravel()[firsts], budget)
    # The parent is the last prefix one level up that begins at or before this column.
    parents = firsts.searchsorted(firsts[chosen] - columns, side="right") - 1
    above = np.where(parents >= 0, counts[parents], columns)
    scores = _scores(counts[chosen], above, length + firsts[chosen] // columns)
    place = {prefix: node for node, prefix in enumerate(chosen.tolist())}
    tree = Tree(
        tuple(continuations_DR.ravel()[firsts[chosen]].tolist()),
        tuple(place.get(parent, -1) for parent in parents.tolist()),
    )
    return Draft(tree, sources=(SOURCE,) * len(tree), scores=tuple(scores.tolist()))


def _scores(counts: Integers, above: Integers, matched: Integers) -> Integers:
    """The probability of a token that followed ``counts`` of ``above`` times, after ``matched`` equal tokens.

    Absolute discounting (Ney, Essen, Kneser 1994). The discount was fitted by log-loss on held-out books, speeches and
    technical prose: .178 per node, against .201 without the length of the match and .459 without a discount.
    """
    return (counts - np.minimum(0.95, 4 / (matched + 2))) / above


def _largest(counts: Integers, inside: Integers, most: int) -> Integers:
    """The candidates (``inside``) with the largest counts, largest first; if equal, the first ones."""
    among, floor = (inside & (counts > 1)).nonzero()[0], 1
    if among.size < most:
        among = inside.nonzero()[0]
    while (left := among[counts[among] > floor]).size >= most:  # drop small counts before sorting
        among, floor = left, 2 * floor
    return among[(-counts[among]).argsort(kind="stable")[:most]]
