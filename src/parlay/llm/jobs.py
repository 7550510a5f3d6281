"""Jobs under way: a prompt's samples, the results of their events, audits of lossy jobs, and the call lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from parlay.certificates.gate import CertificateFile, ExactnessChoice
from parlay.llm.outputs import (
    CompletionOutput,
    DecodeToken,
    Logprobs,
    Piece,
    PredictionUse,
    PromptLogprobs,
    RequestOutput,
    StepsAhead,
    StreamEvent,
)
from parlay.llm.voting import Ballot
from parlay.strategies.spelling import StrategySpec
from parlay.text.detokenizer import TextStream
from parlay.text.prompts import Ids, TokensPrompt
from parlay.text.reasoning import Thoughts
from parlay.types import TARGET, Event, Exactness, FinishReason, Metrics, Origin, ParlayError, Request, TokenLogprobs

if TYPE_CHECKING:
    from tqdm import tqdm

    from parlay.engine import Engine


@dataclass(slots=True)
class Sample:
    """One engine request under way, with its tokens and text so far."""

    request: Request
    text: TextStream | None
    strategy: str | StrategySpec
    decode_token: DecodeToken
    predicted: int = 0
    """Number of tokens of its prediction."""
    prediction_source: str = ""
    """The source name of tokens drafted from the prediction."""
    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    """Who chose the first tokens; the target chose the rest, if any."""
    origins: list[Origin | None] = field(default_factory=list)
    """One for each token, or empty."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each token that was decoded here, or empty."""
    last: Event | None = None
    released: str = ""
    """Text that the engine which wrote the first tokens has released already."""

    def resume(self, tokens: tuple[int, ...]) -> None:
        """Take tokens that another engine wrote, before the sample runs.

        Text, form and stops then are as they were there. Raises ValueError for tokens that the form forbids, or that
        end the answer.
        """
        request = self.request
        for count, token in enumerate(tokens, start=1):
            try:
                complete = request.constraint is not None and request.constraint.commit(token)
            except ParlayError as error:
                raise ValueError(f"the tokens written so far do not have the answer's form: {error}") from None
            stopped = self.text is not None and self.text.push(token) and count >= request.params.min_tokens
            if complete or stopped or token in request.stop_ids:
                raise ValueError(
                    f"the answer ended after {count} of the {len(tokens)} tokens written so far, so it can't go on"
                )
        self.request = replace(request, written=tokens)
        self.tokens += tokens
        self.sources += [TARGET] * len(tokens)
        self.origins += [None] * len(tokens)
        if self.text is not None:
            self.released = "".join(piece for _, piece in self.text.release(final=False))

    def take(self, event: Event) -> tuple[Piece, ...]:
        if event.committed.writers:
            self.writers += [*[TARGET] * (len(self.tokens) - len(self.writers)), *event.committed.writers]
        self.tokens += event.committed.tokens
        self.sources += event.committed.sources
        self.origins += event.committed.origins
        self.logprobs += event.committed.logprobs
        if event.finish_reason is not None:
            self.last = event
        if self.text is None:
            return ()
        released = self.text.release(final=event.finish_reason is not None)
        known = len(self.tokens)  # a failed step may have read tokens that it never reported
        origins = self.origins if len(self.origins) == known else [None] * known
        writers = self._all_writers
        return tuple(
            Piece(text, self.sources[index], writers[index] if writers else "", origins[index])
            for index, text in released
            if index < known
        )

    @property
    def whole_text(self) -> str:
        """The text written so far."""
        return self.text.text if self.text else ""

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens; 0 if the request does not want log-probabilities."""
        return sum(one.logprob for one in self.logprobs) / max(1, len(self.logprobs))

    @property
    def _all_writers(self) -> tuple[str, ...]:
        """The writer of each token; empty if the target wrote all."""
        return (*self.writers, *[TARGET] * (len(self.tokens) - len(self.writers))) if self.writers else ()

    def unknown(self, reason: FinishReason, error: str | None = None) -> Event:
        """The last event of a sample that the engine does not know, as if it had never begun: any exactness holds."""
        metrics = Metrics(str(self.strategy), Exactness.LOSSY if self.tokens else Exactness.BITS)
        return Event(self.request.id, finish_reason=reason, error=error, metrics=metrics)

    def output(self) -> CompletionOutput:
        event = self.last
        assert event is not None
        assert event.finish_reason is not None
        assert event.metrics is not None
        wanted = self.request.params.logprobs is not None
        return CompletionOutput(
            index=self.request.key.sample_index,
            text=self.whole_text,
            token_ids=tuple(self.tokens),
            cumulative_logprob=sum(p.logprob for p in self.logprobs) if wanted else None,
            logprobs=Logprobs(tuple(self.logprobs), self.decode_token) if wanted else None,
            finish_reason=event.finish_reason,
            stop_reason=(self.text.stop_reason if self.text else None) or event.stop_reason,
            strategy=str(self.strategy),
            exactness=event.metrics.exactness,
            seed=self.request.key.seed,
            sources=tuple(self.sources),
            writers=self._all_writers,
            origins=tuple(self.origins) if len(self.origins) == len(self.tokens) else (),
            text_ends=tuple(self.text.ends) if self.text else (),
            metrics=event.metrics,
            error=event.error,
            prediction=self._prediction(),
        )

    def _prediction(self) -> PredictionUse | None:
        if not self.predicted:
            return None
        accepted = self.sources.count(self.prediction_source)
        return PredictionUse(accepted, max(0, self.predicted - accepted))


def resume(samples: Sequence[Sample], written: Sequence[Ids]) -> None:
    """Let samples continue after tokens that another engine wrote.

    Raises ValueError for tokens that can't be resumed.
    """
    if len(written) != len(samples):
        raise ValueError(
            f"tokens of {len(written)} samples were given, but n is {len(samples)}: give one list for each"
        )
    for sample, tokens in zip(samples, written, strict=True):
        sample.resume(tokens)


@dataclass(slots=True)
class Job:
    """One prompt under way: its samples, in order."""

    id: str
    prompt: str | None
    samples: list[Sample]
    thoughts: Thoughts = "none"
    begins: bool = False
    """Whether the samples are texts of their own, and do not continue the prompt."""
    audit: Audit | None = None
    """Set if the first sample is lossy under a certificate and is to be compared with exact decoding."""
    vote: Ballot | None = None
    """Set if the samples are chains of thought that vote. It decides when each begins and when all may be stopped."""
    ahead: StepsAhead | None = None
    """Set when a text is complete whose steps a small model drafted ahead."""
    ended: Callable[[str, Metrics], None] | None = None
    """Called for each sample that ends, with the request's kind and the sample's metrics."""

    def due(self) -> Sequence[Sample]:
        """Samples to add to the engine now: all, or those that a vote begins now."""
        return self.samples if self.vote is None else [self.samples[chain] for chain in self.vote.due()]

    @property
    def finished(self) -> bool:
        return all(sample.last is not None for sample in self.samples)

    def output(self) -> RequestOutput:
        first = self.samples[0]
        known = first.last.prompt_logprobs if first.last is not None else None
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=first.request.prompt,
            prompt_logprobs=None
            if not known
            else PromptLogprobs(Logprobs(tuple(filter(None, known)), first.decode_token)),
            outputs=tuple(sample.output() for sample in self.samples),
            vote=None if self.vote is None else self.vote.output(),
            ahead=self.ahead,
        )

    def event(self, sample: Sample, event: Event) -> StreamEvent:
        pieces = sample.take(event)
        ids = event.committed.tokens
        if self.vote is not None and event.finish_reason is not None:
            chain, score = sample.request.key.sample_index, sample.mean_logprob
            self.vote.count(chain, sample.whole_text, event.finish_reason, score)
        if self.ended is not None and event.metrics is not None:
            self.ended(sample.request.kind, event.metrics)
        done = self.output() if self.finished else None
        return StreamEvent(sample.request.key.sample_index, pieces, ids, event.finish_reason, done)


@dataclass(frozen=True, slots=True)
class Audit:
    """How a lossy job is audited: ``twin`` makes the job that decodes its first sample exactly."""

    twin: Callable[[], Job]
    certificate: CertificateFile
    spec: StrategySpec

    def settle(self, lossy: Job, exact: Job) -> None:
        """Count the comparison, unless one of the answers was ended early."""
        first, second = lossy.samples[0], exact.samples[0]
        ends = [sample.last.finish_reason if sample.last is not None else None for sample in (first, second)]
        if all(end in ("stop", "length") for end in ends):
            self.certificate.audit(self.spec, first.tokens, second.tokens)


def audit_of(
    choice: ExactnessChoice,
    certificate: CertificateFile,
    first: Request,
    job: Callable[..., Job],
) -> Audit:
    """The audit of a lossy job for its certificate: ``job`` decodes the same prompt and sampling exactly."""
    assert isinstance(choice.strategy, StrategySpec)
    params = replace(first.params, n=1, seed=first.key.seed, truncate_prompt_tokens=None)
    prompt = TokensPrompt(prompt_token_ids=first.prompt)
    return Audit(partial(job, prompt, params), certificate, choice.strategy)


def audit(jobs: Iterable[Job], decode: Callable[[list[Job]], Iterable[object]]) -> None:
    """Run the audits that are due for finished jobs."""
    due = [(job, job.audit, job.audit.twin()) for job in jobs if job.audit is not None]
    for _ in decode([twin for _, _, twin in due]) if due else ():
        pass
    for job, way, twin in due:
        way.settle(job, twin)


def follow(events: Iterable[StreamEvent], shown: tqdm[Any]) -> float:
    """Consume all events, and show on a progress bar how many prompts are done and how fast.

    Returns the seconds taken.
    """
    began, read, written = time.perf_counter(), 0, 0
    for event in events:
        written += len(event.token_ids)
        if event.output is not None:
            read += len(event.output.prompt_token_ids)
            seconds = max(time.perf_counter() - began, 1e-9)
            rates = f"input: {read / seconds:.2f} toks/s, output: {written / seconds:.2f} toks/s"
            shown.set_postfix_str(f"est. speed {rates}", refresh=False)
            shown.update()
    return time.perf_counter() - began


def decoded(add: Callable[[Job], None], engine: Engine, lock: CallLock, jobs: Sequence[Job]) -> Generator[StreamEvent]:
    """Add the jobs' samples to the engine, and yield events until all have ended. Closing early aborts the rest."""
    by_id = {sample.request.id: (job, sample) for job in jobs for sample in job.samples}
    live = dict.fromkeys(by_id)
    with lock.decoding(engine):
        try:
            for job in jobs:
                add(job)
            while live:
                ended: list[Job] = []
                for event in engine.step():
                    job, sample = by_id[event.request]
                    if event.finish_reason is not None:
                        del live[event.request]
                        ended.append(job)
                    yield job.event(sample, event)
                for job in ended:
                    for event in _go_on(job, add, engine):
                        del live[event.request]
                        yield job.event(by_id[event.request][1], event)
        finally:
            for name in live:
                sample = by_id[name][1]
                sample.take(engine.abort(name) or sample.unknown("abort"))


def _go_on(job: Job, add: Callable[[Job], None], engine: Engine) -> Iterator[Event]:
    """After samples have ended, begin those that a vote still needs, or end those that it no longer needs."""
    if job.vote is not None and not job.vote.over:
        add(job)
    for sample in job.samples if job.vote is not None and job.vote.over else ():
        if sample.last is None:
            yield engine.abort(sample.request.id) or sample.unknown("abort")


class Stream(Iterator[StreamEvent]):
    """The events of one prompt. Closing it ends the request at once; `output` then holds what was generated."""

    def __init__(self, events: Generator[StreamEvent], job: Job) -> None:
        self._events = events
        self._job = job

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def close(self) -> None:
        self._events.close()

    @property
    def votes(self) -> bool:
        """Whether the samples vote, so that only the last event tells which text is the answer."""
        return self._job.vote is not None

    @property
    def output(self) -> RequestOutput:
        """The whole result, or after `close` the part that was generated. Raises ParlayError while decoding."""
        if not self._job.finished:
            raise ParlayError("the stream is under way: iterate to its end, or close it, before asking for its output")
        return self._job.output()


class CallLock:
    """Lets one call in at a time. A thread that would wait for its own earlier call gets an error instead."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make calls of other threads wait until the block ends.

        Raises ParlayError for a second call of this thread.
        """
        me = threading.get_ident()
        if self._owner == me:
            raise ParlayError("a stream of this LLM is under way: end or close it first, or use parlay.aio.AsyncLLM")
        with self._lock:
            self._owner = me
            try:
                yield
            finally:
                self._owner = None

    @contextmanager
    def decoding(self, engine: Engine) -> Iterator[None]:
        """Like `entered`, for a call that steps the engine. Raises ParlayError also if an `AsyncLLM` steps it."""
        with self.entered():
            if not engine.idle:
                raise ParlayError("this LLM belongs to an AsyncLLM: ask that one")
            yield
