"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from parlay.serve.cascades import Cascades
from parlay.serve.chat.job import ChatJob, ChatQuestion
from parlay.serve.guard.reading import BodyRoute
from parlay.serve.hosted import Served
from parlay.serve.openai.chat.body import ChatBody
from parlay.serve.openai.chat.reply import ChatChunks, ChatReply, ChatShape, chat_reply
from parlay.serve.openai.chat.to_request import NAMES, chat_request
from parlay.serve.protocol.answering import answer_streamed, answer_whole, described, in_thread
from parlay.serve.protocol.extras import note_ignored
from parlay.serve.protocol.running import make_run
from parlay.serve.protocol.token_bytes import Speller
from parlay.serve.protocol.usage import StreamUsage
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings


def router(registry: Registry, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute, tags=["generation"])

    @routes.post(
        "/v1/chat/completions",
        summary="Answer in a conversation",
        responses=described(ChatReply),
        response_class=JSONResponse,
    )
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        served = await registry.use(body.model, request)

        def read() -> ChatQuestion:
            return ChatQuestion(chat_request(body, request, settings), settings, NAMES)

        cascades: Cascades = request.app.state.cascades
        served, ask = await cascades.route(served, request, read)
        prepare = partial(_prepare, served, body, ask, request, settings)
        chat, shape = await in_thread(request, prepare, heavy=body.structured)
        run = make_run(served, [chat.job], chat.names, request, settings)
        if body.stream:
            chunks = ChatChunks(chat.job, shape, StreamUsage(body.wants_usage, body.running_usage))
            return await answer_streamed(request, run, chunks)
        return await answer_whole(request, run, lambda outputs: JSONResponse(chat_reply(outputs[0], shape)))

    return routes


def _prepare(
    served: Served, body: ChatBody, ask: Callable[[], ChatQuestion], request: Request, settings: Settings
) -> tuple[ChatJob, ChatShape]:
    """Raises ApiError for a request that can't be used."""
    chat = ask().ready(served)
    note_ignored(request, settings, chat.unused)
    return chat, _shape(served, body, chat)


def _shape(served: Served, body: ChatBody, chat: ChatJob) -> ChatShape:
    speller = Speller(served.tokenizer)
    return ChatShape(
        model=served.name, speller=speller, logprobs=bool(body.logprobs), answers=chat.answers, legacy=body.legacy
    )
