"""Cascades of two models: if the request allows it, a small model answers the prompts that it is sure of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self, TypeVar

from fastapi import Request

from parlay.aio import Busy, Closed
from parlay.aio.service import Background
from parlay.certificates.bounds import text_agreement
from parlay.certificates.cascade import PROBE, CascadeFile, sureness
from parlay.certificates.certificate import Audited
from parlay.certificates.requirement import AUDIT_SHARE, Allowed
from parlay.llm.jobs import Job
from parlay.llm.outputs import CompletionOutput
from parlay.llm.request_options import RequestOptions
from parlay.serve.errors import ApiError
from parlay.serve.hosted import Served
from parlay.serve.registry import Registry
from parlay.types import Exactness, ParlayError, SamplingParams

logger = logging.getLogger(__name__)


class Question(Protocol):
    """A parsed request of either protocol that can be given to any model."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def options(self) -> RequestOptions: ...

    @property
    def plain(self) -> bool:
        """Whether it has one text prompt, and asks for plain text only."""
        ...

    def but(self, params: SamplingParams, options: RequestOptions) -> Self:
        """The same request with other parameters and options."""
        ...

    def job(self, served: Served) -> Job:
        """Make the job for a model. Raises ApiError if the model can't run it."""
        ...


Q = TypeVar("Q", bound=Question)


@dataclass(frozen=True, slots=True)
class Link:
    """The name of the small model that may answer for another, and the path of the cascade's certificate."""

    small: str
    path: Path
    audit_share: float = AUDIT_SHARE


class Cascades:
    """Chooses between a large model and its small one; ``links`` are by the large model's name. All calls belong to one
    event loop. Raises ParlayError for a file that is not a cascade's certificate."""

    def __init__(self, registry: Registry, links: Mapping[str, Link]) -> None:
        self._registry = registry
        cascades = {large: CascadeFile(link.path, share=link.audit_share) for large, link in links.items()}
        self._links = {large: (link.small, cascades[large]) for large, link in links.items()}
        self._audits = Background()

    def audited(self) -> dict[str, Audited]:
        """The certified claims of all cascades, by the large model's name."""
        certificates = {large: (small, loaded.certificate) for large, (small, loaded) in self._links.items()}
        return {
            large: Audited(f"cascade:{small}", cascade.claim, cascade.threshold)
            for large, (small, cascade) in certificates.items()
        }

    async def choose(self, large: Served, question: Q, request: Request) -> tuple[Served, Q]:
        """Choose the model that answers; returns it, and the request for it. Raises ApiError for an invalid request.

        Nothing is sent to the client before this returns.
        """
        if large.name not in self._links:
            return large, question
        name, cascade = self._links[large.name]
        allowed, free = question.options.exactness, question.plain and not question.options.strategy
        if not (isinstance(allowed, Allowed) and free and cascade.opens(allowed.floor, question.params)):
            return large, question
        small = await self._registry.use(name, request)
        exactly = question.but(question.params, replace(question.options, exactness=Allowed(Exactness.SEED)))
        sure = await self._sure(small, exactly) if await self._is_meant(cascade, small, large) else 0.0
        chosen = small if sure >= cascade.certificate.threshold.least else large
        if cascade.due():
            self._audits.run(self._audit(cascade, chosen, large, exactly))
        return chosen, exactly

    async def _is_meant(self, cascade: CascadeFile, small: Served, large: Served) -> bool:
        """Whether the two models are those of the calibration. The first call reads their weights."""
        pairs = ((small, cascade.certificate.small), (large, cascade.certificate.large))
        for served, binding in pairs:
            own = await asyncio.to_thread(served.gate.binding)
            if (own.weights, own.settings, own.dtype) != (binding.weights, binding.settings, binding.dtype):
                logger.warning(
                    "the cascade %s has no effect: %s is served with other weights or settings",
                    cascade.path,
                    served.name,
                )
                return False
        return True

    async def _sure(self, small: Served, question: Question) -> float:
        """The small model's confidence in the beginning of its answer; 0 if it can't take the prompt."""
        begun = replace(question.params, max_tokens=min(PROBE, question.params.max_tokens or PROBE), logprobs=0)
        try:
            answer = await self._answer(small, question.but(begun, question.options))
        except ApiError:
            return 0.0
        return sureness([entry.logprob for entry in answer.logprobs.entries] if answer.logprobs else [])

    async def _answer(self, served: Served, question: Question) -> CompletionOutput:
        alone = question.but(replace(question.params, n=1), question.options)
        job = await asyncio.to_thread(alone.job, served)
        return (await (await served.service.submit(job, whole=True)).wait()).outputs[0]

    async def _audit(self, cascade: CascadeFile, chosen: Served, large: Served, question: Question) -> None:
        """Compare the answer that was sent with the large model's own. Skipped if there is no room."""
        options = question.options
        later = question.but(question.params, replace(options, priority=options.priority + 1, store=False))
        try:
            given, exact = await self._answer(chosen, later), await self._answer(large, later)
        except (Busy, Closed, ApiError):
            return
        except (ParlayError, ValueError) as error:
            logger.warning("an answer can't be audited: %s", error)
            return
        tokenizer = large.tokenizer
        if tokenizer is not None and {given.finish_reason, exact.finish_reason} <= {"stop", "length"}:
            await asyncio.to_thread(cascade.audit, text_agreement(tokenizer, given.text, exact.text))


def cascades_of(request: Request) -> Cascades:
    """The server's cascades."""
    cascades: Cascades = request.app.state.cascades
    return cascades
