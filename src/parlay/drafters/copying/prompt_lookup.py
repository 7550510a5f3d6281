"""Prompt lookup decoding (Saxena 2023): drafts what followed the latest tokens earlier."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from parlay.drafters.history import History
from parlay.drafters.one_by_one import OneByOne
from parlay.drafters.resources import Resources
from parlay.options import Options, UsageError, option
from parlay.types import NO_DRAFT, Draft, SequenceView, trees

SOURCE = "prompt-lookup"
CANDIDATES = 64  # how many occurrences of one n-gram are looked at, the most recent ones

_ANCHOR = 4  # runs of this length are looked up first: common short ones would hide old long matches
_STEP = 32  # tokens that are compared at once, at first
_SUREST = 32  # a longer match says no more of the next token
_END = -1  # stands between references: never in a query, never proposed


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupOptions(Options):
    """Which matches count, and which of several is copied."""

    max_ngram: int = option(1 << 20, "matches longer than this count as this long", low=1, high=1 << 20)
    min_ngram: int = option(1, "fewest tokens that must match", low=1, high=256)
    pick: str = option("recent", "which occurrence to copy from", choices=("recent", "leftmost"))


class PromptLookup(OneByOne):
    """Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding).

    Proposes what followed the longest earlier match of the latest tokens, of ``min_ngram`` to ``max_ngram`` tokens,
    in the request's references, its prompt and its output. Among equally long matches ``pick`` takes the most recent
    or the leftmost. For an n-gram that occurs more than `CANDIDATES` times only the latest occurrences are searched.

    The authors' setting is ``max_ngram=3,min_ngram=1,pick=leftmost,k=10,policy=fixed``.
    """

    def __init__(self, resources: Resources, options: PromptLookupOptions) -> None:
        if options.min_ngram > options.max_ngram:
            raise UsageError(
                f"strategy {SOURCE}: min_ngram {options.min_ngram} is more than max_ngram {options.max_ngram}"
            )
        self._longest = options.max_ngram
        shortest = options.min_ngram
        self._sizes = sorted({shortest, max(shortest, min(_ANCHOR, options.max_ngram))}, reverse=True)
        self._leftmost = options.pick == "leftmost"
        self._texts: dict[int, _CopiedText] = {}

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        text = self._texts.get(view.sequence)
        if text is None or text.references != view.request.references:
            text = self._texts[view.sequence] = _CopiedText(self._sizes, view.request.references)
        text.follow(view.tokens)
        place, length = text.match(self._longest, self._leftmost)
        if length == 0:
            return NO_DRAFT
        tokens = text.copy(place, budget)
        return trees.chain(tokens, SOURCE, _scores(min(length, _SUREST), len(tokens)))

    def release(self, sequence: int) -> None:
        self._texts.pop(sequence, None)


@lru_cache(maxsize=1024)
def _scores(matched: int, count: int) -> tuple[float, ...]:
    """Chance that a copy goes on after n matching tokens; measured on edits and answers, .33 to .95."""
    return tuple(matching / (matching + 2) for matching in range(matched, matched + count))


class _CopiedText:
    """What may be copied for one sequence: its references, each closed by `_END`, then the sequence itself."""

    def __init__(self, sizes: Sequence[int], references: tuple[tuple[int, ...], ...]) -> None:
        self.references = references
        self._sizes = sizes
        self._history = History()
        self._tokens = array("i")
        self._places = [_Places(size) for size in self._sizes]
        for reference in self.references:
            start = len(self._tokens)
            self._tokens.extend(reference)
            for places in self._places:
                places.index(self._tokens, start)
            self._tokens.append(_END)
        self._start = len(self._tokens)
        self._match = 0, 0
        """The last one, as far as it is still one: `match` says of what."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Take back what the sequence no longer has (inside a cascade: what was drafted), append what is new in it."""
        history = self._history
        agreed = history.agree(tokens)
        if agreed < len(history.tokens):
            self._cut(agreed)
        new = tokens[agreed:]
        history.tokens.extend(new)
        self._append(array("i", new))

    def _cut(self, length: int) -> None:
        for places in self._places:
            places.cut(self._tokens, self._start + length)
        del self._tokens[self._start + length :]
        self._history.cut(length)
        self._match = 0, 0

    def _append(self, new: array[int]) -> None:
        """A match that the new tokens prolong is the longest again, and needs no search: others grew no faster.

        Not a short one, beside which a longer one may have been overlooked, nor one without a token after it.
        """
        (place, length), text, count = self._match, self._tokens, len(new)
        text.extend(new)
        prolonged = length >= self._sizes[0] and text[place : place + count] == new and text[place + count] != _END
        self._match = (place + count, length + count) if prolonged else (0, 0)

    def match(self, longest: int, leftmost: bool) -> tuple[int, int]:
        """Where what followed the longest match begins, and the length of the match; 0 without one."""
        if not 0 < self._match[1] < longest:  # of equals that reach the limit it may not be the one to pick
            self._match = self._search(min(longest, len(self._history.tokens)), leftmost)
        return self._match

    def _search(self, longest: int, leftmost: bool) -> tuple[int, int]:
        best, length = 0, 0
        for places in self._places:  # the second is only kept up when the first knows nothing
            places.index(self._tokens, self._start)
            for place in places.of(self._tokens, longest):
                if not leftmost and length >= min(longest, place):
                    break  # no earlier place can have more before it
                found = self._match_length(place, places.size, longest)
                if found > length or (leftmost and found == length):
                    best, length = place, found
            if length:
                break
        return best, length

    def _match_length(self, place: int, known: int, longest: int) -> int:
        """How many tokens before ``place`` equal the latest ones, given that ``known`` do."""
        text, end, longest = self._tokens, len(self._tokens), min(longest, place)
        step, growing = _STEP, True
        while step and known < longest:
            ahead = min(longest, known + step)
            same = text[place - ahead : place - known] == text[end - ahead : end - known]
            known, growing = (ahead, growing) if same else (known, False)
            step = 2 * step if growing else step // 2
        return known

    def copy(self, place: int, budget: int) -> list[int]:
        tokens = self._tokens[place : place + budget].tolist()
        return tokens[: tokens.index(_END)] if self._start and _END in tokens else tokens


class _Places:
    """The places that follow each n-gram of one size, most recent first.

    An n-gram is indexed when the token after it is known, so the latest one never finds itself. Keys are the bytes of
    its tokens: one piece of memory each, where a tuple would be five, that are as far apart as they are old.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._latest: dict[bytes, int] = {}
        self._earlier = array("q")  # place -> the previous place with the same n-gram before it, or -1

    def index(self, text: array[int], start: int) -> None:
        """Take in what was appended to ``text``; an n-gram lies within the part that begins at ``start``."""
        latest, known, end = self._latest, len(self._earlier), len(text)
        first = max(known, start + self.size)
        if first > known:
            self._earlier.extend([-1] * (min(first, end) - known))
        before, note = latest.get, self._earlier.append
        width, run = text.itemsize, self.size * text.itemsize
        tokens = text[first - self.size : end].tobytes()
        for place, at in enumerate(range(0, (end - first) * width, width), first):
            key = tokens[at : at + run]
            note(before(key, -1))
            latest[key] = place

    def cut(self, text: array[int], length: int) -> None:
        """Forget the places from ``length`` on, the last ones first; ``text`` still has their tokens."""
        for place in range(len(self._earlier) - 1, length - 1, -1):
            before = self._earlier.pop()
            key = text[place - self.size : place].tobytes()
            if self._latest.get(key) == place:
                if before < 0:
                    del self._latest[key]
                else:
                    self._latest[key] = before

    def of(self, text: array[int], longest: int) -> Iterator[int]:
        """Places after occurrences of the latest n-gram, if the sequence is that long."""
        place = self._latest.get(text[-self.size :].tobytes(), -1) if self.size <= longest else -1
        for _ in range(CANDIDATES):
            if place < 0:
                return
            yield place
            place = self._earlier[place]
