"""Drafts reasoning steps ahead for an `AsyncLLM`: two engines decode the jobs of each round, and one stream gets the
tokens that are certain to stay."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from parlay.aio.service import AsyncLLM
from parlay.aio.stream import Busy, Closed, JobQueue, JobStream, PendingJob
from parlay.llm import steps_ahead
from parlay.llm.jobs import Job
from parlay.llm.judging import Words
from parlay.llm.request_options import RequestOptions
from parlay.llm.step_parts import Part, needless
from parlay.text.chat_template import ChatOptions
from parlay.types import TARGET, CommittedTokens, Event, Exactness, FinishReason, Metrics, ParlayError

_RETRY_SECONDS = 0.05
"""If an engine has no room for a part, the part is submitted again after this many seconds."""


@dataclass(frozen=True, slots=True)
class StepsDrafter:
    """The model that drafts steps ahead, the parameters of drafting and judging, and the options of the target's own
    steps."""

    llm: AsyncLLM
    params: steps_ahead.AheadParams
    options: RequestOptions


def check_ahead(llm: AsyncLLM, job: Job, drafter: StepsDrafter) -> Words | None:
    """Return the judge's two words if the target judges the steps, else None.

    Raises ValueError for sampling parameters that steps ahead can't honour, for a drafter with another vocabulary, and
    for a target that can't judge.
    """
    steps_ahead.check_sampling(job.samples[0].request.params)
    steps_ahead.check_drafter(llm.llm, drafter.llm.llm)
    return steps_ahead.judge_words(llm.llm) if drafter.params.judge == "model" else None


async def submit_ahead(
    llm: AsyncLLM,
    job: Job,
    drafter: StepsDrafter,
    *,
    timeout: float | None = None,
    whole: bool = False,
    wake_event: asyncio.Event | None = None,
) -> JobStream:
    """Submit a job as `AsyncLLM.submit` does, but write its text as `LLM.reason_ahead` does.

    The stream gets a token of the target as soon as the token is certain to stay. If a judge decides, the stream gets
    the steps of a round at the end of the round. Returns when the target has accepted the first part. Raises what
    `check_ahead` and the target's `AsyncLLM.submit` raise, Busy and Closed.
    """
    words = await asyncio.to_thread(check_ahead, llm, job, drafter)
    stats = llm.stats()
    llm.require_open()
    if stats.waiting + stats.running >= llm.capacity:
        raise Busy(f"{stats.waiting + stats.running} requests are under way and no more may wait: try again later")
    text = steps_ahead.begin_ahead(llm.llm, drafter.llm.llm, job, drafter.params, drafter.options)
    pending = PendingJob(job, whole, None, JobQueue(wake_event))
    writer = _Writer((llm, drafter.llm), text, pending, words)
    if timeout is not None:
        writer.expire_after(timeout)
    try:
        await writer.taken
    except asyncio.CancelledError:
        writer.abort(pending)
        raise
    return JobStream(writer, pending)


class _Writer:
    """Writes the text of a job in a task of its event loop."""

    def __init__(
        self, models: tuple[AsyncLLM, AsyncLLM], text: steps_ahead.AheadText, pending: PendingJob, words: Words | None
    ) -> None:
        (self._llm, self._drafter), self._text, self._words = models, text, words
        self._pending, self._sample = pending, pending.job.samples[0]
        self._sample.strategy, text.lossy = steps_ahead.SOURCE, words is not None
        self._began, self._first = time.perf_counter(), 0.0
        self._found: list[Metrics] = []
        self._steps = 0
        self._cached: int | None = None
        self._ended = False
        self.taken: asyncio.Future[None] = pending.queue.loop.create_future()
        """Done when the target has accepted the first part, or when the text ended before that."""
        self._task = pending.queue.loop.create_task(self._run())

    def expire_after(self, seconds: float) -> None:
        """End the text if it is not finished after ``seconds``."""
        timer = self._pending.queue.loop.call_later(seconds, self._expire)
        self._task.add_done_callback(lambda _: timer.cancel())

    def abort(self, pending: PendingJob) -> None:
        """End the text within one engine step; any thread may call this."""
        with suppress(RuntimeError):  # a closed loop runs no task any more
            pending.queue.loop.call_soon_threadsafe(self._cancel)

    def _expire(self) -> None:
        self._pending.timed_out = True
        self._cancel()

    def _cancel(self) -> None:
        """End the text here, because the task may not have started. A task that has started ends its jobs when it is
        cancelled."""
        self._end("abort")
        self._task.cancel()

    async def _run(self) -> None:
        try:
            while not (last := await self._round()).final:
                pass
            event = last.sample.last
            assert event is not None
            self._end(last.reason, event.stop_reason, event.error)
        except Closed:
            self._end("abort")
        except Exception as error:
            if not self._ended:
                self._fail(error)

    async def _round(self) -> Part:
        """Draft steps, let the target decode each of them, and keep the accepted ones. Returns the last part kept."""
        text = self._text
        parts = await asyncio.to_thread(text.parts, await self._drafted())
        await self._decode(parts)
        if self._cached is None and (begun := parts[-1].sample.last) is not None and begun.metrics is not None:
            self._cached = begun.metrics.cached_tokens  # the first part; the others reuse its cache
        self._found += [part.sample.last.metrics for part in parts if part.sample.last and part.sample.last.metrics]
        self._steps += max((each.steps for each in self._found[-len(parts) :]), default=0)
        if self._words is None:
            last = text.take(parts)
            self._send_certain(parts)
            return last
        last = text.take_judged(parts, await self._judged(parts, self._words))
        new = text.tokens[len(self._sample.tokens) :]
        self._send(new, (TARGET,) * len(new), text.writers[len(self._sample.tokens) :])
        return last

    async def _drafted(self) -> Part | None:
        """Return the drafter's next part. If the drafter has no room or fails, return None: the target then goes on
        alone."""
        text, began = self._text, time.perf_counter()
        part = await asyncio.to_thread(text.draft)
        if part is None:
            return None
        try:
            await (await self._drafter.submit(part.job, whole=True)).wait()
        except ParlayError:
            return None
        finally:
            seconds = text.counts.draft_seconds + time.perf_counter() - began
            text.counts = replace(text.counts, draft_seconds=seconds)
        return part

    async def _decode(self, parts: Sequence[Part]) -> None:
        """Decode parts together; see `parlay.llm.step_parts.decode_parts`."""
        wake, streams = asyncio.Event(), dict[str, JobStream]()
        try:
            streams[parts[-1].job.id] = await self._submitted(parts[-1], wake)
            self._begin()
            while not (parts[-1].own or parts[-1].ended):
                _raise_error(streams.values())
                wake.clear()
                await wake.wait()
            for part in parts[:-1]:
                streams[part.job.id] = await self._submitted(part, wake)
            while not all(part.ended for part in parts):
                wake.clear()
                if self._words is None:
                    self._send_certain(parts)
                    for part in needless(parts):
                        await streams[part.job.id].aclose()
                _raise_error(streams.values())
                if not all(part.ended for part in parts):
                    await wake.wait()
        finally:
            for stream in streams.values():
                await stream.aclose()

    async def _submitted(self, part: Part, wake: asyncio.Event) -> JobStream:
        """Submit a part to the target, again and again until the target has room."""
        while True:
            try:
                return await self._llm.submit(part.job, wake_event=wake)
            except Busy:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _judged(self, parts: Sequence[Part], words: Words) -> list[bool]:
        """For each drafted step that differs from the target's own, ask the target whether both mean the same."""
        chats, own = steps_ahead.judge_chats(self._text.pairs(parts)), self._text.options
        options, chat = replace(own, strategy=None), ChatOptions(variables=steps_ahead.JUDGE_VARIABLES)

        def made() -> list[Job]:
            return [self._llm.llm.job(each, steps_ahead.judge_sampling(words), options, chat) for each in chats]

        async def asked(job: Job) -> bool:
            output = await (await self._llm.submit(job, whole=True)).wait()
            return output.chosen.token_ids == (words.yes,)

        return list(await asyncio.gather(*map(asked, await asyncio.to_thread(made))))

    # ------------------------------------------------------------------------------------------------- what is sent

    def _send_certain(self, parts: Sequence[Part]) -> None:
        """Send the target's new tokens, as far as they are certain: up to the first part that the target has not
        confirmed."""
        for part in parts:
            sent = len(self._sample.tokens) - len(part.base)
            if sent < 0 or part.base != tuple(self._sample.tokens[: len(part.base)]):
                return
            new, sources = part.own[sent:], part.sample.sources[len(part.base) :]
            self._send(new, tuple(islice(sources, sent, sent + len(new))))
            if not part.ended or part.final or part.own != part.drafted:
                return

    def _send(self, tokens: Sequence[int], sources: Sequence[str], writers: Sequence[str] = ()) -> None:
        if tokens and not self._ended:
            self._first = self._first or time.perf_counter()
            self._push(CommittedTokens(tuple(tokens), tuple(sources), writers=tuple(writers)))

    def _end(self, reason: FinishReason, stop: int | str | None = None, error: str | None = None) -> None:
        """Send the end of the text, once."""
        if self._ended:
            return
        self._ended, self._pending.job.ahead = True, self._text.counts
        self._begin()
        try:
            self._push(CommittedTokens(), reason, stop, error)
        except Exception as failure:
            self._fail(failure)

    def _fail(self, error: Exception) -> None:
        """Pass the error to the task that submitted the text, or, once that has returned, to the task that reads the
        text."""
        self._ended = True
        if self.taken.done():
            self._pending.queue.put(error)
        else:
            self.taken.set_exception(error)

    def _begin(self) -> None:
        if not self.taken.done():
            self.taken.set_result(None)

    def _push(
        self,
        committed: CommittedTokens,
        reason: FinishReason | None = None,
        stop: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """Detokenize committed tokens, and put the event into the job's queue."""
        pending, stream = self._pending, self._sample.text
        assert stream is not None, "there is a tokenizer"
        for token in committed.tokens:
            stream.push(token)
        metrics = None if reason is None else self._metrics()
        event = Event(self._sample.request.id, committed, reason, stop, error, metrics)
        news = pending.job.event(self._sample, event)
        if news.output is not None or not pending.whole:
            pending.queue.put(news)

    def _metrics(self) -> Metrics:
        """Add up the counts of all parts. ``steps`` counts forwards of the target; parts that share a forward count it
        once."""
        now, tokens = time.perf_counter(), self._sample.tokens
        accepted = Counter(source for source in self._sample.sources if source != TARGET)
        first = (self._first or now) - self._began
        return Metrics(
            steps_ahead.SOURCE,
            self._text.exactness if tokens else Exactness.BITS,
            prompt_tokens=len(self._text.prompt),
            cached_tokens=self._cached or 0,
            completion_tokens=len(tokens),
            first_step_tokens=min(1, len(tokens)),
            steps=self._steps,
            draft_tokens=sum(each.draft_tokens for each in self._found),
            accepted_tokens=accepted.total(),
            accepted_by_source=accepted,
            prefill_seconds=first,
            verify_seconds=now - self._began - first,
        )


def _raise_error(streams: Iterable[JobStream]) -> None:
    """Raise the error that ended one of the jobs without an output, if any."""
    for stream in streams:
        if stream.error is not None:
            raise stream.error
