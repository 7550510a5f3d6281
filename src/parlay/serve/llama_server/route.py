"""llama-server's `/completion`, `/infill` and `/props`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from parlay import __version__
from parlay.llm.jobs import Job
from parlay.llm.outputs import RequestOutput
from parlay.serve.errors import ApiError, responses
from parlay.serve.hosted import Served
from parlay.serve.llama_server.body import InfillBody, LlamaBody, LlamaCompletionBody, SlotBody
from parlay.serve.llama_server.reply import LlamaChunks, LlamaShape
from parlay.serve.protocol.answering import BodyRoute, answer_streamed, answer_whole, in_thread
from parlay.serve.protocol.body import check_extras, conflict, note_ignored
from parlay.serve.protocol.fill_in_the_middle import Gap, GapFields, infill_prompt
from parlay.serve.protocol.resuming import going_on, resumable
from parlay.serve.protocol.running import Run, make_run, prepare
from parlay.serve.protocol.sampling_from_body import (
    FieldNames,
    body_options,
    check_count,
    check_length,
    filling,
    sampling_params,
)
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings
from parlay.text.prompts import Prompt, TokensPrompt
from parlay.text.tokenize import encode
from parlay.types import ParlayError, SamplingParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

_NAMES = FieldNames.of(LlamaBody, "prompt", max_tokens="n_predict")
_FIELDS = GapFields("input_prefix", "input_suffix", "prompt", "input_extra")
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer, in a list where there are several prompts; with `stream` its events.",
        "content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {"type": "object"}}},
    },
    **responses(400, 404, 408, 413, 429, 500, 503),
}


def router(registry: Registry, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute, tags=["llama-server"])

    @routes.post("/completions", include_in_schema=False)
    @routes.post("/completion", summary="Go on from a prompt", responses=_ANSWERS, response_class=JSONResponse)
    async def llama_completion(body: LlamaCompletionBody, request: Request) -> Response:
        served = await registry.use(body.model, request)
        _check(body, request, settings)
        return await _answer(served, body, _prompts(served, body, settings), request, settings)

    @routes.post("/infill", summary="Fill in the middle", responses=_ANSWERS, response_class=JSONResponse)
    async def llama_infill(body: InfillBody, request: Request) -> Response:
        served = await registry.use(body.model, request)
        _check(body, request, settings)
        if body.input_prefix is body.input_suffix is body.prompt is None:
            raise ApiError(
                400, "input_prefix and input_suffix are missing: send the text around the cursor", "input_prefix"
            )
        if body.n_cache_reuse and not settings.cache_reuse:
            note_ignored(request, settings, ["n_cache_reuse"])
        others = [(each.filename or "file", each.text or "") for each in body.input_extra or ()]
        gap = Gap(body.input_prefix or "", body.input_suffix or "", body.prompt or "", others)
        gap, word = gap.cut(settings.infill_order, settings.infill_suffix), ""
        if settings.infill_order != "psm" and not body.structured:
            gap, word = gap.without_word()
        ids = await in_thread(
            request, lambda: infill_prompt(served.vocabulary, served.max_model_len, gap, _FIELDS), heavy=False
        )
        return await _answer(served, body, [TokensPrompt(prompt_token_ids=ids)], request, settings, begun=word)

    @routes.get("/props", summary="What the server runs", responses=responses(400, 404, 408, 413, 429, 503))
    async def llama_props(request: Request, model: str | None = None) -> dict[str, Any]:
        served = await registry.use(model, request)
        return _props(served)

    _add_slots(routes, registry, settings)
    return routes


def _add_slots(routes: APIRouter, registry: Registry, settings: Settings) -> None:
    failures = responses(400, 404, 408, 413, 429, 503)

    @routes.post("/slots/{slot}", summary="Write cached prefixes to a file", responses=failures)
    async def llama_slots(
        slot: int, action: Literal["save"], request: Request, body: SlotBody | None = None
    ) -> dict[str, Any]:
        body = body or SlotBody()
        check_extras(body, request, settings)
        return await _saved(await registry.use(body.model, request), slot, body)


async def _saved(served: Served, slot: int, body: SlotBody) -> dict[str, Any]:
    """Write the cached prefixes of all requests, as prefixes belong to no slot. Other requests wait meanwhile."""
    file, slots = served.llm.prefix_cache, served.service.capacity
    if not 0 <= slot < slots:
        raise ApiError(400, f"Invalid slot ID {slot}: this server has slots 0 to {slots - 1}", "slot")
    if file is None:
        raise ApiError(400, "this server keeps no prefixes: start it with --prefix-cache FILE", "action")
    if body.filename not in (None, file.path.name):
        raise ApiError(400, f"filename must be {file.path.name}, the only file of this server, or missing", "filename")
    began = time.monotonic()
    try:
        saved = await served.service.between_steps(lambda llm: file.save())
    except OSError as error:
        logger.warning("the prefixes can't be written: %s", error)
        raise ApiError(500, f"the prefixes can't be written: {error.strerror}") from None
    except ParlayError as error:
        logger.warning("the prefixes can't be written: %s", error)
        raise ApiError(
            400,
            f"{file.path.name} exists and is not a file of prefixes: restart the server with another --prefix-cache",
            "action",
        ) from None
    return {
        "id_slot": slot,
        "filename": file.path.name,
        "n_saved": saved.tokens,
        "n_written": saved.bytes,
        "timings": {"save_ms": round((time.monotonic() - began) * 1000, 3)},
    }


def _props(served: Served) -> dict[str, Any]:
    template = served.tokenizer.chat_template if served.tokenizer is not None else None
    return {
        "default_generation_settings": {"n_ctx": served.max_model_len, "params": LlamaBody().sampling()},
        "total_slots": served.service.capacity,
        "model_path": served.name,
        "chat_template": template if isinstance(template, str) else "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"parlay {__version__}",
        "is_sleeping": False,
    }


def _prompts(served: Served, body: LlamaCompletionBody, settings: Settings) -> list[Prompt]:
    """Check and tokenize the prompts. Raises ApiError if there are too many, or if one is too long."""
    if body.stream and len(body.prompts) > 1:
        raise conflict("several prompts can't be streamed: remove stream", "prompt")
    check_count(len(body.prompts), 1, served)
    for prompt in body.prompts:
        if isinstance(prompt, list):
            check_length(len(prompt), served, settings, "prompt")
    return [TokensPrompt(prompt_token_ids=each) if isinstance(each, list) else each for each in body.prompts]


def _check(body: LlamaBody, request: Request, settings: Settings) -> None:
    """Raises ApiError for an invalid body."""
    check_extras(body, request, settings)
    body.check()


async def _answer(
    served: Served,
    body: LlamaBody,
    prompts: Sequence[Prompt],
    request: Request,
    settings: Settings,
    *,
    begun: str = "",
) -> Response:
    """``begun`` is text with which the answer must begin, and which the client has already."""
    silent = body.max_tokens == 0
    plain = body.model_copy(update=body.sampling())
    params = sampling_params(plain, settings, _NAMES, SamplingParams(), max_tokens=1 if silent else body.max_tokens)
    if begun and not silent:
        params = _beginning_with(begun, params, served)
    options = replace(body_options(body, request), given=len(begun))
    options = going_on(options, body.resume, stream=bool(body.stream))
    if isinstance(body, InfillBody):
        options = filling(options, settings, body.n_cache_reuse)

    def make() -> list[Job]:
        return [prepare(served, prompt, params, options, settings=settings, names=_NAMES) for prompt in prompts]

    jobs = await in_thread(request, make, heavy=body.structured or bool(begun))
    shape = LlamaShape(
        model=served.name,
        params=params,
        max_model_len=served.max_model_len,
        silent=silent,
        tokens=bool(body.return_tokens),
        fields=body.response_fields,
        begun=begun,
    )
    run = make_run(served, jobs, _NAMES, request, settings)
    if body.stream:
        stream, headers = await resumable(request, run, LlamaChunks(shape, jobs[0].samples[0]), body.resume)
        return await answer_streamed(request, run, stream, headers)

    def reply(outputs: list[RequestOutput]) -> Response:
        replies = [shape.reply(output, place) for place, output in enumerate(outputs)]
        return JSONResponse(replies if len(replies) > 1 else replies[0])

    seconds = (body.t_max_predict_ms or 0) / 1000
    return await answer_whole(request, run, reply, (lambda: _in_time(run, seconds)) if seconds else None)


def _beginning_with(word: str, params: SamplingParams, served: Served) -> SamplingParams:
    """Let the answer begin with a word that the client has already; its tokens come on top of the limit.

    A model that writes the word with fewer tokens than the tokenizer, or more, has as many more or fewer for the rest.
    """
    form, most = StructuredOutputsParams(regex=f"{word}(?s:.*)"), params.max_tokens
    if most is not None and served.tokenizer is not None:
        most += len(encode(served.tokenizer, word, special=False))
    return replace(params, structured_outputs=form, max_tokens=most)


async def _in_time(run: Run, seconds: float) -> list[RequestOutput]:
    """Decode to the end, or until a line has ended after ``seconds`` since the first token."""
    await run.start()
    first, lines = 0.0, False
    while not run.finished:
        for place, event in await run.news():
            run.note(place, event)
            first = first or time.monotonic()
            lines = lines or "\n" in event.text
        if lines and time.monotonic() - first > seconds:
            return await run.cut()
    return await run.cut()
