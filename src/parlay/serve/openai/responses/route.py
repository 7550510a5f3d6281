"""`/v1/responses`, and the stored responses of earlier requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from parlay.serve.chat.job import ChatJob, chat_job
from parlay.serve.chat.request import ChatMessage, PastCall
from parlay.serve.errors import ApiError, responses
from parlay.serve.guard.auth import tenant
from parlay.serve.hosted import Served
from parlay.serve.openai.chat.contents import read_arguments
from parlay.serve.openai.responses.body import ResponsesBody
from parlay.serve.openai.responses.reply import ResponseChunks, ResponseReply, ResponseShape, whole_response
from parlay.serve.openai.responses.response_store import ResponseStore, StoredResponse
from parlay.serve.openai.responses.to_request import NAMES, joined, read_input, responses_request
from parlay.serve.protocol.answering import BodyRoute, answer_streamed, answer_whole, described, in_thread
from parlay.serve.protocol.body import note_ignored
from parlay.serve.protocol.logprobs import Speller
from parlay.serve.protocol.resuming import renamed, resumable
from parlay.serve.protocol.running import make_run
from parlay.serve.protocol.steps_ahead import ROUNDS, drafted_ahead
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings

_NO_LOGPROBS = "its last event repeats all log-probabilities, and another server has not those of its beginning"
_OTHERS = ["HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE", "QUERY"]


class Deleted(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItems(BaseModel):
    """The input items of one request, without those of earlier ones."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: Literal[False] = False


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def router(registry: Registry, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute, tags=["generation"])

    @routes.post(
        "/v1/responses", summary="Answer in items", responses=described(ResponseReply), response_class=JSONResponse
    )
    async def create_response(body: ResponsesBody, request: Request) -> Response:
        served = await registry.use(body.model, request)
        earlier = _earlier(body, request)
        chat, shape = await in_thread(
            request, lambda: _prepare(served, body, earlier, request, settings), heavy=body.structured
        )
        run = make_run(served, [chat.job], chat.names, request, settings)
        run = await drafted_ahead(run, body.reason_ahead, chat.options, registry, request)
        if body.stream:
            never = _NO_LOGPROBS if body.logprobs is not None else ROUNDS if body.reason_ahead is not None else ""
            chunks = ResponseChunks(chat.job, shape)
            names = shape.id, shape.created
            stream, headers = await resumable(request, run, chunks, body.resume, names, never=never)
            return await answer_streamed(request, run, stream, headers)
        return await answer_whole(request, run, lambda outputs: JSONResponse(whole_response(outputs[0], shape)))

    _add_count(routes, registry, settings)
    _add_kept(routes)
    return routes


def _add_count(routes: APIRouter, registry: Registry, settings: Settings) -> None:
    @routes.post(
        "/v1/responses/input_tokens",
        summary="How many tokens a prompt has",
        responses=responses(400, 404, 408, 413, 429, 503),
    )
    async def count_input_tokens(body: ResponsesBody, request: Request) -> InputTokens:
        served = await registry.use(body.model, request)
        earlier = _earlier(body, request)

        def prepare() -> ChatJob:
            asked = responses_request(body, earlier, request, settings, served.usual)
            return chat_job(served, asked, settings, NAMES)

        chat = await in_thread(request, prepare, heavy=body.structured)
        return InputTokens(input_tokens=len(chat.job.samples[0].request.prompt))


def _add_kept(routes: APIRouter) -> None:
    path, failures = "/v1/responses/{response_id}", responses(404)

    @routes.get(path, summary="An earlier response", responses=failures, response_model=None)
    async def retrieve_response(response_id: str, request: Request) -> JSONResponse:
        return JSONResponse(dict(_found(response_id, request).reply))

    @routes.delete(path, summary="Forget an earlier response", responses=failures)
    async def delete_response(response_id: str, request: Request) -> Deleted:
        if not _store(request).drop(tenant(request), response_id):
            raise _missing(response_id)
        return Deleted(id=response_id)

    @routes.api_route(path, methods=_OTHERS, include_in_schema=False)
    async def refuse_method(response_id: str) -> None:
        """Add the routes of stored responses. Two operations share a path; without help the 405 error would list the
        first one's method only."""
        raise HTTPException(405, headers={"Allow": "DELETE, GET"})

    @routes.get(f"{path}/input_items", summary="What an earlier response answered", responses=failures)
    async def list_input_items(response_id: str, request: Request) -> InputItems:
        items = [dict(item) for item in _found(response_id, request).items]
        ids = [str(item["id"]) for item in items]
        return InputItems(data=items[::-1], first_id=ids[-1] if ids else None, last_id=ids[0] if ids else None)


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.response_store
    return store


def _found(id: str, request: Request) -> StoredResponse:
    kept = _store(request).get(tenant(request), id)
    if kept is None:
        raise _missing(id)
    return kept


def _missing(id: str) -> ApiError:
    return ApiError(
        404, f"there is no response {id[:100]!r}: it may have been deleted", "response_id", "response_not_found"
    )


def _earlier(body: ResponsesBody, request: Request) -> Sequence[ChatMessage]:
    """The conversation that the body continues. Raises ApiError if its previous response does not exist."""
    if body.previous_response_id is None:
        return ()
    kept = _store(request).get(tenant(request), body.previous_response_id)
    if kept is None:
        message = f"there is no response {body.previous_response_id!r}: send the conversation as input"
        raise ApiError(400, message, "previous_response_id", "previous_response_not_found")
    return kept.messages


def _prepare(
    served: Served, body: ResponsesBody, earlier: Sequence[ChatMessage], request: Request, settings: Settings
) -> tuple[ChatJob, ResponseShape]:
    asked = responses_request(body, earlier, request, settings, served.usual)
    chat = chat_job(served, asked, settings, NAMES)
    note_ignored(request, settings, chat.unused)
    owner, store = tenant(request), _store(request)

    def keep(reply: Mapping[str, Any]) -> None:
        if body.store is not False:
            messages = [*earlier, *read_input(body), *_answered(reply)]
            store.put(owner, reply["id"], StoredResponse(reply, _items(body, reply["id"]), joined(messages)))

    speller = Speller(served.tokenizer)
    shape = ResponseShape(
        model=served.name, body=body, params=asked.params, answers=chat.answers, speller=speller, keep=keep
    )
    return chat, renamed(shape, body.resume)


def _items(body: ResponsesBody, id: str) -> list[dict[str, Any]]:
    """The request's own input items, each with an id."""
    if isinstance(body.input, str):
        part = {"type": "input_text", "text": body.input}
        return [{"id": f"{id}_0", "type": "message", "role": "user", "content": [part]}]
    plain = [item.model_dump(exclude_none=True) for item in body.input]
    return [{"id": f"{id}_{place}", "type": "message", **item} for place, item in enumerate(plain)]


def _answered(reply: Mapping[str, Any]) -> list[ChatMessage]:
    """The items of a response as messages; a call that was cut off is dropped."""
    messages = []
    for item in reply["output"]:
        if item["type"] == "message":
            messages.append(ChatMessage(role="assistant", content=item["content"][0]["text"]))
        elif item["type"] == "reasoning":
            messages.append(ChatMessage(role="assistant", content="", reasoning=item["content"][0]["text"]))
        elif item["status"] == "completed":
            call = PastCall(item["call_id"], item["name"], _read_call(item["arguments"]))
            messages.append(ChatMessage(role="assistant", content="", calls=(call,)))
    return messages


def _read_call(arguments: str) -> Mapping[str, Any]:
    """Parse the arguments that a model wrote for a call; empty if they are not a JSON object."""
    try:
        return read_arguments(arguments, "arguments")
    except ApiError:
        return {}
