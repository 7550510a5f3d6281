"""Results of `LLM`: vLLM's result shape, with the strategy, its exactness and the engine's metrics beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import overload

from parlay.llm.notebook_html import runs, shown
from parlay.llm.voting import VoteOutput
from parlay.types import Exactness, FinishReason, Metrics, Origin, ParlayError, Tokenizer, TokenLogprobs

DecodeToken = Callable[[int], str | None]
"""The text of one token; None without a tokenizer."""


def token_decoder(tokenizer: Tokenizer | None) -> DecodeToken:
    """Make a function that tells the texts of tokens. It is no method, so that a copy of a result copies no model."""

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
    """A dict for each token, as in vLLM: the token itself, then the likeliest ones, by id. Made when it is looked at.

    ``entries`` are what the dicts are made of.
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
        """Pickle with the texts of the tokens that are there in place of the tokenizer."""
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
    """`Logprobs` of a prompt's tokens. There is None for the first, which nothing predicts."""

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
    """The first ones in words."""
    first = ", ".join(map(repr, entries[:2]))
    return f"[{first}{f', and {len(entries) - 2} more' if len(entries) > 2 else ''}]"


@dataclass(frozen=True, slots=True)
class PredictionUse:
    """Counts what its prediction was worth to one sample, in tokens; over several samples, add them up.

    ``accepted``: tokens of the output that were drafted from the prediction. A strategy that copies from it as from any
    other text accepts none. ``rejected``: the length of the prediction less ``accepted``, and 0 if a part was copied
    twice. The one token per step that the target writes itself does not count as accepted. So a prediction that is the
    whole answer has as many rejected tokens as there were steps, or fewer.
    """

    accepted: int
    rejected: int


@dataclass(frozen=True, slots=True)
class Attribution:
    """A part of the text that is mostly from one place of a datastore: ``tokens`` of a document, from ``position`` on.

    ``share`` is the part of their probability that the datastore gave, in the mean.
    """

    text: str
    document: str
    position: int
    tokens: int
    share: float


def attributed(text: str, ends: Sequence[int], origins: Sequence[Origin | None]) -> tuple[Attribution, ...]:
    """The runs of tokens that follow each other in a document, which gave at least half of their probability."""
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
    """Number the runs as their tokens come; None for tokens of no run."""
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
    """One sample. ``seed`` reproduces it (with ``index`` as the sample index), whatever the strategy."""

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
    """Per token: whose choice it is. That is a model of an ensemble, a drafter whose tokens a lossy rule took, or
    ``target``. Empty where all tokens are the target's own choice."""
    origins: tuple[Origin | None, ...] = ()
    """Per token: the place of the datastore that it may be from, where the target mixes one in."""
    text_ends: tuple[int, ...] = ()
    """Per token: how long the text is with it. Where a stop string is cut off, the last ones are longer than it."""
    metrics: Metrics
    error: str | None = None
    prediction: PredictionUse | None = None
    """None where the request came without one."""

    def finished(self) -> bool:
        """True: outputs are made when they are over. As in vLLM."""
        return True

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The text as runs of one source and one writer each."""
        both = list(zip(self.sources, self.writers or [""] * len(self.sources), strict=True))
        return tuple(Piece(text, source, writer) for text, (source, writer) in runs(self.text, self.text_ends, both))

    @property
    def attributions(self) -> tuple[Attribution, ...]:
        """The parts of the text that come mostly from the datastore, with their document and position there."""
        ends = self.text_ends or [0] * len(self.token_ids)  # without a tokenizer there is no text
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
    """Rounds in which a text was written: in each, a small model proposed steps: ``drafted`` in all, of which so many
    stood. ``draft_seconds`` is what it took to write them.
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
    """The outcome, where the samples are chains of thought that voted."""
    ahead: StepsAhead | None = None
    """What a small model's steps were worth, where it drafted some ahead."""

    @property
    def metrics(self) -> Metrics:
        """The counts of the engine for the first sample, under vLLM's name."""
        return self.outputs[0].metrics

    @property
    def errors(self) -> list[str]:
        """The reasons why samples, or their vote, failed."""
        found = [*(sample.error for sample in self.outputs), None if self.vote is None else self.vote.error]
        return [error for error in found if error]

    @property
    def chosen(self) -> CompletionOutput:
        """The sample that won the vote; without one the first."""
        return self.outputs[0 if self.vote is None else self.vote.index]

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens of the prompt were found in the cache."""
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
    """The outputs of a call: a list, which notebooks show output by output. ``seconds``: how long the call decoded."""

    def __init__(self, outputs: Sequence[RequestOutput], seconds: float = 0.0) -> None:
        super().__init__(outputs)
        self.seconds = seconds

    @property
    def tokens_per_second(self) -> float:
        """All output tokens of the call over its time; 0 where the time is not known."""
        tokens = sum(len(sample.token_ids) for output in self for sample in output.outputs)
        return tokens / self.seconds if self.seconds else 0.0

    def _repr_html_(self) -> str:
        return "".join(output._repr_html_() for output in self)


def _short(text: str) -> str:
    return repr(_cut(text, 60))


def _cut(text: str, most: int) -> str:
    """The text, its end left out where it is long."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


class RequestFailed(ParlayError):
    """Some samples failed. ``outputs`` holds every request's output; a failed sample's ``error`` says why."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text, and of the token it came with the source, the writer and the origin, where these are known."""

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
    """The same news with one event for each sample, in the order of their last events."""
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
