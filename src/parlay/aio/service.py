"""`AsyncLLM`, the asynchronous Python API, on which the server is built."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from parlay.aio.engine_loop import EngineThread, Worker
from parlay.aio.stream import Busy, Closed, JobQueue, JobStream, PendingJob, for_future
from parlay.llm.jobs import Audit, Job
from parlay.llm.llm import LLM
from parlay.llm.outputs import RequestFailed, RequestOutput, StreamEvent
from parlay.llm.request_options import RequestOptions
from parlay.text.chat_template import Messages
from parlay.text.prompts import Prompt, is_prompt
from parlay.types import EngineStats, FieldError, ParlayError, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Background:
    """Runs coroutines whose results nobody awaits, in one event loop. It holds a reference to each task until the task
    ends, because asyncio holds none."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine as a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class AsyncLLM:
    """Decodes for many tasks at once: requests join and leave between the steps of one engine thread.

    ``llm`` is a model's name (None: the default model of `LLM`) or an LLM. Other code may then call no method of this
    LLM but `LLM.job`. Any thread and event loop may submit jobs. ``max_num_seqs`` samples run at once and up to
    ``max_waiting`` more wait; further ones are refused with `Busy`. The first request that names a strategy starts
    loading the strategy's drafters in another thread. Requests that name the same strategy wait, others go on.
    ``when_idle`` is called once, in the engine thread, in the first second without a request.

        async with AsyncLLM("smollm2-135m") as llm:
            async for event in llm.stream("Once upon a time", SamplingParams(max_tokens=64)):
                print(event.text, end="")
    """

    def __init__(
        self,
        llm: LLM | str | None = None,
        *,
        max_waiting: int = 256,
        thread: EngineThread | None = None,
        when_idle: Callable[[LLM], None] | None = None,
    ) -> None:
        if max_waiting < 0:
            raise FieldError("max_waiting", f"must be at least 0, got {max_waiting}")
        thread = thread or EngineThread()
        self.llm = _made(lambda: LLM(llm), thread) if llm is None or isinstance(llm, str) else llm
        self._worker = Worker(self.llm, max_waiting, thread, when_idle)
        self._audits = Background()

    def __repr__(self) -> str:
        return f"AsyncLLM({self.llm})"

    @classmethod
    def load(
        cls, make: Callable[[], LLM], *, max_waiting: int = 256, when_idle: Callable[[LLM], None] | None = None
    ) -> Self:
        """Make the LLM in the engine thread, so that torch keeps one pool of threads instead of two.

        Blocks until that is done. Raises what ``make`` raises.
        """
        thread = EngineThread()
        return cls(_made(make, thread), max_waiting=max_waiting, thread=thread, when_idle=when_idle)

    async def submit(
        self, job: Job, *, timeout: float | None = None, whole: bool = False, wake_event: asyncio.Event | None = None
    ) -> JobStream:
        """Queue a job that `LLM.job` made, and return when the engine has accepted it.

        After ``timeout`` seconds the job ends with the text so far, and the stream's ``timed_out`` is True. With
        ``whole`` the stream has only the last event, which costs less. To read several streams at once by
        `JobStream.take`, give them one ``wake_event``, which is set whenever one of them has an event.

        Raises ValueError or ParlayError for a job that can't run, `Busy`, and `Closed` (or its subclass `Lost`).
        """
        if timeout is not None and not timeout > 0:
            raise FieldError("timeout", f"must be above 0 seconds, got {timeout:g}")
        deadline = None if timeout is None else time.monotonic() + timeout
        pending = PendingJob(job, whole, deadline, JobQueue(wake_event))
        self._worker.submit(pending)
        try:
            await pending.queue.taken
        except asyncio.CancelledError:
            self._worker.abort(pending)
            raise
        if (audit := job.audit) is not None:
            pending.queue.over.add_done_callback(lambda _: self._audits.run(self._audit(job, audit)))
        return JobStream(self._worker, pending)

    async def generate(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        timeout: float | None = None,
    ) -> RequestOutput:
        """Decode one prompt or conversation and return the whole output.

        Raises what `submit` raises, and RequestFailed (which holds the output) if a sample failed.
        """
        job = await self._job(prompt, sampling_params, options)
        output = await (await self.submit(job, timeout=timeout, whole=True)).wait()
        if output.errors:
            raise RequestFailed(f"{len(output.errors)} of the samples failed; the first: {output.errors[0]}", [output])
        return output

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        timeout: float | None = None,
    ) -> RequestOutput:
        """`generate` for a conversation, a list of {"role": ..., "content": ...}. Raises ValueError for a prompt."""
        if is_prompt(messages):
            raise ValueError("a conversation is a list of messages, each {'role': ..., 'content': ...}")
        return await self.generate(messages, sampling_params, options, timeout=timeout)

    async def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        timeout: float | None = None,
    ) -> AsyncGenerator[StreamEvent]:
        """Decode one prompt or conversation, and iterate over the events, one for each step that adds text. Closing the
        iterator ends the request."""
        events = await self.submit(await self._job(prompt, sampling_params, options), timeout=timeout)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    @property
    def alive(self) -> bool:
        """Whether requests are accepted: False after `close` and after the engine thread has failed."""
        return not self._worker.closing

    def require_open(self) -> None:
        """Raises Closed after `close`, and Lost if the model is gone."""
        self._worker.require_open()

    @property
    def capacity(self) -> int:
        """How many samples may be under way at once, including those that wait."""
        return self._worker.capacity

    def stats(self) -> EngineStats:
        """Return how many requests wait and run, and the counts since the start. The engine thread reads them between
        steps, so they may be a moment old."""
        return replace(self._worker.stats, cache_bytes=self.llm.cache_bytes)

    async def between_steps(self, function: Callable[[LLM], T]) -> T:
        """Call a function in the engine thread, between two steps. The function may use all of the LLM; no request
        decodes meanwhile."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function(self.llm))
            except BaseException as error:
                future.set_exception(for_future(error))

        self._worker.call(call)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def close(self, drain_seconds: float | None = None) -> None:
        """Refuse new requests, let those under way finish within ``drain_seconds`` (None: no limit), then abort the
        rest.

        This closes the LLM, too. Any task may call this again, to wait for the end or to shorten the time.
        """
        await asyncio.shield(asyncio.wrap_future(self._worker.close(drain_seconds)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(None if error is None else 0)

    async def _audit(self, job: Job, audit: Audit) -> None:
        """Decode a lossy job a second time, exactly, and compare the texts. The audit is skipped if the engine has no
        room."""
        try:
            twin = await asyncio.to_thread(audit.twin)
            await (await self.submit(twin, whole=True)).wait()
            await asyncio.to_thread(audit.settle, job, twin)
        except (Busy, Closed):
            pass
        except (ParlayError, ValueError) as error:
            logger.warning("request %s can't be audited: %s", job.id, error)

    async def _job(
        self, prompt: Prompt | Messages, params: SamplingParams | None, options: RequestOptions | None
    ) -> Job:
        """Make the job in another thread, because encoding a long prompt takes time and would block the event loop."""
        self.require_open()
        return await asyncio.to_thread(self.llm.job, prompt, params, options)


def _made(make: Callable[[], LLM], thread: EngineThread) -> LLM:
    """Make the LLM in the thread; end the thread if that fails."""
    try:
        return thread.call(make).result()
    except BaseException:
        thread.end()
        raise
