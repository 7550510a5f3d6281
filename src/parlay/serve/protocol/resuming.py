"""Resumable streams, which another replica can continue: fields of the body, comments, and the fingerprint."""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import Request
from pydantic import Field

from parlay.certificates.gate import rule_level
from parlay.llm.jobs import Job
from parlay.llm.outputs import StreamEvent
from parlay.llm.request_options import RequestOptions
from parlay.models.fetch.origin import build_fingerprint
from parlay.serve.chat.job import chat_template
from parlay.serve.errors import ApiError
from parlay.serve.hosted import Served
from parlay.serve.protocol.answering import COMMENT, Chunk, Chunks, Frames, in_thread
from parlay.serve.protocol.body import Body, TokenId, conflict
from parlay.serve.protocol.json_values import ALL_WHOLE, WHOLE, in_words
from parlay.serve.protocol.resume_comments import DONE, END, FAILED, HEADER, NO, OPENED, TOKENS
from parlay.serve.protocol.running import Run
from parlay.strategies.catalogue import find
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import Exactness, ParlayError, SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_EXACT = (Exactness.BITS, Exactness.SEED)

Name = Annotated[str, Field(pattern="^[!-~]{1,128}$"), in_words("must have 1 to 128 ASCII characters and no spaces")]
"""A word without line breaks, as a header contains it."""
WrittenTokens = Annotated[list[TokenId], Field(fail_fast=True), ALL_WHOLE]


class Resume(Body):
    """Empty: the stream is made resumable. Otherwise the request continues a stream of another replica, given its
    fingerprint, id and time, the tokens of each choice so far, the choices that had ended, and the number of events.
    ``seed`` is what prompts without a seed derive theirs from, so that equal prompts still differ."""

    fingerprint: Name | None = None
    id: Name | None = None
    created: Annotated[int, Field(ge=0, le=2**53), WHOLE] | None = None
    token_ids: Annotated[list[WrittenTokens], Field(max_length=2**14, fail_fast=True)] | None = None
    ended: Annotated[list[TokenId], Field(max_length=2**14, fail_fast=True), ALL_WHOLE] | None = None
    events: Annotated[int, Field(ge=0, le=2**53), WHOLE] | None = None
    seed: Annotated[int, Field(ge=0, le=2**53), WHOLE] | None = None

    def check(self, *, choices: int, stream: bool) -> None:
        """Raises ApiError for fields that contradict each other or the request's number of choices."""
        if not stream:
            raise conflict("resume works only with stream true: set stream, or remove resume", "resume")
        given = [value is not None for value in (self.fingerprint, self.id, self.created, self.token_ids)]
        if any(given) != all(given):
            raise conflict("resume must have all of fingerprint, id, created and token_ids, or none", "resume")
        if self.token_ids is not None and len(self.token_ids) > choices:
            message = f"resume.token_ids holds {len(self.token_ids)} lists, and the request has {choices} choices"
            raise conflict(f"{message}: give one for each", "resume.token_ids")
        if any(index >= choices for index in self.ended or ()):
            raise conflict(f"resume.ended must name choices from 0 to {choices - 1}", "resume.ended")

    def options(self, options: RequestOptions, place: int, n: int) -> RequestOptions:
        """The options of the prompt at ``place``."""
        if self.token_ids is None:
            return options
        return replace(options, written=[self._written(index) for index in range(place * n, place * n + n)])

    def params(self, params: SamplingParams, place: int) -> SamplingParams:
        """The parameters of the prompt at ``place``, with a derived seed if the request has none."""
        if self.seed is None or params.seed is not None:
            return params
        drawn = hashlib.blake2b(b"%d %d" % (self.seed, place), digest_size=8).digest()
        return replace(params, seed=int.from_bytes(drawn) >> 11)

    def _written(self, index: int) -> tuple[int, ...]:
        """The tokens of a choice written so far; missing choices have none. A choice that had ended decodes its last
        token again, so that it ends as before."""
        ids = (self.token_ids or ())[index : index + 1]
        return tuple(ids[0][:-1] if index in (self.ended or ()) else ids[0]) if ids else ()


def going_on(options: RequestOptions, resume: Resume | None, *, stream: bool, choices: int = 1) -> RequestOptions:
    """The options of a request with one prompt. Raises ApiError if ``resume`` does not fit the request."""
    if resume is None:
        return options
    resume.check(choices=choices, stream=stream)
    return resume.options(options, 0, choices)


class _CommentedFrames:
    """Frames whose parts end with an empty line and may have a comment."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self.media_type = frames.media_type
        self.end = f": {DONE}\n".encode() + frames.end if frames.end else b""

    def encode(self, chunk: Chunk) -> bytes:
        rest = {key: value for key, value in chunk.items() if key != COMMENT}
        part = self._frames.encode(rest) if rest else b"\n"
        if COMMENT in chunk:
            part = f": {chunk[COMMENT]}\n".encode() + part
        return part if part.endswith(b"\n\n") else part + b"\n"


class ResumableChunks:
    """Adds comments to the chunks of a stream, or makes the rest of a stream that ``begun`` describes."""

    def __init__(self, chunks: Chunks, jobs: Sequence[Job], begun: Resume) -> None:
        self._chunks = chunks
        self._begun = begun
        self._choices = len(jobs[0].samples)
        self._left = len(jobs)
        self._pending: dict[int, list[int]] = defaultdict(list)
        """Tokens of each choice that were decoded but not sent yet."""
        self.frames = _CommentedFrames(chunks.frames)

    def opening(self) -> Sequence[Chunk]:
        return _commented([] if self._begun.token_ids is not None else self._chunks.opening(), OPENED)

    def add(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        chunks = self._chunks.add(place, event)
        self._left -= event.output is not None
        if not self._left and not self.frames.end:
            return _commented(chunks, DONE)
        index = place * self._choices + event.index
        self._pending[index] += event.token_ids
        if not chunks or index in (self._begun.ended or ()):
            return chunks
        kind = TOKENS if event.finish_reason is None else END
        return _commented(chunks, " ".join(map(str, (kind, index, *self._pending.pop(index)))))

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        return _commented(self._chunks.failure(error), f"{FAILED} {error.type} {error.code}")


def _commented(chunks: Sequence[Chunk], comment: str) -> Sequence[Chunk]:
    return [*chunks[:-1], {COMMENT: comment, **(chunks[-1] if chunks else {})}]


Shape = TypeVar("Shape", bound="DataclassInstance")


def renamed(shape: Shape, resume: Resume | None) -> Shape:
    """The shape of a reply, with the id and time of the stream that it continues, if any."""
    if resume is None or resume.id is None:
        return shape
    return replace(shape, id=resume.id, created=resume.created)


async def resumable(
    request: Request,
    run: Run,
    chunks: Chunks,
    resume: Resume | None,
    names: tuple[str, int] = ("-", 0),
    *,
    never: str = "",
) -> tuple[Chunks, dict[str, str]]:
    """The chunks to stream and their headers; with ``resume`` they are those of a resumable stream.

    If ``resume`` describes the beginning of a stream, they are the rest of it. ``names`` are the id and time of the
    whole stream; ``never`` is a reason why it can't be resumed. Raises ApiError for a stream that began with other
    weights, in another build, or from another prompt. The first such request for a model reads its weights.
    """
    if resume is None:
        return chunks, {}
    served, jobs = run.served, run.jobs
    reason = await in_thread(request, lambda: never or _why_not(served, jobs), heavy=False)
    if reason:
        if resume.token_ids is not None:
            raise ApiError(400, f"the stream can't be resumed: {reason}", "resume", "not_resumable")
        return chunks, {HEADER: f"{NO} {reason}"}
    own = _fingerprint(served, jobs)
    if resume.fingerprint not in (None, own):
        message = "resume.fingerprint differs from this server's: weights, build, settings or prompt are not the same"
        raise ApiError(400, f"{message}; ask the server that began the stream", "resume.fingerprint", "not_resumable")
    return ResumableChunks(chunks, jobs, resume), {HEADER: " ".join(map(str, (own, *names)))}


def _why_not(served: Served, jobs: Sequence[Job]) -> str:
    """Why no replica can continue these jobs' streams, in one line; empty if one can. This reads weights."""
    for job in jobs:
        if job.samples[0].request.reuse:
            return "--cache-reuse is on, so the text depends on what is cached"
        strategy = job.samples[0].strategy
        spec = strategy if isinstance(strategy, StrategySpec) else parse(strategy)
        if find(spec.name).selects:
            return f"strategy {spec.name} fills canvases"
        level = Exactness.weakest(rule_level(spec), served.spec.promised)
        if level not in _EXACT:
            return f"strategy {spec.name} is of exactness {level}, and only bits and seed give the same text again"
    try:
        served.gate.binding()
    except ParlayError as error:
        return str(error)
    return ""


def _fingerprint(served: Served, jobs: Sequence[Job]) -> str:
    """SHA-256 of all that the texts depend on: weights, adapter, build, kernels, context, prompts, seeds and
    parameters."""
    spec, binding = served.spec, served.gate.binding()
    adapter = served.adapter.salt if served.adapter is not None else ""
    parts = [build_fingerprint(), binding.weights, adapter, spec.dtype, spec.kernels, chat_template(served)]
    parts.append(str(served.max_model_len))  # it limits texts, and some models' rotary positions depend on it
    digest = hashlib.sha256("\0".join(parts).encode())
    for job in jobs:
        request = job.samples[0].request
        params = replace(request.params, logits_processors=())  # they are derived from parameters that stay
        seed = 0 if params.greedy else request.key.seed
        digest.update(repr((seed, sorted(request.stop_ids), job.thoughts, params)).encode())
        digest.update(array("q", request.prompt).tobytes())
    return digest.hexdigest()
