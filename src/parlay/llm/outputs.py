"""Results of `LLM`: vLLM's result classes, with strategy, exactness and metrics added."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import overload

from parlay.llm.notebook_html import runs, shown
from parlay.llm.voting import VoteOutput
from parlay.types import Exactness, FinishReason, Metrics, Origin, ParlayError, Tokenizer, TokenLogprobs

DecodeToken = Callable[[int], str | None]
"""Returns the text of one token; None without a tokenizer."""


def token_decoder(tokenizer: Tokenizer | None) -> DecodeToken:
    """Make a function that decodes single tokens. It is not a method, so a copied result does not copy the model."""

    def decode(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token])

    return decode


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of a token, its rank (1 = most likely) and its text, as in vLLM."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Logprobs(Sequence[dict[int, Logprob]]):
    """One dict per token, as in vLLM: the token itself, then the likeliest tokens, by id. Dicts are made on access.

    ``entries``: the data that the dicts are made from.
    """

    entries: tuple[TokenLogprobs, ...]
    _decode_token: DecodeToken = field(compare=False)

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, place: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[int, Logprob]]: ...
    def __getitem__(self, place: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob]]:
        if isinstance(place, slice):
            return [self._by_id(entry) for entry in self.entries[place]]
        return self._by_id(self.entries[place])

    def __reduce__(self) -> tuple[type[Logprobs], tuple[tuple[TokenLogprobs, ...], DecodeToken]]:
        """Pickle with the texts of the tokens instead of the tokenizer."""
        ids = {token for entry in self.entries for token in (entry.token, *(other for other, _ in entry.top))}
        return Logprobs, (self.entries, {token: self._decode_token(token) for token in ids}.get)

    def __repr__(self) -> str:
        return _few(self)

    def _by_id(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        likeliest = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)]
        chosen_first = [(entry.token, entry.logprob, entry.rank), *likeliest]
        return {token: Logprob(logprob, rank, self._decode_token(token)) for token, logprob, rank in chosen_first}


@dataclass(frozen=True, slots=True, repr=False)
class PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """`Logprobs` of a prompt's tokens; the first is None, because nothing predicts it."""

    rest: Logprobs
    """Log-probabilities of all tokens but the first."""

    @property
    def entries(self) -> tuple[TokenLogprobs | None, ...]:
        return (None, *self.rest.entries)

    def __len__(self) -> int:
        return 1 + len(self.rest)

    @overload
    def __getitem__(self, place: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, place: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        if isinstance(place, slice):
            return [None, *self.rest][place]
        at = range(len(self))[place]
        return self.rest[at - 1] if at else None

    def __repr__(self) -> str:
        return _few(self)


def _few(entries: Sequence[object]) -> str:
    """The first two entries, and how many more there are."""
    first = ", ".join(map(repr, entries[:2]))
    return f"[{first}{f', and {len(entries) - 2} more' if len(entries) > 2 else ''}]"


@dataclass(frozen=True, slots=True)
class PredictionUse:
    """How many tokens a prediction saved one sample. For several samples, add the counts up.

    ``accepted``: output tokens that were drafted from the prediction. A strategy that copies from it as from any other
    text accepts none. ``rejected``: the length of the prediction less ``accepted``; 0 if a part was copied twice. The
    one token per step that the target writes itself is not accepted: even if the prediction is the whole answer, up to
    one token per step is rejected.
    """

    accepted: int
    rejected: int


@dataclass(frozen=True, slots=True)
class Attribution:
    """A part of the text that comes mostly from a datastore: ``tokens`` tokens of a document, from ``position`` on.

    ``share``: the mean part of their probability that the datastore gave.
    """

    text: str
    document: str
    position: int
    tokens: int
    share: float


def attributed(text: str, ends: Sequence[int], origins: Sequence[Origin | None]) -> tuple[Attribution, ...]:
    """The runs of consecutive tokens of one document to which the datastore gave at least half of their probability."""
    found: list[Attribution] = []
    for number, run in groupby(enumerate(origins), key=_run_of()):
        places = [place for place, _ in run]
        first = origins[places[0]]
        if number is None or first is None:
            continue
        begin, end = ends[places[0] - 1] if places[0] else 0, ends[places[-1]]
        shares = [origin.share for place in places if (origin := origins[place]) is not None]
        mean = sum(shares) / len(shares)
        found.append(Attribution(text[begin:end], first.document, first.position, len(places), mean))
    return tuple(found)


def _run_of() -> Callable[[tuple[int, Origin | None]], int | None]:
    """Make a function that numbers the runs as tokens come; None for tokens outside of runs."""
    last: Origin | None = None
    runs = 0

    def number(item: tuple[int, Origin | None]) -> int | None:
        nonlocal last, runs
        origin = item[1] if item[1] is not None and item[1].share >= 0.5 else None
        if origin is not None and (last is None or (last.document, last.position + 1) != origin[:2]):
            runs += 1
        last = origin
        return runs if origin is not None else None

    return number


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CompletionOutput:
    """One sample. ``seed`` and ``index`` (the sample index) reproduce it, whatever the strategy."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: Logprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    strategy: str
    exactness: Exactness
    seed: int
    sources: tuple[str, ...]
    """Per token: the drafter that proposed it, or ``target``."""
    writers: tuple[str, ...] = ()
    """Per token: who chose it. A model of an ensemble, a drafter whose tokens a lossy rule took, or ``target``. Empty
    if the target chose all."""
    origins: tuple[Origin | None, ...] = ()
    """Per token: the place in the datastore that it may come from, if the target mixes one in."""
    text_ends: tuple[int, ...] = ()
    """Per token: the length of the text up to and including it. If a stop string was cut off, the last ones exceed the
    text."""
    metrics: Metrics
    error: str | None = None
    prediction: PredictionUse | None = None
    """None if the request had no prediction."""

    def finished(self) -> bool:
        """Always True, because outputs are made when a sample has ended. As in vLLM."""
        return True

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The text in runs with one source and one writer each."""
        both = list(zip(self.sources, self.writers or [""] * len(self.sources), strict=True))
        return tuple(Piece(text, source, writer) for text, (source, writer) in runs(self.text, self.text_ends, both))

    @property
    def attributions(self) -> tuple[Attribution, ...]:
        """The parts of the text that come mostly from the datastore, with their document and position there."""
        ends = self.text_ends or [0] * len(self.token_ids)  # there is no text without a tokenizer
        return attributed(self.text, ends, self.origins)

    def __repr__(self) -> str:
        return f"CompletionOutput({_short(self.text)}, {self._facts()})"

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show."""
        return shown(self.text, self.text_ends, self.sources, "", self._facts(), writers=self.writers)

    def _facts(self) -> str:
        rate = f"{self.metrics.steps} steps, {self.metrics.tokens_per_step:.2f} tokens per step"
        ended = self.error or self.finish_reason
        return f"{len(self.token_ids)} tokens in {rate}, {self.strategy}, {self.exactness}, seed {self.seed}, {ended}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsAhead:
    """Counts of a text whose steps a small model drafted ahead: ``accepted`` of ``drafted`` steps, over ``rounds``.

    ``draft_seconds``: time that drafting the steps took.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RequestOutput:
    """One prompt and its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: PromptLogprobs | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    vote: VoteOutput | None = None
    """The outcome, if the samples are chains of thought that voted."""
    ahead: StepsAhead | None = None
    """Counts of drafted steps, if a small model drafted some ahead."""

    @property
    def metrics(self) -> Metrics:
        """The engine's counts for the first sample, under vLLM's name."""
        return self.outputs[0].metrics

    @property
    def errors(self) -> list[str]:
        """The reasons why samples, or their vote, failed."""
        found = [*(sample.error for sample in self.outputs), None if self.vote is None else self.vote.error]
        return [error for error in found if error]

    @property
    def chosen(self) -> CompletionOutput:
        """The sample that won the vote, or the first if there was no vote."""
        return self.outputs[0 if self.vote is None else self.vote.index]

    @property
    def num_cached_tokens(self) -> int:
        """How many prompt tokens were cached already."""
        return self.outputs[0].metrics.cached_tokens

    def __repr__(self) -> str:
        prompt = f"{len(self.prompt_token_ids)} token ids" if self.prompt is None else _short(self.prompt)
        return f"RequestOutput(prompt={prompt}, outputs={[*self.outputs]})"

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show."""
        heading = f"{len(self.prompt_token_ids)} token ids" if self.prompt is None else _cut(self.prompt, 300)
        return "".join(
            shown(
                each.text, each.text_ends, each.sources, "" if place else heading, each._facts(), writers=each.writers
            )
            for place, each in enumerate(self.outputs)
        )


class RequestOutputs(list[RequestOutput]):
    """The outputs of a call: a list, which notebooks show output by output. ``seconds``: duration of the call."""

    def __init__(self, outputs: Sequence[RequestOutput], seconds: float = 0.0) -> None:
        super().__init__(outputs)
        self.seconds = seconds

    @property
    def tokens_per_second(self) -> float:
        """All output tokens of the call per second; 0 if the duration is not known."""
        tokens = sum(len(sample.token_ids) for output in self for sample in output.outputs)
        return tokens / self.seconds if self.seconds else 0.0

    def _repr_html_(self) -> str:
        return "".join(output._repr_html_() for output in self)


def _short(text: str) -> str:
    return repr(_cut(text, 60))


def _cut(text: str, most: int) -> str:
    """The text, with its end left out if it is long."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


class RequestFailed(ParlayError):
    """Some samples failed. ``outputs`` holds every request's output; a failed sample's ``error`` says why."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text, with the source, writer and origin of its token, if known."""

    text: str
    source: str
    writer: str = ""
    origin: Origin | None = None


@dataclass(frozen=True, slots=True, repr=False)
class StreamEvent:
    """Tokens and text that a step added to a sample. The last event of the last sample carries the whole output."""

    index: int
    pieces: tuple[Piece, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None

    @property
    def text(self) -> str:
        return "".join([piece.text for piece in self.pieces])

    def __repr__(self) -> str:
        ended = f", {self.finish_reason}" if self.finish_reason else ""
        return f"StreamEvent({self.text!r}, sample {self.index}, {len(self.token_ids)} tokens{ended})"


def joined(events: Collection[StreamEvent]) -> list[StreamEvent]:
    """The same news as one event per sample, in the order of the samples' last events."""
    if len(events) < 2:
        return list(events)
    by_sample: dict[int, list[StreamEvent]] = {}
    for event in events:
        own = by_sample.pop(event.index, [])
        own.append(event)
        by_sample[event.index] = own  # now the last
    return [_one(own) for own in by_sample.values()]


def _one(events: list[StreamEvent]) -> StreamEvent:
    pieces = tuple(piece for event in events for piece in event.pieces)
    token_ids = tuple(token for event in events for token in event.token_ids)
    return StreamEvent(events[0].index, pieces, token_ids, events[-1].finish_reason, events[-1].output)
