"""Streams that another replica can go on with: what a gateway is told of them, and how it asks for the rest.

A body with ``resume: {}`` gets a stream whose header `HEADER` names its fingerprint, id and time. Comments of the
server-sent events, which clients skip, then hold the tokens of each choice:

    : opened
    : tokens INDEX ID ID ...
    : end INDEX ID ID ...

``opened`` stands on the last chunk that comes before anything is decoded, ``end`` on a choice's last chunk. A replica
that gets all of this back in ``resume`` sends exactly what would have followed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar

from fastapi import Request
from pydantic import Field

from parlay.certificates.gate import rule_level
from parlay.llm.input_processor import RequestOptions
from parlay.llm.jobs import Job
from parlay.models.fetch.origin import build_fingerprint
from parlay.serve.chat.job import chat_template
from parlay.serve.errors import ApiError
from parlay.serve.hosted import Served
from parlay.serve.protocol.answering import in_thread
from parlay.serve.protocol.body import Body, TokenId, conflict
from parlay.serve.protocol.json_values import ALL_WHOLE, WHOLE
from parlay.strategies.catalogue import find
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import Exactness, ParlayError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HEADER = "parlay-resume"
NO = "no:"
"""How the header begins where the stream can't be resumed; the reason follows."""
OPENED, TOKENS, END = "opened", "tokens", "end"
_EXACT = (Exactness.BITS, Exactness.SEED)

Name = Annotated[str, Field(min_length=1, max_length=128)]
WrittenTokens = Annotated[list[TokenId], Field(fail_fast=True), ALL_WHOLE]


class Resume(Body):
    """Empty: the stream is to be resumable. Otherwise it goes on with one that another replica began: its fingerprint,
    id and time, the tokens of each choice so far, and the choices that had ended.
    """

    fingerprint: Name | None = None
    id: Name | None = None
    created: Annotated[int, Field(ge=0, le=2**53), WHOLE] | None = None
    token_ids: Annotated[list[WrittenTokens], Field(max_length=2**14, fail_fast=True)] | None = None
    ended: Annotated[list[TokenId], Field(max_length=2**14, fail_fast=True), ALL_WHOLE] | None = None

    def check(self, *, choices: int, stream: bool) -> None:
        """Raises ApiError for fields that don't match each other, or the request's number of choices."""
        if not stream:
            raise conflict("resume is for streams: set stream, or leave out resume", "resume")
        given = [value is not None for value in (self.fingerprint, self.id, self.created, self.token_ids)]
        if any(given) != all(given):
            raise conflict("resume takes fingerprint, id, created and token_ids together, or none of them", "resume")
        if self.token_ids is not None and len(self.token_ids) != choices:
            message = f"resume.token_ids holds {len(self.token_ids)} lists, and the request has {choices} choices"
            raise conflict(f"{message}: give one for each", "resume.token_ids")
        if any(index >= choices for index in self.ended or ()):
            raise conflict(f"resume.ended names a choice that is none of the {choices}", "resume.ended")

    def options(self, options: RequestOptions, place: int, n: int) -> RequestOptions:
        """The options of the prompt at ``place``. An ended choice writes its last token again, to end as it did."""
        if self.token_ids is None:
            return options
        ended = self.ended or ()
        each = [(index, self.token_ids[index]) for index in range(place * n, place * n + n)]
        return replace(options, written=[tuple(ids[:-1] if index in ended else ids) for index, ids in each])


@dataclass(slots=True)
class Resumption:
    """How a stream is made resumable, or goes on: the names that its chunks carry and the comments on them."""

    header: str
    begun: Resume
    _pending: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    @property
    def resumable(self) -> bool:
        return not self.header.startswith(NO)

    @property
    def resumed(self) -> bool:
        """Whether the stream goes on with another one."""
        return self.begun.token_ids is not None

    @property
    def ended(self) -> Sequence[int]:
        """Choices whose end was sent by another replica."""
        return self.begun.ended or ()

    def comment(self, index: int, tokens: Sequence[int], *, sent: bool, last: bool) -> str | None:
        """The comment on a choice's chunk; None where none is ``sent``: its tokens then stand on the next one."""
        pending = self._pending[index]
        pending += tokens
        if not sent:
            return None
        line = " ".join(map(str, (END if last else TOKENS, index, *pending)))
        pending.clear()
        return line


class Names(Protocol):
    """Names of a stream that all of its chunks carry."""

    @property
    def id(self) -> str: ...
    @property
    def created(self) -> int: ...


Shape = TypeVar("Shape", bound="DataclassInstance")


def renamed(shape: Shape, resume: Resume | None) -> Shape:
    """The shape of a reply, which has the id and the time of the stream that it goes on with, if there is one."""
    if resume is None or resume.id is None:
        return shape
    return replace(shape, id=resume.id, created=resume.created)


def headers_of(resumption: Resumption | None) -> Mapping[str, str]:
    return {} if resumption is None else {HEADER: resumption.header}


async def resumable(
    request: Request, served: Served, jobs: Sequence[Job], resume: Resume | None, names: Names
) -> Resumption | None:
    """How the stream of these jobs is made resumable, or goes on; None where the body does not ask for it.

    Raises ApiError, as `resumption` does. The first request for a model reads its weights.
    """
    if resume is None:
        return None
    return await in_thread(request, lambda: resumption(served, jobs, resume, names), heavy=False)


def resumption(served: Served, jobs: Sequence[Job], resume: Resume, names: Names) -> Resumption:
    """See `resumable`.

    Raises ApiError where a stream is to go on that began with other weights, in another build, or from another prompt.
    """
    reason = _why_not(served, jobs)
    if reason is not None:
        if resume.token_ids is not None:
            raise ApiError(400, f"the stream can't be resumed: {reason}", "resume", "not_resumable")
        return Resumption(f"{NO} {reason}", resume)
    own = _fingerprint(served, jobs)
    if resume.fingerprint not in (None, own):
        message = "resume.fingerprint is another one than here: weights, build, settings or prompt differ"
        raise ApiError(400, f"{message}; ask the server that began the stream", "resume.fingerprint", "not_resumable")
    return Resumption(f"{own} {names.id} {names.created}", resume)


def _why_not(served: Served, jobs: Sequence[Job]) -> str | None:
    """Why nobody could go on with the streams of these jobs, in one line; None where somebody can."""
    for job in jobs:
        strategy = job.samples[0].strategy
        spec = strategy if isinstance(strategy, StrategySpec) else parse(strategy)
        if find(spec.name).selects:
            return f"strategy {spec.name} fills canvases"
        level = Exactness.weakest(rule_level(spec), served.spec.exactness)
        if level not in _EXACT:
            return f"strategy {spec.name} is {level} here, and only bits and seed give the same text again"
    try:
        served.gate.binding()
    except ParlayError as error:
        return str(error)
    return None


def _fingerprint(served: Served, jobs: Sequence[Job]) -> str:
    """SHA-256 of all that the texts depend on: weights, build, kernels, prompts, seeds and parameters."""
    spec, binding = served.spec, served.gate.binding()
    parts = [build_fingerprint(), binding.weights, spec.dtype, spec.kernels, chat_template(served)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for job in jobs:
        request = job.samples[0].request
        params = replace(request.params, logits_processors=())  # made of parameters that stay
        seed = 0 if params.greedy else request.key.seed
        digest.update(repr((seed, sorted(request.stop_ids), job.thoughts, params)).encode())
        digest.update(array("q", request.prompt).tobytes())
    return digest.hexdigest()
