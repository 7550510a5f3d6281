"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Self

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from parlay.aio.embedding import suggest
from parlay.llm.jobs import Job
from parlay.llm.request_options import RequestOptions
from parlay.llm.suggesting import PAPER, USED, fitting
from parlay.ngrams.model import NgramModel
from parlay.options import UsageError
from parlay.serve.cascades import cascades_of
from parlay.serve.errors import ApiError, unavailable
from parlay.serve.guard.auth import tenant
from parlay.serve.hosted import Served
from parlay.serve.openai.chat.contents import read_schema, schema_field
from parlay.serve.openai.chunks import WHOLE_VOTE, CompletionChunks
from parlay.serve.openai.completions.body import DEFAULT_TOKENS, CompletionBody
from parlay.serve.openai.completions.reply import CompletionReply, CompletionShape, completion_reply
from parlay.serve.protocol.answering import (
    BodyRoute,
    answer_streamed,
    answer_whole,
    answer_work,
    described,
    in_thread,
    read,
)
from parlay.serve.protocol.body import check_extras
from parlay.serve.protocol.fill_in_the_middle import gap_prompt
from parlay.serve.protocol.resuming import Resume, renamed, resumable
from parlay.serve.protocol.running import make_run, prepare
from parlay.serve.protocol.sampling_from_body import (
    FieldNames,
    body_options,
    check_count,
    check_length,
    filling,
    limit_params,
    sampling_params,
)
from parlay.serve.protocol.usage import StreamUsage
from parlay.serve.protocol.voting import vote_params
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings
from parlay.text.prompts import Prompt, TokensPrompt
from parlay.types import FieldError, MachineBusy, SamplingParams, StructuredOutputsParams

NAMES = FieldNames.of(CompletionBody, "prompt")


def router(registry: Registry, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute, tags=["generation"])
    ngrams = None if settings.ngrams is None else NgramModel.open(settings.ngrams)

    @routes.post(
        "/v1/completions",
        summary="Go on from a text or from token ids",
        responses=described(CompletionReply),
        response_class=JSONResponse,
    )
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        served = await registry.use(body.model, request)
        prepared = await read(request, lambda: _read(body, request, settings, served.usual))
        if body.superposed:
            return await _superposed(served, prepared, request, ngrams)
        served, question = await cascades_of(request).choose(served, prepared, request)
        jobs, shape = await in_thread(request, lambda: _prepare(served, question), heavy=body.structured)
        run = make_run(served, jobs, _names(body, "prompt"), request, settings)
        if body.stream:
            usage = StreamUsage(body.wants_usage, body.running_usage)
            chunks = CompletionChunks(jobs, shape, usage, (body.resume or Resume()).ended or ())
            never = WHOLE_VOTE if body.vote is not None else ""
            stream, headers = await resumable(request, run, chunks, body.resume, (shape.id, shape.created), never=never)
            return await answer_streamed(request, run, stream, headers)
        return await answer_whole(request, run, lambda outputs: JSONResponse(completion_reply(outputs, shape)))

    return routes


@dataclass(frozen=True, slots=True)
class CompletionQuestion:
    """A parsed body that can be given to any model; see `parlay.serve.cascades.Question`."""

    body: CompletionBody
    params: SamplingParams
    options: RequestOptions
    settings: Settings

    @property
    def plain(self) -> bool:
        """Whether any model can run it: token ids, infilling marks and resumed tokens belong to one model's
        vocabulary."""
        body, texts = self.body, self.body.prompts
        more = (body.suffix, body.best_of, body.vote, body.response_format, body.resume and body.resume.token_ids)
        return len(texts) == 1 and isinstance(texts[0], str) and not body.echo and more == (None,) * 5

    def but(self, params: SamplingParams, options: RequestOptions) -> Self:
        return replace(self, params=params, options=options)

    def jobs(self, served: Served) -> list[Job]:
        """Make one job per prompt. Raises ApiError if the model can't run one."""
        n = self.options.vote.n if self.options.vote is not None else self.params.n
        check_count(len(self.body.prompts), n, served)
        resume = self.body.resume or Resume()
        return [
            prepare(
                served,
                prompt,
                resume.params(self.params, place),
                resume.options(self.options, place, n),
                settings=self.settings,
                names=names,
            )
            for place, (names, prompt) in enumerate(_prompts(served, self.body, self.settings))
        ]

    def job(self, served: Served) -> Job:
        """Return the job of the first prompt."""
        return self.jobs(served)[0]


async def _superposed(
    served: Served, asked: CompletionQuestion, request: Request, ngrams: NgramModel | None
) -> Response:
    """Write several drafts for a person to choose from, at one draft's forwards per prompt, while the client waits.

    Raises ApiError if they can't run.
    """
    settings, params, named = asked.settings, asked.params, USED | asked.body.model_fields_set
    named_params = {each.name: getattr(params, each.name) for each in fields(params) if each.name in named}
    asked = asked.but(SamplingParams(**named_params), replace(asked.options, strategy="none"))
    (jobs, shape), model = await in_thread(
        request, lambda: (_prepare(served, asked), _fitting(served, ngrams)), heavy=False
    )
    most = sum(len(job.samples[0].request.prompt) + params.n * (params.max_tokens or 0) for job in jobs)
    request.app.state.limiter.quotas.charge(tenant(request), most)
    try:
        turn = partial(request.app.state.workers.reading, request)
        work = suggest(served.service, jobs, PAPER, model, turn=turn)
        return await answer_work(request, work, lambda outputs: JSONResponse(completion_reply(outputs, shape)))
    except MachineBusy as error:
        raise unavailable(settings.retry_after, str(error)) from None
    except FieldError as error:
        raise ApiError(400, str(error), error.fields[0]) from None
    except ValueError as error:
        raise ApiError(400, str(error), "superposed") from None


def _fitting(served: Served, ngrams: NgramModel | None) -> NgramModel | None:
    """The n-gram model if it fits the model. Raises ApiError if its vocabulary differs, as may be in a server of
    several models."""
    try:
        return fitting(served.llm, ngrams)
    except UsageError as error:
        raise ApiError(400, str(error), "superposed") from None


def _read(body: CompletionBody, request: Request, settings: Settings, usual: SamplingParams) -> CompletionQuestion:
    """Parse the body; ``usual`` has the sampling parameters that it leaves out. Raises ApiError for an invalid body."""
    check_extras(body, request, settings)
    body.check()
    options = body_options(body, request, vote=vote_params(body.vote, settings))
    if body.suffix is not None:
        options = filling(options, settings)
    return CompletionQuestion(body, _params(body, settings, usual), options, settings)


def _prepare(served: Served, asked: CompletionQuestion) -> tuple[list[Job], CompletionShape]:
    """Make one job per prompt, and the shape of their replies. Raises ApiError if one can't run."""
    body, params, jobs = asked.body, asked.params, asked.jobs(served)
    shape = CompletionShape(
        model=served.name,
        tokenizer=served.tokenizer,
        n=body.n or 1,
        logprobs=body.logprobs is not None,
        explain=bool(body.explain),
        skip_special=params.skip_special_tokens,
        echoes=tuple(_echo(served, job, skip_special=params.skip_special_tokens) for job in jobs)
        if body.echo
        else None,
    )
    return jobs, renamed(shape, body.resume)


def _params(body: CompletionBody, settings: Settings, usual: SamplingParams) -> SamplingParams:
    named = "max_tokens" in body.model_fields_set
    params = sampling_params(
        body,
        settings,
        NAMES,
        usual,
        max_tokens=body.max_tokens if named else min(DEFAULT_TOKENS, settings.max_tokens or DEFAULT_TOKENS),
        logprobs=0 if body.picks and body.logprobs is None else body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    if body.best_of is not None:
        params = limit_params(replace(params, n=body.best_of), settings)
    schema = read_schema(body.response_format)
    if schema is not None:
        params = replace(params, structured_outputs=StructuredOutputsParams(json=schema))
    return params


def _prompts(served: Served, body: CompletionBody, settings: Settings) -> Iterable[tuple[FieldNames, Prompt]]:
    """The prompts, each with the names that errors use for its fields. Ids are checked before anything else, as there
    may be many."""
    for place, prompt in enumerate(body.prompts):
        names = _names(body, f"prompt[{place}]" if body.has_list else "prompt")
        if isinstance(prompt, list):
            check_length(len(prompt), served, settings, names.prompt)
            yield names, TokensPrompt(prompt_token_ids=prompt)
        elif body.suffix is not None:
            yield names, gap_prompt(served, settings, prompt, body.suffix)
        else:
            yield names, prompt


def _names(body: CompletionBody, prompt: str) -> FieldNames:
    names = NAMES if body.response_format is None else NAMES.with_form(schema_field(body.response_format))
    return replace(names, prompt=prompt)


def _echo(served: Served, job: Job, *, skip_special: bool) -> str:
    """The prompt's text, or its decoded ids."""
    tokenizer = served.tokenizer
    if job.prompt is not None or tokenizer is None:
        return job.prompt or ""
    text: str = tokenizer.decode(job.samples[0].request.prompt, skip_special_tokens=skip_special)
    return text
