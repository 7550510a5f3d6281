"""Two tokenizers together: converting text and ids, common tokens, and sequences in the other tokenizer's ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from itertools import pairwise
from typing import NamedTuple

from tokenizers import Tokenizer as Backend

from parlay.drafters.other_vocabularies.letters import TokenLetters
from parlay.drafters.per_sequence import History
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.types import Tokenizer

INCOMPLETE = "�"
"""The character that ids decode to if they end inside a character."""

TOKEN_BYTES = 100
"""Bytes per token of a sequence in another tokenizer's ids: the id, where it ends, and its text."""
_LONGEST_CHARACTER = 4  # bytes, and so the most tokens
_ANCHOR = "\n"


class Encoded(NamedTuple):
    """Ids of a text, and where each of them ends in the text."""

    ids: list[int]
    ends: list[int]


class Codec:
    """A tokenizer that adds no tokens and does not clean up texts. ``left_out``: ids without a text."""

    def __init__(self, tokenizer: Tokenizer, left_out: Collection[int] = ()) -> None:
        self._backend = _whole_texts(tokenizer.backend_tokenizer)
        self._bos = tokenizer.bos_token_id
        self._left_out = frozenset(left_out)
        self.size = len(tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        kept = [token for token in ids if token not in self._left_out] if self._left_out else list(ids)
        return str(self._backend.decode(kept, skip_special_tokens=False))

    def encode(self, text: str) -> Encoded:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return Encoded(list(encoding.ids), [end for _, end in encoding.offsets])

    def begin(self, text: str) -> Encoded:
        """The ids of a text at the beginning of a sequence, with the tokenizer's own first token if it adds one."""
        encoded = self.encode(text)
        opening = list(self._backend.encode("").ids)[:1]
        if not opening or opening == encoded.ids[:1] or opening[0] != self._bos:
            return encoded
        return Encoded([*opening, *encoded.ids], [0, *encoded.ends])

    def encode_piece(self, text: str) -> list[int]:
        """The ids of a text that continues another one; at a beginning, some tokenizers would add a space."""
        before, both = self.encode(_ANCHOR).ids, self.encode(_ANCHOR + text).ids
        return both[len(before) :] if before and both[: len(before)] == before else self.encode(text).ids

    def ends_inside_a_character(self, ids: Sequence[int]) -> bool:
        return self.decode(ids[-_LONGEST_CHARACTER:]).endswith(INCOMPLETE)


def _whole_texts(backend: Backend) -> Backend:
    """The tokenizer without truncation and padding: a copy if it has any."""
    if backend.truncation is None and backend.padding is None:
        return backend
    backend = copy(backend)
    backend.no_truncation()
    backend.no_padding()
    return backend


def codecs(target: Tokenizer, drafter: Tokenizer) -> tuple[Codec, Codec]:
    """Codecs of the target and of the draft model. Special tokens that the draft model lacks have no text for it."""
    known = drafter.get_vocab()
    lost = [token for token, text in _specials(target).items() if text not in known]
    return Codec(target, lost), Codec(drafter)


def open_tokenizers(resources: Resources, strategy: str, model: str) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of target and draft model. Raises UsageError if one is missing or can't report offsets."""
    if resources.tokenizer is None or resources.open_tokenizer is None:
        raise UsageError(f"strategy {strategy}: the target has no tokenizer here; load it with one")
    target, drafter = resources.tokenizer, resources.open_tokenizer(model)
    for owner, tokenizer in (("the target", target), (model, drafter)):
        if not tokenizer.is_fast:
            raise UsageError(f"strategy {strategy}: the tokenizer of {owner} has no tokenizer.json, which is needed")
    return target, drafter


def _specials(tokenizer: Tokenizer) -> dict[int, str]:
    ids = {text: tokenizer.backend_tokenizer.token_to_id(text) for text in tokenizer.all_special_tokens}
    return {token: text for text, token in ids.items() if token is not None}


class RetokenizedText:
    """A sequence of the target in the draft model's ids, by way of its text; updated as it grows.

    After new tokens, the text is encoded again from ``window`` ids before its former end, and joined to the old ids at
    the last place where both tokenisations agree. So a token at the seam that depends on later text is corrected, and
    all ids before it stay, also in the draft model's cache.
    """

    def __init__(self, target: Codec, drafter: Codec, window: int) -> None:
        self._target = target
        self._drafter = drafter
        self._window = window
        self._history = History()
        self._text = ""
        self._ends: list[int] = []
        self.ids: list[int] = []

    def follow(self, tokens: Sequence[int]) -> bool:
        """Update `ids` for ``tokens``. False if that is impossible, because the tokens end inside a character."""
        if self._target.ends_inside_a_character(tokens):
            return False
        history = self._history
        agreed = history.agree(tokens)
        delta = self._new_text(tokens, agreed) if 0 < agreed == len(history.tokens) else None
        if delta is None:
            self._begin(self._target.decode(tokens))
        elif delta:
            self._extend(delta)
        history.cut(agreed)
        history.tokens += tokens[agreed:]
        return bool(self.ids)

    def _new_text(self, tokens: Sequence[int], known: int) -> str | None:
        """The text that the tokens after the first ``known`` add; None if they change the text before them."""
        start = max(0, known - self._window)
        before, after = self._target.decode(tokens[start:known]), self._target.decode(tokens[start:])
        return after[len(before) :] if after.startswith(before) else None

    def _begin(self, text: str) -> None:
        self._text = text
        ids, self._ends = self._drafter.begin(text)
        self.ids[:] = ids

    def _extend(self, delta: str) -> None:
        self._text += delta
        first = len(self.ids) - self._window
        while first > 0 and not self._join(first):
            first -= len(self.ids) - first
        if first <= 0:
            self._begin(self._text)

    def _join(self, first: int) -> bool:
        """Encode again from the id number ``first`` on. False if no later token boundary is the same as before."""
        if self._ends[first] == self._ends[first - 1]:
            return False  # within a character, or within tokens that stand for single bytes
        start = self._ends[first - 1]
        ids, ends = self._drafter.encode(self._text[start:])
        ends = [start + end for end in ends]
        kept, used = _seam(Encoded(self.ids[first:], self._ends[first:]), Encoded(ids, ends))
        if kept:
            self.ids[first + kept :] = ids[used:]
            self._ends[first + kept :] = ends[used:]
        return kept > 0


def _seam(old: Encoded, new: Encoded) -> tuple[int, int]:
    """How many old ids to keep and how many new ids they replace: both up to the last token boundary they share."""
    cuts = {(token, end): place + 1 for place, (token, end) in enumerate(zip(*old, strict=True)) if _cut(old, place)}
    seams = [
        (cuts[token, end], place + 1)
        for place, (token, end) in enumerate(zip(*new, strict=True))
        if (token, end) in cuts and _cut(new, place)
    ]
    return max(seams, default=(0, 0))


def _cut(encoded: Encoded, place: int) -> bool:
    """Whether the token at ``place`` ends at the end of a character."""
    return place + 1 == len(encoded.ends) or encoded.ends[place + 1] > encoded.ends[place]


def continuation(codec: Codec, tokens: Sequence[int], text: str, window: int) -> Encoded:
    """The ids of ``text`` after ``tokens``, tokenised as far as possible like both together."""
    before = codec.decode(tokens[-window:])
    ids, ends = codec.encode(before + text)
    first = next((place for place, end in enumerate(ends) if end > len(before)), len(ids))
    start = ends[first - 1] if first else 0
    if first == len(ids) or start == len(before):
        return Encoded(ids[first:], [end - len(before) for end in ends[first:]])
    # A token of the whole may span the seam. Its first part is committed, so only the rest is encoded.
    rest = ends[first] - len(before)
    piece = codec.encode_piece(text[:rest])
    return Encoded(
        [*piece, *ids[first + 1 :]], [*([rest] * len(piece)), *(end - len(before) for end in ends[first + 1 :])]
    )


def scores(ends: Sequence[int], drafted: Sequence[tuple[int, float]]) -> list[float]:
    """For each token, which ends at ``ends``, the product of the probabilities of the draft tokens that begin in it.

    ``drafted``: for each token of the draft model, where it begins, and its probability.
    """
    result = []
    for start, end in pairwise((0, *ends)):
        chance = 1.0
        for begin, probability in drafted:
            if start <= begin < end:
                chance *= probability
        result.append(chance)
    return result


def intersection(target: Tokenizer, drafter: Tokenizer) -> dict[int, int]:
    """Maps ids of the draft model to ids of the target's tokens with the same bytes, one to one."""
    known = spelled(target)
    return {token: known[text] for text, token in spelled(drafter).items() if text in known}


def spelled(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The vocabulary by the bytes that each token stands for.

    Of equal tokens the first, whole pieces before single bytes.
    """
    speller = TokenLetters(tokenizer)
    result: dict[bytes, int] = {}
    last: dict[bytes, int] = {}
    for piece, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]):
        (last if speller.is_byte(piece) else result).setdefault(speller.spell(piece), number)
    return last | result
