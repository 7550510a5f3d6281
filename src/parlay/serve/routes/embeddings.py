"""``/v1/embeddings``, and ``/v1/score`` and ``/v1/rerank`` by their cosine similarities, in the shapes of OpenAI and
vLLM."""

from __future__ import annotations

import asyncio
import base64
import re
import struct
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import JSONResponse, Response

from parlay.aio.embedding import embed, judge
from parlay.llm.embedding import EmbeddingRequestOutput, Pooling, ScoringRequestOutput, paired, scored
from parlay.llm.judging import INSTRUCTION, judge_prompts
from parlay.llm.llm import LLM
from parlay.serve.errors import TOO_LONG, ApiError, too_late, unavailable
from parlay.serve.guard.auth import tenant
from parlay.serve.hosted import Served
from parlay.serve.openai.completions.body import PROMPTS_LIMIT, PromptField, Text, prompts_of
from parlay.serve.protocol.answering import BodyRoute, answer_work, described
from parlay.serve.protocol.body import Body, Count, check_extras
from parlay.serve.protocol.json_values import without_nulls
from parlay.serve.protocol.sampling_from_body import check_prompt
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings
from parlay.text.prompts import TokensPrompt
from parlay.text.tokenize import PromptTooLong
from parlay.types import FieldError, MachineBusy, ScoreBy

T = TypeVar("T")
Texts = Annotated[list[Text], Field(min_length=1, max_length=PROMPTS_LIMIT, fail_fast=True)]
_Texts = Mapping[str, str | list[int]]
"""Texts or token ids by their places in the body."""
_Pair = tuple[tuple[str, str | list[int]], tuple[str, str | list[int]]]
"""A query and a document, each with its place in the body."""


class PoolingBody(Body):
    """How hidden states become an embedding."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"truncate_prompt_tokens": (None,)}

    model: str | None = None
    user: str | None = None
    pooling: Pooling = "last"

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return without_nulls(data)


class EmbeddingBody(PoolingBody):
    """``pooling`` (the last token's state or the mean) and ``normalize`` (to length 1) are extensions."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {**PoolingBody.unsupported, "dimensions": (None,)}

    input: PromptField
    encoding_format: Literal["float", "base64"] = "float"
    normalize: bool = True


class _ScoringBody(PoolingBody):
    """``score_by``: by embeddings or by a chat model's answer, which ``instruction`` is for; None: the server's
    setting."""

    score_by: ScoreBy | None = None
    instruction: Text = INSTRUCTION


class ScoreBody(_ScoringBody):
    """One text to compare with each of several, or pairs of texts."""

    text_1: Text | Texts
    text_2: Text | Texts


class RerankDocument(Body):
    text: Text


class RerankBody(_ScoringBody):
    query: Text
    documents: Annotated[list[Text | RerankDocument], Field(min_length=1, max_length=PROMPTS_LIMIT, fail_fast=True)]
    top_n: Count = 0
    return_documents: bool = True


class TextUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """``embedding`` is a list of numbers, or little-endian float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingReply(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: TextUsage


class Score(BaseModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreReply(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: TextUsage


class RerankResult(BaseModel):
    index: int
    document: dict[str, str] | None
    relevance_score: float


class RerankReply(BaseModel):
    """The documents, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: TextUsage


def router(registry: Registry, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute, tags=["embeddings"])

    @routes.post("/v1/embeddings", summary="Embed texts or token ids", responses=described(EmbeddingReply))
    async def create_embedding(body: EmbeddingBody, request: Request) -> Response:
        check_extras(body, request, settings)
        served = await registry.use(body.model, request)
        work = embedded(served, by_field("input", body.input), body, request, settings, normalize=body.normalize)
        return await answer(request, settings, work, lambda outputs: _embeddings(outputs, body, served.name))

    @routes.post("/v1/score", summary="Tell how alike texts are", responses=described(ScoreReply))
    async def create_score(body: ScoreBody, request: Request) -> Response:
        check_extras(body, request, settings)
        served = await registry.use(body.model, request)
        texts = by_field("text_1", body.text_1), by_field("text_2", body.text_2)
        work = _scored(served, texts, body, request, settings)
        return await answer(request, settings, work, lambda scored: _scores(*scored, served.name))

    @routes.post("/v1/rerank", summary="Order documents by a query", responses=described(RerankReply))
    async def create_rerank(body: RerankBody, request: Request) -> Response:
        return await _reranked(registry, body, request, settings)

    for path in ("/rerank", "/v2/rerank"):
        routes.post(path, include_in_schema=False)(create_rerank)
    return routes


async def _reranked(registry: Registry, body: RerankBody, request: Request, settings: Settings) -> Response:
    check_extras(body, request, settings)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    served = await registry.use(body.model, request)
    work = _scored(served, (by_field("query", body.query), by_field("documents", texts)), body, request, settings)
    return await answer(request, settings, work, lambda scored: _ordered(*scored, texts, body, served.name))


def by_field(name: str, texts: PromptField) -> dict[str, str | list[int]]:
    """The texts of a field, each with its place in the body, which errors name."""
    several = isinstance(texts, list) and not isinstance(texts[0], int)
    return {f"{name}[{place}]" if several else name: each for place, each in enumerate(prompts_of(texts))}


async def answer(
    request: Request, settings: Settings, work: Coroutine[Any, Any, T], reply: Callable[[T], BaseModel]
) -> Response:
    """Answer with the result of ``work``, unless the client leaves or the request times out. Raises ApiError for a
    timeout."""
    try:
        async with asyncio.timeout(settings.request_timeout):
            return await answer_work(request, work, lambda found: _written(reply(found)))
    except TimeoutError:
        raise too_late(settings.request_timeout) from None


def _embeddings(outputs: Sequence[EmbeddingRequestOutput], body: EmbeddingBody, model: str) -> EmbeddingReply:
    data = [
        Embedding(index=index, embedding=_encoded(output.outputs.embedding, body.encoding_format))
        for index, output in enumerate(outputs)
    ]
    return EmbeddingReply(data=data, model=model, usage=_usage(outputs))


def _scores(scores: Sequence[ScoringRequestOutput], usage: TextUsage, model: str) -> ScoreReply:
    data = [Score(index=index, score=each.outputs.score) for index, each in enumerate(scores)]
    return ScoreReply(id=f"score-{uuid4().hex}", created=int(time.time()), model=model, data=data, usage=usage)


def _ordered(
    scores: Sequence[ScoringRequestOutput], usage: TextUsage, texts: Sequence[str], body: RerankBody, model: str
) -> RerankReply:
    results = [
        RerankResult(
            index=index,
            document={"text": texts[index]} if body.return_documents else None,
            relevance_score=score.outputs.score,
        )
        for index, score in sorted(enumerate(scores), key=lambda found: -found[1].outputs.score)
    ]
    kept = results[: body.top_n or len(results)]
    return RerankReply(id=f"rerank-{uuid4().hex}", model=model, results=kept, usage=usage)


async def _scored(
    served: Served, texts: tuple[_Texts, _Texts], body: _ScoringBody, request: Request, settings: Settings
) -> tuple[list[ScoringRequestOutput], TextUsage]:
    """Score the texts by their fields. Raises ApiError for texts that the model can't take."""
    one, other = texts
    pairs = _paired(one, other)
    if (body.score_by or settings.score_by) == "cosine":
        outputs = await embedded(served, {**one, **other}, body, request, settings)
        return scored(outputs, [(first, len(one) + second) for first, second in pairs]), _usage(outputs)
    queries, documents = list(one.items()), list(other.items())
    asked = [(queries[query], documents[document]) for query, document in pairs]
    letters = sum(len(query[1]) + len(document[1]) + len(body.instruction) for query, document in asked)
    if letters > settings.max_body_bytes:
        raise ApiError(
            400,
            f"query and instruction are read again with each document, {letters} characters in all, and "
            f"this server takes at most {settings.max_body_bytes}: send fewer documents",
            "documents",
        )
    with _told(settings):
        ids = await request.app.state.workers.call(
            request, lambda: [_judge_ids(served.llm, pair, body.instruction) for pair in asked]
        )
        _charge(zip(map(_longer, asked), ids, strict=True), request, settings)
        turn = partial(request.app.state.workers.reading, request)
        judged = await judge(served.service, ids, served.adapter, turn=turn)
    return judged, _usage(judged)


async def embedded(
    served: Served,
    texts: _Texts,
    body: PoolingBody,
    request: Request,
    settings: Settings,
    *,
    normalize: bool = True,
) -> list[EmbeddingRequestOutput]:
    """Embed the texts by their fields. Raises ApiError for texts that the model can't take."""
    state, llm = request.app.state, served.llm
    with _told(settings):
        ids = await state.workers.call(request, lambda: [_ids(llm, *text) for text in texts.items()])
        _charge(zip(texts, ids, strict=True), request, settings)
        turn = partial(state.workers.reading, request)
        return await embed(served.service, ids, body.pooling, served.adapter, normalize=normalize, turn=turn)


@contextmanager
def _told(settings: Settings) -> Iterator[None]:
    """Turn errors about the texts into ApiError."""
    try:
        yield
    except MachineBusy as error:
        raise unavailable(settings.retry_after, str(error)) from None
    except FieldError as error:
        raise ApiError(400, str(error), error.fields[0]) from None
    except ValueError as error:
        raise ApiError(400, str(error), "model") from None


def _ids(llm: LLM, field: str, text: str | list[int]) -> tuple[int, ...]:
    """The ids of a field's text. Raises ApiError for one that the model can't take."""
    with _named(field, field):
        return llm.token_ids(TokensPrompt(prompt_token_ids=text) if isinstance(text, list) else text)


def _judge_ids(llm: LLM, pair: _Pair, instruction: str) -> tuple[int, ...]:
    """The prompt for a pair. Raises ApiError for one that the model can't take, and FieldError for such a model."""
    field, ((_, query), (_, document)) = _longer(pair), pair
    with _named(field, f"the prompt with {field}"):
        return judge_prompts(llm, [(query, document)], instruction)[0]


def _longer(pair: _Pair) -> str:
    """The field of the pair's longer text, which is at fault where both together are too long."""
    return max(pair, key=lambda named: len(named[1]))[0]


@contextmanager
def _named(field: str, prompt: str) -> Iterator[None]:
    """Turn an error about the prompt of a field into ApiError, and call the prompt ``prompt`` there."""
    try:
        yield
    except PromptTooLong as error:
        raise ApiError(400, _renamed(error, prompt), field, TOO_LONG) from None
    except FieldError:
        raise
    except ValueError as error:
        raise ApiError(400, _renamed(error, prompt), field) from None


def _renamed(error: ValueError, prompt: str) -> str:
    return re.sub(r"^the prompt\b", lambda _: prompt, str(error))


def _charge(texts: Iterable[tuple[str, Sequence[int]]], request: Request, settings: Settings) -> None:
    """Charge the tokens of each field to the client's key. Raises ApiError for a text longer than the server allows."""
    tokens = 0
    for field, ids in texts:
        check_prompt(len(ids), settings, field)
        tokens += len(ids)
    request.app.state.limiter.quotas.charge(tenant(request), tokens)


def _paired(one: _Texts, other: _Texts) -> list[tuple[int, int]]:
    try:
        return paired(len(one), len(other))
    except ValueError as error:
        raise ApiError(400, str(error), "text_2") from None


def _encoded(embedding: Sequence[float], form: str) -> list[float] | str:
    if form == "float":
        return list(embedding)
    return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()


def _usage(outputs: Sequence[EmbeddingRequestOutput] | Sequence[ScoringRequestOutput]) -> TextUsage:
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return TextUsage(prompt_tokens=tokens, total_tokens=tokens)


def _written(reply: BaseModel) -> Response:
    content: Any = reply.model_dump(mode="json", exclude_none=True)
    return JSONResponse(content)
