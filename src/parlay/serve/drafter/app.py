"""The application of `parlay serve --drafter-only`, which describes its drafter and drafts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from parlay import __version__
from parlay.drafters.remote.messages import DRAFTS_PATH, INFO_PATH, TextFacts, TextUpdate, answer_as_json
from parlay.drafters.remote.service import MOST_NODES, Owner
from parlay.options.declare import WHOLE
from parlay.serve import error_handlers
from parlay.serve.app import Application, operation_id, shut_down
from parlay.serve.drafter.hosted import HostedDrafter
from parlay.serve.errors import ApiError
from parlay.serve.guard.auth import Limiter
from parlay.serve.middleware import Admission, BodyLimit, Guard
from parlay.serve.protocol.answering import BodyRoute
from parlay.serve.protocol.body import INT_LIMIT
from parlay.serve.protocol.json_values import ALL_WHOLE
from parlay.serve.settings import Settings

_MOST_TEXTS = 1024

Id = Annotated[int, Field(ge=0, lt=INT_LIMIT)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextBody(_Body):
    """One text: its tokens from position ``start`` on, and the most tokens to draft after them."""

    id: Id
    start: Id
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True), ALL_WHOLE]
    most: Annotated[int, Field(ge=0, le=MOST_NODES)]
    prompt_length: Id
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_k: Id = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=WHOLE[0], le=WHOLE[-1])] = 0
    sample: Id = 0
    salt: Annotated[str, Field(max_length=64)] = ""
    store: bool = True


class DraftsBody(_Body):
    """News of a client's texts. ``over`` are texts that it will not ask about again."""

    client: Annotated[str, Field(min_length=1, max_length=64)]
    tokenizer: Annotated[str, Field(max_length=64)] = ""
    over: Annotated[list[Id], Field(max_length=8192)] = []
    texts: Annotated[list[TextBody], Field(max_length=_MOST_TEXTS)]


class DraftReply(BaseModel):
    """A draft tree; or ``held``, how many tokens of the text the service has: then the client must send those after
    them, and nothing is drafted."""

    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    held: int | None = None


class DraftsReply(BaseModel):
    """The drafts of all texts, in the order of the request."""

    drafts: list[DraftReply]


class Info(BaseModel):
    """The service's drafter and its vocabulary."""

    version: Literal[1] = 1
    strategy: str
    vocab_size: int
    tokenizer: str


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Counts(BaseModel):
    """Totals since the start, and the number of texts held now."""

    requests: int
    batches: int
    texts: int
    drafted_tokens: int
    seconds: float
    failures: int
    held: int


def create_drafter_app(drafter: HostedDrafter, settings: Settings | None = None) -> FastAPI:
    """Make an ASGI application for one drafter, which it closes at shutdown. API keys and limits work as in
    `create_app`.

    ``app.state`` holds what `shut_down` needs: ``registry`` (the drafter), ``settings``, ``limiter``.
    """
    settings = settings or Settings()
    app = Application(
        title="Parlay drafter",
        summary="Drafts for speculative decoding elsewhere.",
        version=__version__,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
    )
    app.state.registry = drafter
    app.state.settings = settings
    app.state.limiter = Limiter(settings)
    app.router.route_class = BodyRoute
    _add_routes(app, drafter, settings)
    app.add_middleware(BodyLimit, settings=settings)
    app.add_middleware(Admission, limiter=app.state.limiter)
    app.add_middleware(Guard, settings=settings)
    error_handlers.install(app, settings.retry_after)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await shut_down(app)


def _add_routes(app: FastAPI, drafter: HostedDrafter, settings: Settings) -> None:
    lock = [Depends(HTTPBearer(auto_error=False, description="an API key"))] if settings.keys else []

    @app.get(INFO_PATH, dependencies=lock, summary="What the service drafts with")
    async def info() -> Info:
        own = drafter.info
        return Info(strategy=own.strategy, vocab_size=own.vocab_size, tokenizer=own.tokenizer)

    @app.post(DRAFTS_PATH, dependencies=lock, summary="Draft for each text", response_model_exclude_none=True)
    async def drafts(body: DraftsBody, request: Request) -> DraftsReply:
        own = drafter.info.tokenizer
        if body.tokenizer and own and body.tokenizer != own:
            raise ApiError(
                400,
                "tokenizer is not that of the drafter of this service: start it with a drafter of the same tokenizer",
                "tokenizer",
            )
        updates = [_update(text, drafter, place) for place, text in enumerate(body.texts)]
        answers = await drafter.draft(Owner(request.state.tenant, body.client), updates, body.over)
        return DraftsReply(drafts=[DraftReply(**answer_as_json(answer)) for answer in answers])

    @app.get("/stats", dependencies=lock, summary="What was drafted")
    async def stats() -> Counts:
        return Counts(**vars(drafter.counts), held=len(drafter.service))

    @app.get("/health", summary="Is the service alive?")
    async def health() -> Health:
        return Health()


def _update(text: TextBody, drafter: HostedDrafter, place: int) -> TextUpdate:
    """Check one text, and translate it for the drafter. Raises ApiError for ids outside the vocabulary, and for a text
    that is empty or too long."""
    name, service = f"texts[{place}]", drafter.service
    if text.start + len(text.tokens) > service.longest:
        raise ApiError(400, f"{name}.tokens must have at most {service.longest} ids", f"{name}.tokens")
    if text.start + len(text.tokens) == 0:
        raise ApiError(400, f"{name}.tokens must have at least one id", f"{name}.tokens")
    if text.tokens and max(text.tokens) >= service.vocab_size:
        raise ApiError(400, f"{name}.tokens must be ids from 0 to {service.vocab_size - 1}", f"{name}.tokens")
    facts: dict[str, Any] = text.model_dump(exclude={"id", "start", "tokens", "most"})
    return TextUpdate(text.id, text.start, text.tokens, text.most, TextFacts(**facts))
