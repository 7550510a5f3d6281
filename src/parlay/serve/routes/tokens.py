"""``/tokenize`` and ``/detokenize``, in the shapes of vLLM and of llama-server, and vLLM's ``/tokenizer_info``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import to_json
from starlette.responses import Response

from parlay.serve.chat.job import chat_template
from parlay.serve.errors import ApiError, responses
from parlay.serve.hosted import Served
from parlay.serve.protocol.answering import BodyRoute
from parlay.serve.protocol.body import INT_LIMIT
from parlay.serve.protocol.json_values import ALL_WHOLE, without_nulls
from parlay.serve.protocol.logprobs import Speller
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings
from parlay.text.chat_template import ChatOptions, in_format, render, render_pieces
from parlay.text.tokenize import encode_pieces
from parlay.types import Tokenizer

_PIECE = 8192
"""Ids that are written as JSON at a time; other threads run between two such pieces, as a long text has a million
ids."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="which model's tokenizer; optional if there is one model")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return without_nulls(data)


class TokenizePrompt(_Body):
    prompt: str
    add_special_tokens: bool = True


class TokenizeMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class TokenizeMessages(_Body):
    """A conversation, which the model's chat template formats."""

    messages: Annotated[list[TokenizeMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    add_generation_prompt: bool = True
    add_special_tokens: bool = Field(False, description="on top of those that the chat format brings")


class TokenizeContent(_Body):
    """llama-server's body; control tokens in the text are always recognised."""

    content: str
    add_special: bool = False
    parse_special: Literal[True] = True
    with_pieces: bool = False


def _which(body: object) -> str:
    if isinstance(body, TokenizeContent) or (isinstance(body, dict) and "content" in body):
        return "a content"
    chat = isinstance(body, TokenizeMessages) or (isinstance(body, dict) and "messages" in body)
    return "a conversation" if chat else "a prompt"


Tokenize = Annotated[
    Annotated[TokenizePrompt, Tag("a prompt")]
    | Annotated[TokenizeMessages, Tag("a conversation")]
    | Annotated[TokenizeContent, Tag("a content")],
    Discriminator(_which),
]


class Tokens(BaseModel):
    """``count`` is the number of tokens; ``max_model_len`` is the most that the model holds, including output."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenize(_Body):
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True), ALL_WHOLE]


class DetokenizedText(BaseModel):
    """The text, under vLLM's name and llama-server's."""

    prompt: str
    content: str


class TokenizerInfo(BaseModel):
    """The special tokens, null if the tokenizer lacks one, and the chat template, for `lm-eval`."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int


def router(registry: Registry) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute, tags=["tokens"])
    failures = responses(400, 404, 408, 413, 429, 503)

    @routes.post("/tokenize", summary="From text to token ids", responses=failures, response_model=Tokens)
    async def tokenize(body: Tokenize, request: Request) -> Response:
        served = await registry.use(body.model, request)
        reply = await request.app.state.workers.call(request, lambda: _reply(served, body, request.app.state.settings))
        return Response(reply, media_type="application/json")

    @routes.post("/detokenize", summary="From token ids to text", responses=failures, openapi_extra=_bound(registry))
    async def detokenize(body: Detokenize, request: Request) -> DetokenizedText:
        served = await registry.use(body.model, request)
        text = await request.app.state.workers.call(request, lambda: _text(served, body.tokens))
        return DetokenizedText(prompt=text, content=text)

    @routes.get("/tokenizer_info", summary="Tell of a model's tokenizer", responses=responses(400, 404, 503))
    async def tokenizer_info(request: Request, model: str | None = None) -> TokenizerInfo:
        return _info(await registry.use(model, request))

    return routes


def _info(served: Served) -> TokenizerInfo:
    special = served.required_tokenizer.special_tokens_map
    return TokenizerInfo(
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        pad_token=special.get("pad_token"),
        unk_token=special.get("unk_token"),
        chat_template=chat_template(served) or None,
        model_max_length=served.max_model_len,
    )


def _bound(registry: Registry) -> dict[str, Any]:
    """OpenAPI schema of the largest id that every loaded model has."""
    size = min((served.spec.vocab_size for served in registry.loaded), default=INT_LIMIT)
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": size - 1}}
    schema = {"properties": {"tokens": ids}}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


def _reply(served: Served, body: TokenizePrompt | TokenizeMessages | TokenizeContent, settings: Settings) -> bytes:
    if not isinstance(body, TokenizeContent):
        return _tokens(served, _ids(served, body, settings))
    ids = encode_pieces(served.required_tokenizer, [body.content], special=body.add_special)
    return b'{"tokens":[%b]}' % _pieces(served.required_tokenizer, ids) if body.with_pieces else _tokens(served, ids)


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    """Ids with their texts, or with their bytes if these are not valid UTF-8, as JSON; as Python objects they could
    take a gigabyte."""
    speller = Speller(tokenizer)
    return _written(ids, lambda token: {"id": token, "piece": _text_or_bytes(speller.bytes_of(token))})


def _text_or_bytes(spelled: bytes) -> str | list[int]:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)


def _tokens(served: Served, ids: list[int]) -> bytes:
    """`Tokens` as JSON."""
    entries = _written(ids, lambda token: token)
    return b'{"tokens":[%b],"count":%d,"max_model_len":%d}' % (entries, len(ids), served.max_model_len)


def _written(ids: list[int], tell: Callable[[int], object]) -> bytes:
    """The entries of a JSON list, written `_PIECE` at a time."""
    parts = (ids[start : start + _PIECE] for start in range(0, len(ids), _PIECE))
    return b",".join(to_json([tell(token) for token in part])[1:-1] for part in parts)


def _text(served: Served, ids: list[int]) -> str:
    """Decode ids to text. Raises ApiError for an id outside the vocabulary."""
    foreign = max(ids, default=0)
    if foreign >= served.spec.vocab_size:
        raise ApiError(400, f"token id {foreign} is outside the vocabulary of {served.spec.vocab_size}", "tokens")
    return served.required_tokenizer.decode(ids)


def _ids(served: Served, body: TokenizePrompt | TokenizeMessages, settings: Settings) -> list[int]:
    parts = [body.prompt] if isinstance(body, TokenizePrompt) else _chat_pieces(served, body, settings)
    return encode_pieces(served.required_tokenizer, parts, special=body.add_special_tokens)


def _chat_pieces(served: Served, body: TokenizeMessages, settings: Settings) -> list[str]:
    """The prompt of a chat completion with these messages, in the pieces that are tokenized."""
    tokenizer, messages = served.required_tokenizer, [message.model_dump() for message in body.messages]
    options = ChatOptions(begin_answer=body.add_generation_prompt)
    try:
        if settings.parse_special:
            return [in_format(tokenizer, messages, options, render)]
        return in_format(tokenizer, messages, options, render_pieces)
    except ValueError as error:
        raise ApiError(400, str(error), "messages") from error
