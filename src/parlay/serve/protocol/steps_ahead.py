"""Steps that a small model drafts ahead: the field of the body, and the part of the reply."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, ClassVar, Literal

from fastapi import Request
from pydantic import Field
from typing_extensions import TypedDict

from parlay.aio.steps_ahead import StepsDrafter, check_ahead
from parlay.llm.jobs import Job
from parlay.llm.outputs import RequestOutput
from parlay.llm.request_options import RequestOptions
from parlay.llm.steps_ahead import AheadParams
from parlay.serve.errors import ApiError
from parlay.serve.hosted import Served
from parlay.serve.protocol.answering import in_thread
from parlay.serve.protocol.body import Body, GenerationBody, conflict
from parlay.serve.protocol.json_values import WHOLE
from parlay.serve.protocol.running import Run
from parlay.serve.registry import Registry, keep_in_use
from parlay.types import FieldError

FIELD = "reason_ahead"
ROUNDS = "its rounds depend on when each of them was over"
"""Why such a stream can't be resumed."""
_OTHERS = ("vote", "outline", "logprobs", "prediction", "structured_outputs", "response_format", "tools", "functions")


class ReasonAhead(Body):
    """Which model of this server drafts the next steps of an answer, how many, where they end, and when a step is
    accepted: ``exact``, if the target writes the same, or ``model``, if the target says that both mean the same, which
    is lossy."""

    closed: ClassVar[bool] = True

    drafter: Annotated[str, Field(min_length=1)] | None = None
    steps: Annotated[int, WHOLE] | None = None
    until: Literal["line", "sentence"] | None = None
    step_tokens: Annotated[int, WHOLE] | None = None
    judge: Literal["exact", "model"] | None = None


class ReasonAheadReply(TypedDict):
    """The number of rounds, of drafted steps, and of accepted ones."""

    rounds: int
    drafted: int
    accepted: int


def ahead_reply(output: RequestOutput) -> ReasonAheadReply | None:
    """The counts of steps; None if none were drafted ahead."""
    ahead = output.ahead
    if ahead is None:
        return None
    return {"rounds": ahead.rounds, "drafted": ahead.drafted, "accepted": ahead.accepted}


def check_reason_ahead(body: GenerationBody, ahead: ReasonAhead | None) -> None:
    """Raises ApiError for fields that can't be combined with steps ahead."""
    if ahead is None:
        return
    if (body.n or 1) > 1:
        raise conflict(f"{FIELD} gives one choice: remove n", "n")
    if body.guidance_scale not in (None, 1):
        raise conflict(f"{FIELD} can't be used with guidance_scale: remove one of them", "guidance_scale")
    for name in _OTHERS:
        if vars(body).get(name) not in (None, False, []):
            raise conflict(f"{FIELD} can't be used with {name}: remove one of them", name)
    asked = body.exactness or ""
    if asked.startswith("lossy:"):
        raise conflict(f"no certificate covers {FIELD}: remove the floor from exactness", "exactness")
    if ahead.judge == "model" and asked not in ("", "lossy"):
        raise conflict(f"{FIELD} with judge model is lossy, so exactness must be lossy or missing", "exactness")


def ahead_params(ahead: ReasonAhead) -> AheadParams:
    """The parameters of drafting steps. Raises ApiError for values out of range."""
    given = ahead.model_dump(include={each.name for each in fields(AheadParams)}, exclude_none=True)
    try:
        return AheadParams(**given)
    except FieldError as error:
        raise ApiError(400, error.named((FIELD + ".{}").format), f"{FIELD}.{error.fields[0]}") from None


async def drafted_ahead(
    run: Run, ahead: ReasonAhead | None, options: RequestOptions, registry: Registry, request: Request
) -> Run:
    """The same run, with steps drafted by a model of this server if the body asks for that.

    Raises ApiError for an unknown drafter, one that can't draft, and fields that can't be honoured.
    """
    if ahead is None:
        return run
    params, (job,) = ahead_params(ahead), run.jobs
    served = await _drafter(run.served, ahead.drafter, registry, request)
    run.drafter = StepsDrafter(served.service, params, replace(options, adapter=run.served.adapter, vote=None))
    run.keep = lambda: keep_in_use(request)
    await in_thread(request, lambda: _check(run.served, job, served, run.drafter), heavy=False)
    return run


async def _drafter(target: Served, name: str | None, registry: Registry, request: Request) -> Served:
    field = f"{FIELD}.drafter"
    if name is None:
        others = [model.name for model in registry if model.served is not target]
        if not others:
            raise ApiError(400, f"{field} must be a second model, and this server has only one: remove {FIELD}", field)
        if len(others) > 1:
            raise ApiError(400, f"{field} must name the model that drafts: choose one of {', '.join(others)}", field)
        name = others[0]
    try:
        return await registry.use(name, request)
    except ApiError as error:
        raise ApiError(error.status, error.message, field, error.code, headers=error.headers) from None


def _check(target: Served, job: Job, served: Served, drafter: StepsDrafter | None) -> None:
    assert drafter is not None
    try:
        check_ahead(target.service, job, drafter)
    except FieldError as error:
        message = error.named(_place).replace(served.spec.name, served.name)
        raise ApiError(400, message, _place(error.fields[0]) or error.fields[0]) from None


def _place(field: str) -> str | None:
    """The place in the body of a part of `ReasonAhead`; None for other fields."""
    return f"{FIELD}.{field}" if field in ReasonAhead.model_fields else None
