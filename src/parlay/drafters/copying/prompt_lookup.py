"""Prompt lookup decoding (Saxena 2023): drafts what followed the latest tokens earlier."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice

from parlay.drafters.copying.ngram_index import Shared, Texts
from parlay.drafters.per_sequence import History, OneByOne
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateBytes
from parlay.drafters.step_budget import StepBudget
from parlay.options import Options, UsageError, option
from parlay.types import NO_DRAFT, Draft, SequenceView, trees

SOURCE = "prompt-lookup"
CANDIDATES = 64  # the most occurrences of one n-gram that are compared, the most recent ones

_ANCHOR = 4  # runs of this length are looked up first: common short ones would hide old long matches
_STEP = 32  # how many tokens are compared at once, at first
_SUREST = 32  # longer matches make the next token no surer
_END = -1  # ends each reference; never in a query, never proposed
_PLACE_BYTES = 110  # per token and n-gram size: 60 in code, 113 for random ids


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupOptions(Options):
    """Options of prompt lookup: which matches count, and which of several is copied."""

    max_ngram: int = option(1 << 20, "longest match that is looked for", low=1, high=1 << 20)
    min_ngram: int = option(1, "minimum tokens of a match", low=1, high=256)
    pick: str = option("recent", "which of several matches to copy from", choices=("recent", "leftmost"))


class PromptLookup(OneByOne):
    """Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding).

    Proposes what followed the longest earlier match of the latest tokens, of ``min_ngram`` to ``max_ngram`` tokens,
    in the request's references, its prompt and its output. Among equally long matches ``pick`` takes the most recent
    or the leftmost. For an n-gram that occurs more than `CANDIDATES` times only the latest occurrences are searched.
    Long texts are indexed in the course of several steps (`StepBudget`), references once for all samples of a request.

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
        self._step = StepBudget(resources.room, _PLACE_BYTES)
        self._references = Shared(partial(_References, self._sizes), resources.room)
        self._texts: dict[int, _CopiedText] = {}
        self._bytes = StateBytes(resources.room, self._texts)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._step.begin(budgets)
        return super().propose(views, budgets)

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        text, references = self._texts.get(view.sequence), self._references.of(view.sequence, view.request.references)
        if text is None or text.references is not references:
            text = self._texts[view.sequence] = _CopiedText(self._sizes, references)
        text.follow(view.tokens)
        source, place, length = text.match(self._longest, self._leftmost, self._step)
        self._bytes.set(view.sequence, text.nbytes)
        self._references.count(references)
        if length == 0:
            return NO_DRAFT
        tokens = source.copy(place, budget)
        return trees.chain(tokens, SOURCE, _scores(min(length, _SUREST), len(tokens)))

    def release(self, sequence: int) -> None:
        self._texts.pop(sequence, None)
        self._bytes.release(sequence)
        self._references.release(sequence)


@lru_cache(maxsize=1024)
def _scores(matched: int, count: int) -> tuple[float, ...]:
    """Probability that a copy continues after n matching tokens; measured on edits and answers, .33 to .95."""
    return tuple(matching / (matching + 2) for matching in range(matched, matched + count))


class _IndexedText:
    """Tokens, and for each n-gram size the places of the n-grams indexed so far."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.tokens = array("i")
        self.places = [_Places(size) for size in sizes]
        self.unindexed = 0
        """How many tokens are still to be indexed, summed over the sizes."""

    @property
    def nbytes(self) -> int:
        return sum([places.known for places in self.places]) * _PLACE_BYTES

    def index(self, most: int) -> int:
        """Index up to ``most`` tokens, first for the first n-gram size. Returns how many were indexed."""
        done = 0
        for places in self.places:
            done += places.index(self.tokens, most - done)
        self.unindexed -= done
        return done

    def copy(self, place: int, budget: int) -> list[int]:
        """Up to ``budget`` tokens from ``place`` on, within its part of the text."""
        tokens = self.tokens[place : place + budget].tolist()
        return tokens[: tokens.index(_END)] if _END in tokens else tokens


class _References(_IndexedText):
    """The references of one request, each ended by `_END`. They are read piece by piece as they are indexed."""

    def __init__(self, sizes: Sequence[int], texts: Texts) -> None:
        super().__init__(sizes)
        self.texts = texts
        self.unindexed = (sum(map(len, texts)) + len(texts)) * len(sizes)
        self._unread = chain.from_iterable((*text, _END) for text in texts)

    def index(self, most: int) -> int:
        self.tokens.extend(islice(self._unread, most // len(self.places)))
        return super().index(most)


class _CopiedText(_IndexedText):
    """The texts to copy from for one sequence: the sequence itself, and its references."""

    def __init__(self, sizes: Sequence[int], references: _References) -> None:
        super().__init__(sizes)
        self.references = references
        self._history = History()
        self._match: tuple[_IndexedText, int, int] = self, 0, 0
        """The last one, as far as it is still one: `match` says of what."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Drop tokens that the sequence no longer has (in a cascade, drafted ones), and append its new ones."""
        history = self._history
        agreed = history.agree(tokens)
        if agreed < len(history.tokens):
            for places in self.places:
                places.cut(self.tokens, agreed)
            del self.tokens[agreed:]
            self.unindexed = sum([agreed - places.known for places in self.places])
            history.cut(agreed)
            self._match = self, 0, 0
        new = tokens[agreed:]
        history.tokens.extend(new)
        self._append(array("i", new))

    def _append(self, new: array[int]) -> None:
        """Append new tokens. If they extend the last match, it is still the longest, and no search is needed.

        This does not hold for a short match, beside which a longer one may have been missed, nor for a match without a
        next token: that may be the end of a reference, or of the part read so far.
        """
        (source, place, length), count = self._match, len(new)
        self.tokens.extend(new)
        self.unindexed += count * len(self.places)
        text, after = source.tokens, place + count
        goes_on = after < len(text) and text[after] != _END
        prolonged = goes_on and length >= self.places[0].size and text[place:after] == new
        self._match = (source, after, length + count) if prolonged else (self, 0, 0)

    def match(self, longest: int, leftmost: bool, step: StepBudget) -> tuple[_IndexedText, int, int]:
        """The longest match: the text that has it, the place after it there, and its length; 0 without a match.

        Nothing is indexed while a match continues: it needs no search, and the copied tokens are indexed at their
        source.
        """
        if 0 < self._match[2] < longest:  # at the limit, another match of the same length may be the one to pick
            step.skip()
        else:
            self._catch_up(step)
            self._match = self._search(min(longest, len(self.tokens)), leftmost)
        return self._match

    def _catch_up(self, step: StepBudget) -> None:
        """Index as much as this step allows, the sequence first."""
        most = step.take(self.unindexed + self.references.unindexed)
        most -= self.index(most)
        if most:
            self.references.index(most)

    def _search(self, longest: int, leftmost: bool) -> tuple[_IndexedText, int, int]:
        best: tuple[_IndexedText, int, int] = self, 0, 0
        sources: list[_IndexedText] = [self, self.references] if self.references.tokens else [self]
        for size in range(len(self.places)):
            for source in sources:
                for place in source.places[size].of(source.tokens, self.tokens, longest):
                    length = best[2]
                    if not leftmost and length >= min(longest, place):
                        break  # no earlier place can have more before it
                    found = self._match_length(source.tokens, place, source.places[size].size, longest)
                    if found > length or (leftmost and found == length):
                        best = source, place, found
            if best[2]:
                break
        return best

    def _match_length(self, text: array[int], place: int, known: int, longest: int) -> int:
        """How many tokens of ``text`` before ``place`` equal the latest tokens; ``known`` of them do."""
        own, end, longest = self.tokens, len(self.tokens), min(longest, place)
        step, growing = _STEP, True
        while step and known < longest:
            ahead = min(longest, known + step)
            same = text[place - ahead : place - known] == own[end - ahead : end - known]
            known, growing = (ahead, growing) if same else (known, False)
            step = 2 * step if growing else step // 2
        return known


class _Places:
    """The places after each n-gram of one size, most recent first.

    An n-gram is indexed once the token after it is known, so the latest n-gram never finds itself. Keys are bytes of
    its tokens: one object each, where a tuple would be several, scattered in memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.known = 0
        """How many tokens of the text are indexed."""
        self._latest: dict[bytes, int] = {}
        self._earlier = array("q")  # place -> the previous place with the same n-gram before it, or -1

    def index(self, text: array[int], most: int) -> int:
        """Index up to ``most`` more tokens of ``text``. Returns how many."""
        latest, known = self._latest, self.known
        self.known = end = min(len(text), known + most)
        first = max(known, self.size)
        if first > known:
            self._earlier.extend([-1] * (min(first, end) - known))
        before, note = latest.get, self._earlier.append
        width, run = text.itemsize, self.size * text.itemsize
        tokens = text[first - self.size : end].tobytes()
        for place, at in enumerate(range(0, (end - first) * width, width), first):
            key = tokens[at : at + run]
            note(before(key, -1))
            latest[key] = place
        return end - known

    def cut(self, text: array[int], length: int) -> None:
        """Forget the places from ``length`` on, the last ones first. ``text`` must still have their tokens."""
        self.known = min(self.known, length)
        for place in range(len(self._earlier) - 1, length - 1, -1):
            before = self._earlier.pop()
            key = text[place - self.size : place].tobytes()
            if self._latest.get(key) == place:
                if before < 0:
                    del self._latest[key]
                else:
                    self._latest[key] = before

    def of(self, text: array[int], query: array[int], longest: int) -> Iterator[int]:
        """Places in ``text`` after occurrences of the last n-gram of ``query``, where a token follows."""
        place = self._latest.get(query[-self.size :].tobytes(), -1) if self.size <= longest else -1
        for _ in range(CANDIDATES):
            if place < 0:
                return
            if text[place] != _END:
                yield place
            place = self._earlier[place]
