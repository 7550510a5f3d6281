"""`/v1/chat/completions`: a body becomes a chat request, which belongs to no protocol, and is answered."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from parlay.serve.cascades import cascades_of
from parlay.serve.chat.job import ChatJob, ChatQuestion, prompt_text
from parlay.serve.chat.request import ChatRequest
from parlay.serve.errors import responses
from parlay.serve.hosted import Served
from parlay.serve.openai.chat.body import ChatBody
from parlay.serve.openai.chat.contents import NAMES, read_functions, read_messages, read_schema, schema_field
from parlay.serve.openai.chat.outlined import Outlined
from parlay.serve.openai.chat.reply import ChatReply, ChatShape, chat_reply
from parlay.serve.openai.chunks import WHOLE_VOTE, ChatChunks
from parlay.serve.protocol.answering import BodyRoute, answer_streamed, answer_whole, described, in_thread, read
from parlay.serve.protocol.body import check_extras, ignored_header, note_ignored
from parlay.serve.protocol.logprobs import Speller
from parlay.serve.protocol.outlining import outline_params
from parlay.serve.protocol.resuming import Resume, going_on, renamed, resumable
from parlay.serve.protocol.running import make_run
from parlay.serve.protocol.sampling_from_body import body_options, sampling_params
from parlay.serve.protocol.steps_ahead import ROUNDS, drafted_ahead
from parlay.serve.protocol.usage import StreamUsage
from parlay.serve.protocol.voting import vote_params
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings
from parlay.types import SamplingParams


class PromptText(BaseModel):
    """A conversation in the model's chat format, as llama-server tells it."""

    prompt: str


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
            return await outlined.answer(
                stream=bool(body.stream), wants_usage=body.wants_usage, explain=bool(body.explain)
            )
        question = ChatQuestion(prepared, settings, NAMES)
        if body.reason_ahead is None:
            served, question = await cascades_of(request).choose(served, question, request)
        chat = await in_thread(request, lambda: question.ready(served), heavy=body.structured)
        note_ignored(request, settings, chat.unused)
        shape = _reply_shape(body, served, chat)
        run = make_run(served, [chat.job], chat.names, request, settings)
        run = await drafted_ahead(run, body.reason_ahead, chat.options, registry, request)
        if body.stream:
            usage = StreamUsage(body.wants_usage, body.running_usage)
            chunks = ChatChunks(chat.job, shape, usage, (body.resume or Resume()).ended or ())
            never = WHOLE_VOTE if body.vote is not None else ROUNDS if body.reason_ahead is not None else ""
            stream, headers = await resumable(request, run, chunks, body.resume, (shape.id, shape.created), never=never)
            return await answer_streamed(request, run, stream, headers)
        return await answer_whole(request, run, lambda outputs: JSONResponse(chat_reply(outputs[0], shape)))

    _add_template(routes, registry, settings)
    return routes


def _add_template(routes: APIRouter, registry: Registry, settings: Settings) -> None:
    failures = responses(400, 404, 408, 413, 429, 500, 503)

    @routes.post("/apply-template", summary="Show a conversation's prompt", responses=failures)
    async def apply_template(body: ChatBody, request: Request, response: Response) -> PromptText:
        served = await registry.use(body.model, request)
        chat = await read(request, lambda: chat_request(body, request, settings, served.usual))
        if body.truncate_prompt_tokens is not None:
            note_ignored(request, settings, ["truncate_prompt_tokens"])
        response.headers.update(ignored_header(request))
        prompt = await in_thread(request, lambda: prompt_text(served, chat, settings, NAMES), heavy=False)
        return PromptText(prompt=prompt)


def chat_request(body: ChatBody, request: Request, settings: Settings, usual: SamplingParams) -> ChatRequest:
    """Translate the body; ``usual`` has the sampling parameters that it leaves out. Raises ApiError for an invalid
    body."""
    check_extras(body, request, settings)
    body.check()
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    options = body_options(body, request, vote=vote_params(body.vote, settings))
    return ChatRequest(
        messages=read_messages(body),
        params=sampling_params(body, settings, NAMES, usual, max_tokens=body.tokens, logprobs=logprobs),
        options=going_on(options, body.resume, stream=bool(body.stream), choices=body.n or 1),
        functions=read_functions(body),
        must_call=body.must_call,
        single_call=body.parallel_tool_calls is False or body.legacy,
        answer_schema=read_schema(body.response_format),
        schema_field=schema_field(body.response_format),
        variables=body.chat_template_kwargs or {},
        effort=body.reasoning_effort,
        verbosity=body.verbosity,
        begin_answer=body.add_generation_prompt is not False,
        continue_final=bool(body.continue_final_message),
    )


def _reply_shape(body: ChatBody, served: Served, chat: ChatJob) -> ChatShape:
    shape = ChatShape(
        model=served.name,
        speller=Speller(served.tokenizer),
        logprobs=bool(body.logprobs),
        explain=bool(body.explain),
        answers=chat.answers,
        legacy=body.legacy,
    )
    return renamed(shape, body.resume)
