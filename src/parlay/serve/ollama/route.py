"""Ollama's `/api/chat`, `/api/generate`, `/api/embed` and its older form `/api/embeddings`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from parlay.llm.embedding import EmbeddingRequestOutput
from parlay.serve.chat.answers import AnswerShape
from parlay.serve.chat.job import ChatJob, chat_job, chat_template
from parlay.serve.chat.request import ChatRequest
from parlay.serve.errors import OllamaErrorBody, responses
from parlay.serve.hosted import Served
from parlay.serve.ollama.body import (
    EmbedBody,
    EmbeddingsBody,
    EmbeddingsReply,
    EmbedReply,
    GenerateBody,
    OllamaBody,
    OllamaChatBody,
)
from parlay.serve.ollama.reply import OllamaChunks, OllamaShape, ollama_reply, only_loaded
from parlay.serve.ollama.to_request import (
    CHAT_NAMES,
    GENERATE_NAMES,
    generate_request,
    ollama_chat_request,
    ollama_options,
    ollama_params,
)
from parlay.serve.protocol.answering import BodyRoute, answer_streamed, answer_whole, described, in_thread
from parlay.serve.protocol.body import check_extras, note_ignored
from parlay.serve.protocol.fill_in_the_middle import gap_prompt
from parlay.serve.protocol.logprobs import Speller
from parlay.serve.protocol.resuming import resumable
from parlay.serve.protocol.running import make_run, prepare
from parlay.serve.protocol.sampling_from_body import FieldNames, filling
from parlay.serve.registry import Registry
from parlay.serve.routes.embeddings import answer, by_field, embedded
from parlay.serve.settings import Settings
from parlay.text.prompts import Prompt
from parlay.types import StructuredOutputsParams

Kind = Literal["chat", "generate"]
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Lines of JSON, or one object where `stream` is false.",
        "content": {"application/x-ndjson": {"schema": {"type": "object"}}, "application/json": {"schema": {}}},
    },
    **responses(400, 404, 408, 413, 429, 500, 503, body=OllamaErrorBody),
}


def router(registry: Registry, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute, prefix="/api", tags=["ollama"])

    @routes.post("/chat", summary="Answer in a conversation", responses=_ANSWERS, response_class=JSONResponse)
    async def ollama_chat(body: OllamaChatBody, request: Request) -> Response:
        def make(served: Served) -> ChatJob:
            check_extras(body, request, settings)
            asked = ollama_chat_request(body, request, settings, served.usual)
            return _chat(served, asked, request, settings, CHAT_NAMES)

        heavy = bool(body.tools) or body.answer_schema is not None
        wanted = make if body.messages else None
        return await _answer(registry, body, request, settings, kind="chat", make=wanted, heavy=heavy)

    @routes.post("/generate", summary="Answer a prompt", responses=_ANSWERS, response_class=JSONResponse)
    async def ollama_generate(body: GenerateBody, request: Request) -> Response:
        def make(served: Served) -> ChatJob:
            check_extras(body, request, settings)
            if body.raw or body.suffix is not None or not chat_template(served):
                return _plain(served, body, request, settings)
            asked = generate_request(body, request, settings, served.usual)
            return _chat(served, asked, request, settings, GENERATE_NAMES)

        heavy = body.answer_schema is not None
        wanted = make if body.prompt else None
        return await _answer(registry, body, request, settings, kind="generate", make=wanted, heavy=heavy)

    @routes.post("/embed", summary="Embed texts", responses=described(EmbedReply, OllamaErrorBody))
    async def ollama_embed(body: EmbedBody, request: Request) -> Response:
        check_extras(body, request, settings)
        return await _embed(registry, body, request, settings)

    @routes.post("/embeddings", include_in_schema=False)  # superseded by /embed, but many programs call it
    async def ollama_embeddings(body: EmbeddingsBody, request: Request) -> Response:
        check_extras(body, request, settings)
        return await _embed_one(registry, body, request, settings)

    return routes


async def _embed(registry: Registry, body: EmbedBody, request: Request, settings: Settings) -> Response:
    began = time.monotonic_ns()
    served = await registry.use(body.model, request)
    loaded = time.monotonic_ns() - began
    texts = by_field("input", body.input)

    def reply(outputs: Sequence[EmbeddingRequestOutput]) -> EmbedReply:
        return EmbedReply(
            model=served.name,
            embeddings=[list(output.outputs.embedding) for output in outputs],
            total_duration=time.monotonic_ns() - began,
            load_duration=loaded,
            prompt_eval_count=sum(len(output.prompt_token_ids) for output in outputs),
        )

    work = embedded(served, texts, body, request, settings, normalize=body.normalize)
    return await answer(request, settings, work, reply)


async def _embed_one(registry: Registry, body: EmbeddingsBody, request: Request, settings: Settings) -> Response:
    served = await registry.use(body.model, request)
    if not body.prompt:
        return JSONResponse({"embedding": []})

    def reply(outputs: Sequence[EmbeddingRequestOutput]) -> EmbeddingsReply:
        return EmbeddingsReply(embedding=outputs[0].outputs.embedding)

    work = embedded(served, {"prompt": body.prompt}, body, request, settings, normalize=False)
    return await answer(request, settings, work, reply)


async def _answer(
    registry: Registry,
    body: OllamaBody,
    request: Request,
    settings: Settings,
    *,
    kind: Kind,
    make: Callable[[Served], ChatJob] | None,
    heavy: bool,
) -> Response:
    """Answer a request; with ``make`` None the model is only loaded or unloaded."""
    adapter = registry.adapters.get(body.model)
    model = registry.get(body.model if adapter is None else adapter.base)
    began = time.monotonic()
    if make is None and body.keep_seconds == 0:
        await registry.unload(model)
        return JSONResponse(only_loaded(model.name, kind, "unload"))
    served = await registry.use(body.model, request)
    loaded = time.monotonic() - began
    if body.keep_seconds is not None:
        model.keep_alive = body.keep_seconds
    if make is None:
        return JSONResponse(only_loaded(model.name, kind, "load"))
    chat = await in_thread(request, lambda: make(served), heavy=heavy)
    shape = OllamaShape(
        model=served.name,
        kind=kind,
        answers=chat.answers,
        speller=Speller(served.tokenizer),
        logprobs=bool(body.logprobs),
        load_seconds=loaded,
    )
    run = make_run(served, [chat.job], chat.names, request, settings)
    if body.streamed:
        stream, headers = await resumable(request, run, OllamaChunks(chat.job, shape), body.resume)
        return await answer_streamed(request, run, stream, headers)
    return await answer_whole(request, run, lambda outputs: JSONResponse(ollama_reply(outputs[0], shape)))


def _chat(served: Served, chat: ChatRequest, request: Request, settings: Settings, names: FieldNames) -> ChatJob:
    made = chat_job(served, chat, settings, names)
    note_ignored(request, settings, made.unused)
    return made


def _plain(served: Served, body: GenerateBody, request: Request, settings: Settings) -> ChatJob:
    """Make the job of a raw prompt, or of the gap between prompt and suffix."""
    params = ollama_params(body, settings, GENERATE_NAMES, served.usual)
    if body.answer_schema is not None:
        params = replace(params, structured_outputs=StructuredOutputsParams(json=body.answer_schema))
    text = f"{body.system}\n\n{body.prompt}" if body.system and not body.raw else body.prompt or ""
    prompt: Prompt = text if body.suffix is None else gap_prompt(served, settings, text, body.suffix)
    options = ollama_options(body, request)
    if body.suffix is not None:
        options = filling(options, settings)
    job = prepare(served, prompt, params, options, settings=settings, names=GENERATE_NAMES)
    return ChatJob(job, AnswerShape(), GENERATE_NAMES, options)
