"""`/v1/messages` and `/v1/messages/count_tokens`, Anthropic's API."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from parlay.serve.anthropic.body import CountBody, MessagesBody
from parlay.serve.anthropic.reply import MessageChunks, MessageReply, MessageShape, message_reply
from parlay.serve.anthropic.to_request import NAMES, count_request, messages_request
from parlay.serve.chat.job import ChatJob, chat_job
from parlay.serve.errors import MessageErrorBody, responses
from parlay.serve.protocol.answering import BodyRoute, answer_streamed, answer_whole, described, in_thread
from parlay.serve.protocol.body import note_ignored
from parlay.serve.protocol.resuming import resumable
from parlay.serve.protocol.running import make_run
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings


class Count(BaseModel):
    input_tokens: int


def router(registry: Registry, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute, prefix="/v1/messages", tags=["anthropic"])
    _add_create(routes, registry, settings)
    _add_count(routes, registry, settings)
    return routes


def _add_create(routes: APIRouter, registry: Registry, settings: Settings) -> None:
    @routes.post(
        "",
        summary="Answer in a conversation",
        responses=described(MessageReply, MessageErrorBody),
        response_class=JSONResponse,
    )
    async def create_message(body: MessagesBody, request: Request) -> Response:
        served = await registry.use(body.model, request)

        def prepare() -> ChatJob:
            chat = chat_job(served, messages_request(body, request, settings, served.usual), settings, NAMES)
            note_ignored(request, settings, chat.unused)
            return chat

        heavy = bool(body.callable_tools) or body.answer_schema is not None
        chat = await in_thread(request, prepare, heavy=heavy)
        shape = MessageShape(model=served.name, answers=chat.answers)
        if body.resume is not None and body.resume.id is not None:
            shape = replace(shape, id=body.resume.id)
        run = make_run(served, [chat.job], chat.names, request, settings)
        if body.stream:
            chunks = MessageChunks(chat.job, shape)
            stream, headers = await resumable(request, run, chunks, body.resume, (shape.id, 0))
            return await answer_streamed(request, run, stream, headers)
        return await answer_whole(request, run, lambda outputs: JSONResponse(message_reply(outputs[0], shape)))


def _add_count(routes: APIRouter, registry: Registry, settings: Settings) -> None:
    @routes.post(
        "/count_tokens",
        summary="How many tokens a prompt has",
        responses=responses(400, 404, 408, 413, 429, 503, body=MessageErrorBody),
    )
    async def count_tokens(body: CountBody, request: Request) -> Count:
        served = await registry.use(body.model, request)

        def prepare() -> ChatJob:
            return chat_job(served, count_request(body, request, settings), settings, NAMES)

        heavy = bool(body.callable_tools) or body.answer_schema is not None
        chat = await in_thread(request, prepare, heavy=heavy)
        return Count(input_tokens=len(chat.job.samples[0].request.prompt))
