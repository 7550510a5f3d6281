"""From a body to jobs: sampling parameters, options, and errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from fastapi import Request

from parlay.encoding import PromptTooLong
from parlay.requests import Job, Messages, Prompt, RequestOptions, Tools
from parlay.serve.auth import tenant
from parlay.serve.bodies.common import GenerationBody, StructuredOutputs, text_of
from parlay.serve.errors import ApiError
from parlay.serve.limits import Gate, check_prompt, limit_params
from parlay.serve.registry import Served
from parlay.serve.settings import Settings
from parlay.serve.strategy import read_strategy
from parlay.types import ParlayError, SamplingParams, StructuredOutputsParams

_AS_THEY_ARE = {
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "min_tokens",
    "ignore_eos",
}
"""Fields that `SamplingParams` has under the same name, with the same default."""


def sampling_params(
    body: GenerationBody,
    settings: Settings,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    structured_outputs: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Raises ApiError for values that do not go together, or that are more than the server gives."""
    given = body.model_dump(include=_AS_THEY_ARE, exclude_none=True)
    try:
        params = SamplingParams(
            **given,
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()} or None,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=structured_outputs,
        )
    except ValueError as error:
        raise refused(error, type(body).model_fields) from None
    return limit_params(params, settings)


def request_options(body: GenerationBody, request: Request) -> RequestOptions:
    """Raises ApiError for a strategy that a request may not name, and for more urgency than its key has."""
    strategy = None if body.strategy is None else read_strategy(body.strategy)
    gate: Gate = request.app.state.gate
    gate.quotas.check_priority(tenant(request), body.priority or 0)
    prediction = text_of(body.prediction.content) if body.prediction is not None else ""
    return RequestOptions(
        strategy=strategy,
        documents=body.documents or (),
        store=body.store is not False,
        salt=tenant(request, body.cache_salt),
        owner=tenant(request),
        priority=body.priority or 0,
        prediction=prediction or None,
    )


def structure(wanted: StructuredOutputs | None) -> StructuredOutputsParams | None:
    """The form of the answer, as `SamplingParams` takes it. Raises ApiError for one that no text can have."""
    if wanted is None:
        return None
    try:
        return StructuredOutputsParams(
            json=wanted.json_,
            json_object=bool(wanted.json_object),
            regex=wanted.regex,
            choice=wanted.choice,
            grammar=wanted.grammar,
        )
    except ValueError as error:
        raise refused(error, ["structured_outputs"]) from None


def prepare(
    served: Served,
    prompt: Prompt | Messages,
    params: SamplingParams,
    options: RequestOptions,
    settings: Settings,
    *,
    field: str,
    known: Collection[str],
    tools: Tools = (),
) -> Job:
    """The prompt made ready to run. ``field`` is where it stood, ``known`` are the names that errors may begin with.

    Raises ApiError for what the model can't take.
    """
    try:
        job = served.engine.llm.job(prompt, params, options, tools)
    except PromptTooLong as error:
        raise ApiError(400, str(error), field, "context_length_exceeded") from None
    except (ValueError, ParlayError) as error:
        raise refused(error, known, served) from None
    check_length(len(job.samples[0].request.prompt), served, settings, field)
    return job


def check_count(prompts: int, n: int, served: Served) -> None:
    """Raises ApiError for more samples than the model ever takes at once: to try again later would not help."""
    most = served.engine.capacity
    if prompts > 1 and prompts * n > most:
        asked = f"{prompts} prompts with {n} samples each" if n > 1 else f"{prompts} prompts"
        raise ApiError(400, f"{asked} are more than the {most} samples that this server takes at once", "prompt")


def check_length(tokens: int, served: Served, settings: Settings, field: str) -> None:
    """Raises ApiError for a prompt that is longer than the server or the model takes, or that has no token at all."""
    if tokens == 0:
        raise ApiError(400, f"{field} is empty: give at least one token", field)
    check_prompt(tokens, settings, field)
    if tokens >= served.max_model_len:
        message = (
            f"the prompt has {tokens} tokens, but the context of {served.name} is {served.max_model_len} and must "
            "hold at least one more: shorten it"
        )
        raise ApiError(400, message, field, "context_length_exceeded")


def refused(error: Exception, known: Collection[str], served: Served | None = None) -> ApiError:
    """The error of a request that can't run. Its field is the first word of the message, if that is among ``known``.

    Paths of models on this machine are not the client's business: their names stand instead.
    """
    message = str(error)
    if served is not None:
        message = message.replace(served.engine.llm.runner.spec.name, served.name)
        for draft in served.engine.llm.draft_models:
            message = message.replace(draft, Path(draft).name)
    word = re.match(r"(?:the )?(\w*)", message)
    assert word is not None
    return ApiError(400, message, word[1] if word[1] in known else None)
