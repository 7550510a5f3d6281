"""``/v1/embeddings``, and ``/v1/score`` and ``/v1/rerank`` by their cosine similarities, in the shapes of OpenAI and
vLLM."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
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
from parlay.serve.errors import ApiError, too_late, unavailable
from parlay.serve.guard.auth import tenant
from parlay.serve.hosted import Served
from parlay.serve.openai.completions.body import PROMPTS_LIMIT, PromptField, Text, prompts_of
from parlay.serve.protocol.answering import BodyRoute, answer_work, described
from parlay.serve.protocol.body import Body, Count, check_extras
from parlay.serve.protocol.json_values import without_nulls
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings
from parlay.text.prompts import Prompt, TokensPrompt
from parlay.types import FieldError, MachineBusy, ScoreBy

T = TypeVar("T")
Texts = Annotated[list[Text], Field(min_length=1, max_length=PROMPTS_LIMIT, fail_fast=True)]


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
        work = embedded(served, prompts_of(body.input), body, request, settings, normalize=body.normalize)
        return await answer(request, settings, work, lambda outputs: _embeddings(outputs, body, served.name))

    @routes.post("/v1/score", summary="Tell how alike texts are", responses=described(ScoreReply))
    async def create_score(body: ScoreBody, request: Request) -> Response:
        check_extras(body, request, settings)
        one, other = _listed(body.text_1), _listed(body.text_2)
        served = await registry.use(body.model, request)
        work = _scored(served, (one, other), body, request, settings)
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
    work = _scored(served, ([body.query], texts), body, request, settings)
    return await answer(request, settings, work, lambda scored: _ordered(*scored, texts, body, served.name))


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
    served: Served, texts: tuple[Sequence[str], Sequence[str]], body: _ScoringBody, request: Request, settings: Settings
) -> tuple[list[ScoringRequestOutput], TextUsage]:
    """Score the texts. Raises ApiError for texts that the model can't take."""
    one, other = texts
    pairs = _paired(one, other)
    if (body.score_by or settings.score_by) == "cosine":
        outputs = await embedded(served, [*one, *other], body, request, settings)
        return scored(outputs, [(first, len(one) + second) for first, second in pairs]), _usage(outputs)
    asked = [(one[query], other[document]) for query, document in pairs]
    letters = sum(len(query) + len(document) + len(body.instruction) for query, document in asked)
    if letters > settings.max_body_bytes:
        raise ApiError(
            400,
            f"query and instruction are read again with each document, {letters} characters in all, and "
            f"this server takes at most {settings.max_body_bytes}: send fewer documents",
            "documents",
        )
    with _told(settings):
        ids = await request.app.state.workers.call(request, lambda: judge_prompts(served.llm, asked, body.instruction))
        _charge(ids, request, settings)
        turn = partial(request.app.state.workers.reading, request)
        judged = await judge(served.service, ids, served.adapter, turn=turn)
    return judged, _usage(judged)


async def embedded(
    served: Served,
    texts: Sequence[str | list[int]],
    body: PoolingBody,
    request: Request,
    settings: Settings,
    *,
    normalize: bool = True,
) -> list[EmbeddingRequestOutput]:
    """Embed the texts. Raises ApiError for texts that the model can't take."""
    state, llm = request.app.state, served.llm
    prompts: list[Prompt] = [TokensPrompt(prompt_token_ids=each) if isinstance(each, list) else each for each in texts]
    with _told(settings):
        ids = await state.workers.call(request, lambda: [llm.token_ids(prompt) for prompt in prompts])
        _charge(ids, request, settings)
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
        raise ApiError(400, str(error), "input") from None


def _charge(ids: Sequence[Sequence[int]], request: Request, settings: Settings) -> None:
    """Charge the tokens to the client's key. Raises ApiError for a text longer than the server allows."""
    longest, most = max(map(len, ids)), settings.max_prompt_tokens
    if most is not None and longest > most:
        raise ApiError(400, f"a text has {longest} tokens, and this server takes at most {most}: shorten it", "input")
    request.app.state.limiter.quotas.charge(tenant(request), sum(map(len, ids)))


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _paired(one: Sequence[str], other: Sequence[str]) -> list[tuple[int, int]]:
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
