"""`/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from parlay.serve.cascades import cascades_of
from parlay.serve.chat.job import ChatQuestion
from parlay.serve.guard.body_route import BodyRoute
from parlay.serve.openai.chat.body import ChatBody
from parlay.serve.openai.chat.outlined import Outlined
from parlay.serve.openai.chat.reply import ChatChunks, ChatReply, ChatShape, chat_reply
from parlay.serve.openai.chat.to_request import NAMES, chat_request
from parlay.serve.openai.chunks import WHOLE_VOTE
from parlay.serve.protocol.answering import answer_streamed, answer_whole, described, in_thread, read
from parlay.serve.protocol.body import note_ignored
from parlay.serve.protocol.logprobs import Speller
from parlay.serve.protocol.outlining import outline_params
from parlay.serve.protocol.resuming import Resume, renamed, resumable
from parlay.serve.protocol.running import make_run
from parlay.serve.protocol.steps_ahead import ROUNDS, drafted_ahead
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
        prepared = await read(request, lambda: chat_request(body, request, settings, served.usual))
        if body.outline is not None:
            outlined = Outlined(served, prepared, outline_params(body.outline, settings), request, settings)
            return await outlined.answer(stream=bool(body.stream), wants_usage=bool(body.wants_usage))
        question = ChatQuestion(prepared, settings, NAMES)
        if body.reason_ahead is None:
            served, question = await cascades_of(request).choose(served, question, request)
        chat = await in_thread(request, lambda: question.ready(served), heavy=body.structured)
        note_ignored(request, settings, chat.unused)
        shape = ChatShape(
            model=served.name,
            speller=Speller(served.tokenizer),
            logprobs=bool(body.logprobs),
            answers=chat.answers,
            legacy=body.legacy,
        )
        shape = renamed(shape, body.resume)
        run = make_run(served, [chat.job], chat.names, request, settings)
        run = await drafted_ahead(run, body.reason_ahead, chat.options, registry, request)
        if body.stream:
            usage = StreamUsage(body.wants_usage, body.running_usage)
            chunks = ChatChunks(chat.job, shape, usage, (body.resume or Resume()).ended or ())
            never = WHOLE_VOTE if body.vote is not None else ROUNDS if body.reason_ahead is not None else ""
            stream, headers = await resumable(request, run, chunks, body.resume, (shape.id, shape.created), never=never)
            return await answer_streamed(request, run, stream, headers)
        return await answer_whole(request, run, lambda outputs: JSONResponse(chat_reply(outputs[0], shape)))

    return routes
