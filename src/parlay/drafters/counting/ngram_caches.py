"""Lookup decoding (llama.cpp's `lookup`): three caches of n-gram counts, each with its own thresholds."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from parlay.drafters.counting.counted_texts import CountedTexts
from parlay.drafters.counting.ngram_lm import open_ngrams
from parlay.drafters.per_sequence import OneByOne
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import most_tenants
from parlay.drafters.step_budget import STEP_TOKENS
from parlay.ngrams.in_context import Favourite, NgramCounts
from parlay.ngrams.model import NgramModel
from parlay.options import Options, UsageError, option
from parlay.types import Draft, Needs, Observation, SequenceView, trees

SOURCE = "lookup-decoding"
LONGEST = 4  # tokens of the longest n-gram
_PIECE = 256  # how many tokens of a past text are counted at a time

Bars = tuple[tuple[int, int], ...]
"""Per n = 1, 2, ...: how often the n-gram must have been seen, and the favourite's share of that in percent."""

LAX: Bars = ((2, 66), (2, 50), (1, 50), (1, 50))
STRICT: Bars = ((4, 75), (3, 66), (2, 66), (2, 66))

_PAIR = 2  # tokens in a lookup in the corpus
_WIDEST = 32  # how many of its followers are considered, the most frequent ones
_CORPUS_WEIGHT = 100  # factor on a token's count in the corpus, if it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramCachesOptions(Options):
    """Options of the n-gram caches: which texts are counted besides the request itself."""

    static: str = option("", "n-gram model with counts, made by parlay ngram build --counts; empty: none", opens=True)
    remember: int = option(
        200_000,
        "tokens of past requests to keep; if there are more, the tenant with most loses its oldest",
        low=0,
        high=10_000_000,
        keeps=True,
    )


class NgramCaches(OneByOne):
    """Lookup decoding, after the program `lookup` of llama.cpp (github.com/ggml-org/llama.cpp; there is no paper).

    Counts what followed each n-gram of 1 to 4 tokens in this request (*context*) and in past requests of the same
    tenant (*dynamic*), and reads from a file what follows pairs of tokens in a corpus (*static*). A draft is written
    token by token, and drafted tokens are part of the next query. The next token is the most frequent follower of the
    longest n-gram that passes the `LAX` thresholds in the context; failing that, the `STRICT` ones in the dynamic
    cache; failing that, the lax ones of a pair in the static cache. If the static cache has followers of the last pair,
    the candidates of the other caches are weighted by 100 times their count in it. If nothing passes, the draft ends.

    ``static`` names a model of `parlay ngram build` that kept its counts; of each pair the 32 most frequent followers
    are looked at. The dynamic cache learns the text of a request when it ends, unless the request says ``store=False``,
    and holds ``remember`` tokens in all, of which the tenant that has most loses its oldest text first. A token takes
    up to 800 bytes there.
    """

    needs = Needs()

    def __init__(self, resources: Resources, options: NgramCachesOptions) -> None:
        self._static = _corpus(options.static, resources) if options.static else None
        self._past = PastTexts(options.remember, resources.vocab_size)
        self._contexts = CountedTexts(LONGEST, resources.vocab_size, resources.room)
        self._views: dict[int, SequenceView] = {}

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._contexts.begin(budgets)
        self._past.advance()
        return super().propose(views, budgets)

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        caches = [(self._contexts.of(view), LAX)]
        past = self._past.of(view.request.salt)
        if past is not None:
            caches.append((past, STRICT))
        return _write(list(view.tokens[-LONGEST:]), caches, self._static, budget)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Remembers the views, to learn their committed tokens when the sequences end."""
        for observation in observations:
            self._views[observation.view.sequence] = observation.view

    def release(self, sequence: int) -> None:
        self._contexts.release(sequence)
        view = self._views.pop(sequence, None)
        if view is not None and view.request.store:
            self._past.learn(view.request.salt, view.tokens)


@dataclass(slots=True)
class _PastTexts:
    """The counts of one tenant's past texts, the oldest first."""

    counts: NgramCounts
    texts: deque[array[int]] = field(default_factory=deque)
    tokens: int = 0


class PastTexts:
    """The counts of each tenant's past texts, at most ``room`` tokens for all tenants together.

    A long text is counted, and forgotten, over several steps. If there are too many tokens, the tenant with the most
    loses its oldest text. If there are too many tenants (`most_tenants`), the one without a new text for longest is
    dropped.
    """

    def __init__(self, room: int, vocab_size: int) -> None:
        self._room = room
        self._vocab_size = vocab_size
        self._tenants: dict[str, _PastTexts] = {}  # the latest to learn last
        self._num_tokens = 0
        self._waiting: deque[tuple[str, array[int]]] = deque()
        self._work: Iterator[int] = iter(())

    def of(self, salt: str) -> NgramCounts | None:
        tenant = self._tenants.get(salt)
        return tenant.counts if tenant is not None else None

    def learn(self, salt: str, tokens: Sequence[int]) -> None:
        """Queue a text, or as much of its end as there is room for, to be counted. Dropped if too much is waiting."""
        text = array("i", tokens[max(0, len(tokens) - self._room) :])
        if len(text) > 1 and sum([len(waiting) for _, waiting in self._waiting]) <= self._room:
            self._waiting.append((salt, text))
        self.advance()

    def advance(self) -> None:
        """Count and forget what is due, at most `STEP_TOKENS` tokens."""
        done = 0
        while done < STEP_TOKENS:
            piece = next(self._work, 0)
            done += piece
            if not piece:
                if not self._waiting:
                    return
                self._work = self._learning(*self._waiting.popleft())

    def _learning(self, salt: str, text: array[int]) -> Iterator[int]:
        """Count a text piece by piece. Yields how many tokens each piece has."""
        tenant = self._tenants.pop(salt, None) or _PastTexts(NgramCounts(LONGEST, self._vocab_size))
        self._tenants[salt] = tenant
        if len(self._tenants) > most_tenants(self._room):
            self._num_tokens -= self._tenants.pop(next(iter(self._tenants))).tokens
        for start in range(0, len(text), _PIECE):
            tenant.counts.add(text[: start + _PIECE], start, array("i"))
            yield _PIECE
        tenant.texts.append(text)
        tenant.tokens += len(text)
        self._num_tokens += len(text)
        while self._num_tokens > self._room:
            yield from self._forgetting(max(self._tenants, key=lambda each: self._tenants[each].tokens))

    def _forgetting(self, salt: str) -> Iterator[int]:
        """Forget the tenant's oldest text, piece by piece."""
        tenant = self._tenants[salt]
        text = tenant.texts.popleft()
        for start in reversed(range(0, len(text), _PIECE)):
            tenant.counts.remove(text[: start + _PIECE], start, None)
            yield _PIECE
        tenant.tokens -= len(text)
        self._num_tokens -= len(text)
        if not tenant.texts:
            del self._tenants[salt]


def _corpus(file: str, resources: Resources) -> NgramModel:
    """Open the static cache. Raises UsageError for a model without counts of what follows pairs."""
    model = open_ngrams(f"strategy {SOURCE}", file, resources)
    if not model.counts or model.order <= _PAIR:
        raise UsageError(
            f"strategy {SOURCE}: static={file} has no counts of {_PAIR + 1} tokens: build it with --counts and "
            f"--order {_PAIR + 1} or more"
        )
    return model


def _write(
    latest: list[int], caches: Sequence[tuple[NgramCounts, Bars]], static: NgramModel | None, budget: int
) -> Draft:
    """The draft after ``latest``, the last tokens of the text."""
    tokens: list[int] = []
    scores: list[float] = []
    own = caches[0][0]
    window = own.window(latest)
    while len(tokens) < budget:
        total, corpus = static.counted(latest[-_PAIR:], _WIDEST) if static and len(latest) >= _PAIR else (0, {})
        size = min(LONGEST, len(latest))
        guess = _guess(caches, window, size, corpus) or _corpus_guess(total, corpus)
        if guess is None:
            break
        token, score = guess
        tokens.append(token)
        scores.append(score)
        latest.append(token)
        window = own.shift(window, token)
    return trees.chain(tokens, SOURCE, scores)


def _guess(
    caches: Sequence[tuple[NgramCounts, Bars]], window: int, size: int, corpus: dict[int, int]
) -> tuple[int, float] | None:
    """The token that passes the thresholds of the first cache in which one does, and its score."""
    for counts, bars in caches:
        for length in range(size, 0, -1):
            found = counts.favourite(window, length)
            if found is None:
                continue
            least, percent = bars[length - 1]
            # If the favourite does not pass, no other token can.
            if found.total < least or 100 * found.times < percent * found.total:
                continue
            if corpus:
                found = _weighed(counts, window, length, found, corpus)
                if 100 * found.times < percent * found.total:
                    continue
            return found.token, found.chance(length)
    return None


def _weighed(counts: NgramCounts, window: int, length: int, favourite: Favourite, corpus: dict[int, int]) -> Favourite:
    """The follower with the greatest weight. Followers that the corpus lacks weigh at most as much as the favourite."""
    token, times, total = favourite
    heaviest = times * (_CORPUS_WEIGHT * corpus[token] if token in corpus else 1)
    for other, known in corpus.items():
        seen = counts.count(window, length, other)
        if seen * _CORPUS_WEIGHT * known > heaviest:
            token, times, heaviest = other, seen, seen * _CORPUS_WEIGHT * known
    return Favourite(token, times, total)


def _corpus_guess(total: int, corpus: dict[int, int]) -> tuple[int, float] | None:
    """The corpus's own guess: it lists the most frequent follower first."""
    token = next(iter(corpus), None)
    least, percent = LAX[1]
    if token is None or total < least or 100 * corpus[token] < percent * total:
        return None
    return token, Favourite(token, corpus[token], total).chance(2)
