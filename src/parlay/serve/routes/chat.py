"""`/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from parlay.requests import Job
from parlay.serve.bodies.chat import ChatBody
from parlay.serve.jobs import prepare, request_options, sampling_params, structure
from parlay.serve.registry import Registry, Served
from parlay.serve.replies.chat import ChatChunks, ChatReply, ChatShape, chat_reply
from parlay.serve.replies.spelling import Speller
from parlay.serve.routes.answering import answer_streamed, answer_whole, described, in_thread
from parlay.serve.running import make_run
from parlay.serve.settings import Settings
from parlay.serve.tools import answer_form, conversation


def router(registry: Registry, settings: Settings) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    @routes.post(
        "/v1/chat/completions",
        summary="Answer in a conversation",
        responses=described(ChatReply),
        response_class=JSONResponse,
    )
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        served = registry.get(body.model)
        job, shape = await in_thread(request, body, lambda: _prepare(served, body, request, settings))
        run = make_run(served, [job], body, request, settings)
        if body.stream:
            return await answer_streamed(run, ChatChunks(job, shape, wants_usage=body.wants_usage))
        return await answer_whole(request, run, lambda outputs: JSONResponse(chat_reply(outputs[0], shape)))

    return routes


def _prepare(served: Served, body: ChatBody, request: Request, settings: Settings) -> tuple[Job, ChatShape]:
    """The job, and the shape of what is told of it. Raises ApiError for what can't run."""
    body.check()
    template = _template(served)
    form = answer_form(body, template)
    params = sampling_params(
        body,
        settings,
        max_tokens=body.tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=structure(body.structured_outputs) or form.form,
    )
    options = request_options(body, request)
    messages, tools = conversation(body, template)
    job = prepare(
        served,
        messages,
        params,
        options,
        settings,
        field="messages",
        known=ChatBody.model_fields,
        tools=tools,
    )
    shape = ChatShape(
        model=served.name,
        speller=Speller(served.engine.llm.tokenizer),
        logprobs=bool(body.logprobs),
        calls=form.calls,
        names=frozenset(tool.function.name for tool in body.callable_tools),
        single=body.parallel_tool_calls is False,
        certain=body.must_call or body.response_format is None,
    )
    return job, shape


def _template(served: Served) -> str:
    """The model's chat templates as one text, to see what they know of; empty where there is none."""
    tokenizer = served.engine.llm.tokenizer
    templates = tokenizer.chat_template if tokenizer is not None else None
    if isinstance(templates, dict):
        return "\n".join(templates.values())
    return templates or ""
