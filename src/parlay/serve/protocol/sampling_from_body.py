"""Makes sampling parameters and options from a body; errors name the field."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from fastapi import Request

from parlay.certificates.requirement import Allowed
from parlay.certificates.requirement import parse as allowed_by
from parlay.llm.request_options import RequestOptions
from parlay.llm.voting import VoteParams
from parlay.options import NotNamed, Option, UsageError, Value
from parlay.serve.errors import TOO_LONG, ApiError
from parlay.serve.guard.auth import Limiter, tenant
from parlay.serve.hosted import Served
from parlay.serve.protocol.body import GenerationBody, StructuredOutputs, text_of
from parlay.serve.settings import Settings
from parlay.strategies.catalogue import Unlisted, find, find_known
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import LEAST_TEMPERATURE, Exactness, ParlayError, SamplingParams, StructuredOutputsParams


def read_strategy(text: str) -> StrategySpec:
    """Parse the strategy that a request names.

    Raises ApiError for an unknown strategy, and for one that would import code, open a file or model, or keep too much
    for later requests. Only the server's owner may use such strategies.
    """
    try:
        spec = parse(text, _without_classes)
    except Unlisted as error:
        raise _refused(error.listed_by(_LISTED_BY)) from None
    except ParlayError as error:
        raise _refused(str(error)) from None
    _check(spec)
    return spec


def _without_classes(name: str) -> Mapping[str, Option]:
    """The parameters of a strategy that is known, none of which can name a class to import. Raises `Unlisted`."""
    return {key: replace(option, imports=False) for key, option in find_known(name).parameters.items()}


def read_exactness(text: str) -> Allowed:
    """Parse the exactness that a request allows. Raises ApiError if it is invalid."""
    try:
        return allowed_by(text)
    except UsageError as error:
        raise ApiError(400, str(error), "exactness", _CODES["exactness"]) from None


def _check(spec: StrategySpec) -> None:
    options = find_known(spec.name).parameters
    for key, value in spec.parameters:
        if options[key].opens or _is_free(options[key]):
            raise _refused(f"strategy {spec.name}: {key} is set by the server's owner, not by a request: remove it")
        if options[key].keeps and _is_above(value, options[key].default):
            most = options[key].default
            raise _refused(f"strategy {spec.name}: {key} must be at most {most} in a request, got {value}")
    for member in spec.members:
        _check(member)


def _is_free(option: Option) -> bool:
    """Whether the option takes any text."""
    return option.type is str and not option.choices


def _is_above(value: Value, most: Value) -> bool:
    return isinstance(value, int) and isinstance(most, int) and value > most


def _refused(message: str) -> ApiError:
    return ApiError(400, message, "strategy", _CODES["strategy"])


_LISTED_BY = "GET /strategies"
_CODES = {"strategy": "invalid_strategy", "exactness": "invalid_exactness"}
"""Error codes for these fields."""


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
    "bad_words",
    "allowed_token_ids",
    "truncate_prompt_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "min_tokens",
    "ignore_eos",
    "guidance_scale",
    "negative_prompt",
}
"""Fields that `SamplingParams` has under the same name, with the same default."""


FORM = "structured_outputs"
USUAL_TEMPERATURE = 2.0
"""The highest temperature that OpenAI's API accepts."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FieldNames:
    """A protocol's names of the fields that errors mention: the prompt, and others by their names in the engine."""

    prompt: str
    others: Mapping[str, str]

    @classmethod
    def of(cls, body: type[GenerationBody], prompt: str, **renamed: str) -> FieldNames:
        """The names of ``body``'s fields, which are the engine's except for ``renamed``."""
        return cls(prompt, {**{name: name for name in body.model_fields}, **renamed})

    def of_field(self, field: str) -> str | None:
        """The name of an engine's field, or of a part ``FIELD.PART``; None if the body has no such field.

        Where the form of the answer is in a field of another name, this is the name of all its parts, too.
        """
        whole, dot, part = field.partition(".")
        name = self.others.get(whole)
        return name if name is None or (whole == FORM != name) else name + dot + part

    def with_form(self, field: str) -> FieldNames:
        """The same names for a body that specifies the form of its answer in ``field``."""
        return replace(self, others={**self.others, FORM: field})


def sampling_params(
    body: GenerationBody,
    settings: Settings,
    names: FieldNames,
    usual: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling parameters; ``usual`` has those that the body leaves out.

    Raises ApiError for values that contradict each other or exceed the server's limits.
    """
    values = body.model_dump(include=_AS_THEY_ARE, exclude_none=True)
    try:
        params = replace(
            usual,
            **values,
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()} or None,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=structure(body.structured_outputs),
        )
    except ValueError as error:
        raise refused(error, names) from None
    return limited(params, settings, names)


def limited(params: SamplingParams, settings: Settings, names: FieldNames) -> SamplingParams:
    """Apply `limit_params`; its errors use the protocol's names of fields."""
    try:
        return limit_params(params, settings)
    except ApiError as error:
        raise error.as_sent(names.others) from None


def body_options(body: GenerationBody, request: Request, vote: VoteParams | None = None) -> RequestOptions:
    """The options of a generation body. Raises ApiError as `request_options` does."""
    prediction = text_of(body.prediction.content) if body.prediction is not None else ""
    options = request_options(
        request,
        body,
        documents=body.documents or (),
        priority=body.priority or 0,
        prediction=prediction,
    )
    return replace(options, vote=vote)


class OwnFields(Protocol):
    """Parlay's own fields, which the bodies of all protocols have."""

    @property
    def strategy(self) -> str | None: ...
    @property
    def exactness(self) -> str | None: ...
    @property
    def store(self) -> bool | None: ...
    @property
    def cache_salt(self) -> str | None: ...


def request_options(
    request: Request,
    body: OwnFields | None = None,
    *,
    documents: Sequence[str] = (),
    prediction: str = "",
    priority: int = 0,
) -> RequestOptions:
    """The options for a request; without a ``body``, as if it had none of these fields.

    Raises ApiError for a strategy that requests may not name, and for a higher priority than the key allows.
    """
    limiter: Limiter = request.app.state.limiter
    settings: Settings = request.app.state.settings
    ends = [most for most in (settings.default_max_tokens, settings.max_tokens) if most is not None]
    limiter.quotas.check_priority(tenant(request), priority)
    return RequestOptions(
        strategy=read_strategy(body.strategy) if body is not None and body.strategy is not None else None,
        exactness=read_exactness(body.exactness) if body is not None and body.exactness is not None else None,
        documents=documents,
        store=body is None or body.store is not False,
        salt=tenant(request, None if body is None else body.cache_salt),
        owner=tenant(request),
        priority=priority,
        prediction=prediction or None,
        default_max_tokens=min(ends, default=None),
    )


def filling(options: RequestOptions, settings: Settings, least: int | None = None) -> RequestOptions:
    """Allow an infilling request to reuse cached runs of tokens at other positions, if the server does.

    ``least`` is the request's own shortest run. A request whose exactness is not lossy reuses none.
    """
    asked, reuse = options.exactness, settings.cache_reuse if least is None else least
    lossy = asked is None or (isinstance(asked, Allowed) and asked.level is Exactness.LOSSY and asked.floor is None)
    return replace(options, cache_reuse=reuse if settings.cache_reuse and lossy else 0)


def structure(wanted: StructuredOutputs | None) -> StructuredOutputsParams | None:
    """The form of the answer for `SamplingParams`. Raises ValueError for a form that no text can have."""
    if wanted is None:
        return None
    return StructuredOutputsParams(
        json=wanted.json_,
        json_object=bool(wanted.json_object),
        regex=wanted.regex,
        choice=wanted.choice,
        grammar=wanted.grammar,
        disable_any_whitespace=bool(wanted.disable_any_whitespace),
    )


def check_count(prompts: int, n: int, served: Served) -> None:
    """Raises ApiError for more samples than the model can ever have under way, so that retrying would not help."""
    most = served.service.capacity
    if prompts > 1 and prompts * n > most:
        amount = f"{prompts} prompts with {n} samples each" if n > 1 else f"{prompts} prompts"
        raise ApiError(400, f"{amount} are more than the {most} samples that this server takes at once", "prompt")


def check_length(tokens: int, served: Served, settings: Settings, field: str) -> None:
    """Raises ApiError for a prompt that is longer than the server or the model allows, or empty."""
    if tokens == 0:
        raise ApiError(400, f"{field} is empty: give at least one token", field)
    check_prompt(tokens, settings, field)
    if tokens >= served.max_model_len:
        message = (
            f"{field} has {tokens} tokens, but the context of {served.name} is {served.max_model_len} and must "
            "hold at least one more: shorten it"
        )
        raise ApiError(400, message, field, TOO_LONG)


def _for_a_client(error: NotNamed, served: Served) -> str:
    """The error's message; if the server's owner has configured drafters for the same strategy, it says how a request
    gets them."""
    own = parse(served.llm.strategy)
    owned = [key for key, _ in own.parameters if find(own.name).parameters[key].opens]
    if not owned or not re.match(rf"strategy {re.escape(own.name)}[: ]", str(error)):
        return str(error)
    return (
        f"strategy {own.name}: {owned[0]} is set by the server's owner, not by a request: remove strategy, and "
        f"{own.name} drafts as the owner has set it"
    )


def refused(error: Exception, names: FieldNames, served: Served | None = None) -> ApiError:
    """The error of a request that can't run. Its field is the first that the error declares, if the client can set it.

    Local paths of models are replaced by their names, as they are not the client's business.
    """
    message = str(error)
    if served is not None:
        message = _for_a_client(error, served) if isinstance(error, NotNamed) else message
        message = message.replace(served.spec.name, served.name)
        for draft in served.draft_models:
            message = message.replace(draft, Path(draft).name)
    fields = error.fields if isinstance(error, ParlayError) else ()
    first = next(iter(fields), "")
    return ApiError(400, ParlayError(message, *fields).named(names.of_field), names.of_field(first), _CODES.get(first))


def limit_params(params: SamplingParams, settings: Settings) -> SamplingParams:
    """Return the parameters if the server allows them.

    Raises ApiError for more samples or tokens than the server allows, and for a temperature too close to 0.
    """
    if 0 < params.temperature < LEAST_TEMPERATURE:
        raise ApiError(
            400, f"temperature must be 0 or at least {LEAST_TEMPERATURE:g}, got {params.temperature:g}", "temperature"
        )
    if params.temperature > USUAL_TEMPERATURE:
        _warn_of(params.temperature)
    if params.n > settings.max_n:
        raise ApiError(400, f"n must be at most {settings.max_n} on this server, got {params.n}", "n")
    most = settings.max_tokens
    for name, asked in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
        if most is not None and asked is not None and asked > most:
            raise ApiError(400, f"{name} must be at most {most} on this server, got {asked}", name)
    return params


@lru_cache(maxsize=64)  # once for each value
def _warn_of(temperature: float) -> None:
    logger.warning("temperature is %g: above %g, output is mostly noise", temperature, USUAL_TEMPERATURE)


def check_prompt(tokens: int, settings: Settings, param: str = "prompt") -> None:
    """Raises ApiError for a prompt of more tokens than the server allows; the model's own limit is checked
    elsewhere."""
    limit = settings.max_prompt_tokens
    if limit is not None and tokens > limit:
        message = f"{param} has {tokens} tokens, and this server takes {limit} at most: shorten it"
        raise ApiError(400, message, param, TOO_LONG)
