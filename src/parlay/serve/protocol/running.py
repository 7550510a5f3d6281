"""The jobs of one HTTP request: preparing them, running them, ending them, and noticing when the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from parlay.aio import Busy, Closed, JobStream
from parlay.aio.steps_ahead import StepsDrafter, submit_ahead
from parlay.llm.jobs import Job
from parlay.llm.outputs import RequestOutput, StreamEvent
from parlay.llm.request_options import RequestOptions
from parlay.sampling.processors import ALL_MASKED
from parlay.serve.errors import TOO_LONG, ApiError, too_late, unavailable
from parlay.serve.finished import Finished, Observer
from parlay.serve.guard.auth import tenant
from parlay.serve.hosted import Served
from parlay.serve.protocol.sampling_from_body import FORM, FieldNames, check_length, refused
from parlay.serve.request_ids import request_id
from parlay.serve.settings import Settings
from parlay.structured.after_reasoning import AfterReasoning
from parlay.structured.constraint import GrammarConstraint
from parlay.text.chat_template import ChatOptions, Messages
from parlay.text.prompts import Prompt
from parlay.text.tokenize import PromptTooLong
from parlay.types import Constraint, MachineBusy, ParlayError, SamplingParams

T = TypeVar("T")
News = list[tuple[int, StreamEvent]]
"""The events that have come, each with the place of its job."""

_RETRY_SECONDS = 1


class ClientGone(Exception):
    """Raised when the client has closed the connection."""


@dataclass(slots=True)
class Run:
    """Jobs under way. Whoever starts a run must close it, which ends unfinished jobs."""

    served: Served
    jobs: Sequence[Job]
    observe: Callable[[Finished], None]
    """Called with each finished job."""
    timeout: float | None
    names: FieldNames
    charge: Callable[[int], None]
    """Called with the number of tokens that a job has used."""
    request_id: str = ""
    trace_parent: str | None = None
    drafter: StepsDrafter | None = None
    """Drafts steps of the texts ahead."""
    keep: Callable[[], Callable[[], None]] | None = None
    """Called at the start to keep its models loaded; returns a function that releases them."""
    began: float = field(default_factory=time.monotonic)
    _streams: list[JobStream] = field(default_factory=list)
    _wake_event: asyncio.Event = field(default_factory=asyncio.Event)
    _firsts: dict[int, float] = field(default_factory=dict)
    _recorded: set[int] = field(default_factory=set)
    _give_back: Callable[[], None] | None = None

    async def start(self, *, whole: bool = False) -> None:
        """Submit the jobs to the engine; with ``whole`` their events will not be read.

        Raises ApiError for a job that can't run, Busy and Closed; then no job is under way.
        """
        self._give_back = self.keep() if self.keep is not None else None
        service, drafter = self.served.service, self.drafter
        submit = service.submit if drafter is None else partial(submit_ahead, service, drafter=drafter)
        try:
            for job in self.jobs:
                submitted = submit(job, timeout=self.timeout, whole=whole, wake_event=self._wake_event)
                self._streams.append(await submitted)
        except BaseException as error:
            await self.close()
            if isinstance(error, ValueError | ParlayError) and not isinstance(error, Busy | Closed):
                raise refused(error, self.names, self.served) from None
            raise

    async def outputs(self) -> list[RequestOutput]:
        """All outputs in the order of the jobs. Raises ApiError if one failed."""
        try:
            outputs = await asyncio.gather(*(stream.wait() for stream in self._streams))
        except ParlayError as error:
            raise _fault(error) from error
        for place, output in enumerate(outputs):
            self._record(place, output)
        for place, stream in enumerate(self._streams):
            for index in range(len(outputs[place].outputs)):
                self._check(place, index, stream)
        return outputs

    @property
    def finished(self) -> bool:
        """Whether `note` has seen the end of every job."""
        return len(self._recorded) == len(self.jobs)

    async def news(self) -> News:
        """Wait for events since the last call, and return them; jobs whose last event has been noted are skipped.

        Raises ApiError if a job can't go on.
        """
        while not (found := [(place, event) for place, one in enumerate(self._streams) for event in one.take()]):
            for stream in self._streams:
                if stream.error is not None:
                    raise _fault(stream.error)
            self._wake_event.clear()
            await self._wake_event.wait()
        return found

    def note(self, place: int, event: StreamEvent) -> None:
        """Record an event before it is sent. Raises ApiError if the sample failed or was ended early."""
        if place not in self._firsts and event.token_ids:
            self._firsts[place] = self._seconds
        if event.finish_reason is not None:
            self._check(place, event.index, self._streams[place])
        if event.output is not None:
            self._record(place, event.output)

    async def cut(self) -> list[RequestOutput]:
        """End the jobs still under way, and return the outputs of all so far."""
        await self.close()
        return [stream.output for stream in self._streams]

    async def close(self) -> None:
        """End the jobs still under way, and record them; further calls do nothing."""
        for stream in self._streams:
            await stream.aclose()
        for place, job in enumerate(self.jobs):
            if job.finished and place not in self._recorded:
                self._record(place, job.output())
        if self._give_back is not None:
            self._give_back()

    @property
    def _seconds(self) -> float:
        """Seconds since the start, at least 0 even if the clock is set back."""
        return max(0.0, time.monotonic() - self.began)

    def _record(self, place: int, output: RequestOutput) -> None:
        if place in self._recorded:
            return
        self._recorded.add(place)
        seconds = self._seconds
        # If no events were read, the time of the first token is computed from the time that decoding took.
        decoding = max(sample.metrics.seconds - sample.metrics.prefill_seconds for sample in output.outputs)
        first = self._firsts.get(place, max(0.0, seconds - decoding))
        request = self.jobs[place].samples[0].request
        self.observe(
            Finished(
                model=self.served.name,
                output=output,
                params=request.params,
                seconds=seconds,
                seconds_to_first=first,
                request_id=self.request_id,
                trace_parent=self.trace_parent,
                owner=request.owner,
                store=request.store,
                tokenizer=self.served.tokenizer,
            )
        )
        written = sum(len(sample.token_ids) for sample in output.outputs)
        negative = 0 if request.guidance is None else len(request.guidance.negative) + written
        self.charge(len(output.prompt_token_ids) + written + negative)

    def _check(self, place: int, index: int, stream: JobStream) -> None:
        sample = self.jobs[place].samples[index]
        last = sample.last
        assert last is not None
        failure = _failure(sample.request.constraint)
        if last.finish_reason == "error" and failure:
            raise ApiError(400, failure, self.names.others.get(FORM, FORM), "structured_output_failed")
        if last.finish_reason == "error" and last.error is not None and ALL_MASKED in last.error:
            raise ApiError(400, last.error, code="every_token_masked")
        if last.finish_reason == "error":
            raise ApiError(500, last.error or "the engine failed", code="generation_failed")
        vote = self.jobs[place].vote
        if vote is not None and vote.error is not None:
            raise ApiError(400, vote.error, "vote.answer", "vote_failed")
        if last.finish_reason == "abort" and not (vote is not None and vote.over):
            raise too_late(self.timeout) if stream.timed_out else unavailable(_RETRY_SECONDS)


def prepare(
    served: Served,
    prompt: Prompt | Messages,
    params: SamplingParams,
    options: RequestOptions,
    *,
    settings: Settings,
    names: FieldNames,
    chat: ChatOptions | None = None,
) -> Job:
    """Make a job of the prompt.

    Raises ApiError if the model can't run it, and if a busy machine could not compile the form in time.
    """
    own = options if served.adapter is None else replace(options, adapter=served.adapter)
    try:
        job = served.llm.job(prompt, params, own, chat)
    except PromptTooLong as error:
        raise ApiError(400, str(error), names.prompt, TOO_LONG) from None
    except MachineBusy as error:
        raise unavailable(settings.retry_after, refused(error, names, served).message) from None
    except (ValueError, ParlayError) as error:
        raise refused(error, names, served) from None
    first = job.samples[0].request
    check_length(len(first.prompt), served, settings, names.prompt)
    if first.guidance is not None:
        check_length(len(first.guidance.negative), served, settings, "negative_prompt")
    return job


def make_run(served: Served, jobs: Sequence[Job], names: FieldNames, request: Request, settings: Settings) -> Run:
    state = request.app.state
    return Run(
        served,
        jobs,
        partial(_observe, state.observers),
        settings.request_timeout,
        names,
        partial(state.limiter.quotas.charge, tenant(request)),
        request_id=request_id(request.scope),
        trace_parent=request.headers.get("traceparent"),
    )


def _observe(observers: Sequence[Observer], finished: Finished) -> None:
    for observer in observers:
        observer(finished)


async def while_client_waits(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, and cancel it as soon as the client leaves. Raises ClientGone in that case."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Wait for the client to leave; after the body has been read, no other message can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _failure(constraint: Constraint | None) -> str | None:
    """Why the required form ended an answer; None if it did not."""
    return constraint.failure if isinstance(constraint, GrammarConstraint | AfterReasoning) else None


def _fault(error: Exception) -> ApiError:
    """The error of a job that failed while under way, which is not the client's fault."""
    return ApiError(500, str(error), code="generation_failed")
