"""The base of all bodies: sampling fields, strict types, and fields that are ignored or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)

from parlay.serve.errors import ApiError
from parlay.serve.field_spelling import MOST_FIELDS, Paths, respelled
from parlay.serve.protocol.json_values import ALL_WHOLE, WHOLE, Seed, TokenKey, check_plain
from parlay.serve.settings import Settings

INT_LIMIT = 2**31 - 1
PRIORITY_LIMIT = 16
"""Higher priorities overtake others; without a limit one client could hold up all."""
MOST_BIASES = 4096


class Body(BaseModel):
    """A JSON object with strict types; fields that are not declared are left to `check_extras`.

    ``unsupported`` maps fields that can't be honoured to the values without effect.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Undeclared fields that another address supports, with that address."""
    closed: ClassVar[bool] = False
    """Whether only Parlay has this object, so that an undeclared field must be a mistake."""

    @model_validator(mode="before")
    @classmethod
    def _check_count(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MOST_FIELDS:
            raise ValueError(f"has {len(data)} fields, and no object of this API has more than {MOST_FIELDS}")
        return data

    @property
    def spelled(self) -> Mapping[str, str]:
        """The body's names of fields that have other names here, by our path."""
        return {}

    def idle(self) -> list[str]:
        """Declared fields that have no effect together with the other fields' values."""
        return []

    def refuses(self, name: str, value: object) -> bool:
        """Whether an undeclared field with this value would change the answer."""
        if self.closed:
            return True
        if name in self.elsewhere:
            return value is not False
        return name in self.unsupported and value not in self.unsupported[name]


OURS: Mapping[str, str] = {
    "superposed": "/v1/completions",
    "vote": "/v1/chat/completions or /v1/completions",
    "outline": "/v1/chat/completions",
    "reason_ahead": "/v1/chat/completions or /v1/responses",
}
"""Parlay's own ways to answer, with the addresses that support them."""


def conflict(message: str, field: str) -> ApiError:
    """The error for fields that contradict each other; ``field`` is the one to leave out."""
    return ApiError(400, message, field)


JsonObject = Annotated[dict[str, Any], AfterValidator(check_plain)]


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """The text of an earlier answer that was a refusal."""

    type: Literal["refusal"]
    refusal: str


def shape_of(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


def part_type(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def tool_choice_shape(value: Any) -> str:
    """The form of a tool choice: a word, a list of allowed tools, or a tool's name."""
    if isinstance(value, str):
        return "word"
    return "allowed" if part_type(value) == "allowed_tools" else "named"


def only_text(*types: str) -> Discriminator:
    """A discriminator of content parts by their type."""
    message = f"this server reads text only, so a part has the type {' or '.join(types)}"
    return Discriminator(part_type, custom_error_type="unsupported_part", custom_error_message=message)


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")], only_text("text", "refusal")
]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Field(fail_fast=True), Tag("parts")], Discriminator(shape_of)
]
"""A string, or a list of text parts."""


def text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


class Prediction(Body):
    """Text that the answer may largely repeat: it is only drafted from, and never changes the answer."""

    type: Literal["content"]
    content: Content


class StreamOptions(Body):
    """``continuous_usage_stats``: every chunk has the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Body):
    """The form that the whole answer must have; exactly one field is set."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "structural_tag": (),
        "whitespace_pattern": (),
        "disable_additional_properties": (False,),
    }

    json_: Annotated[str | JsonObject | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None

    def check(self) -> None:
        forms = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in forms) != 1:
            message = "structured_outputs takes exactly one of json, json_object, regex, choice, grammar"
            raise conflict(message, "structured_outputs")


TokenId = Annotated[int, Field(ge=0, le=INT_LIMIT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), ALL_WHOLE]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Probability = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=0, le=INT_LIMIT), WHOLE]
CacheSalt = Annotated[str, Field(max_length=1024)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
StopList = Annotated[list[StopText], Field(max_length=16, fail_fast=True)]
StopTexts = Annotated[Annotated[StopText, Tag("text")] | Annotated[StopList, Tag("parts")], Discriminator(shape_of)]


def _check_biases(value: Any) -> Any:
    """Check the number of biases first, as each wrong key would make an error of its own."""
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise ValueError(f"holds {len(value)} tokens, and the limit is {MOST_BIASES}")
    return value


LogitBias = Annotated[
    dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MOST_BIASES, json_schema_extra={"additionalProperties": False}),
    BeforeValidator(_check_biases),
]


class GenerationBody(Body):
    """The fields of all kinds of generation, also under other servers' names (see `respelled`); null means left out."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "adapter": (),
        "dry_multiplier": (0,),
        "dynatemp_range": (0,),
        "early_stopping": (False,),
        "guided_whitespace_pattern": (),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "lora": ([],),
        "min_keep": (0, 1),
        "mirostat": (0,),
        "moderation": (),
        "prompt_embeds": (),
        "prompt_logprobs": (),
        "repeat_last_n": (-1,),
        "samplers": (),
        "structural_tag": (),
        "tfs_z": (1,),
        "thinking_budget_tokens": (-1,),
        "thinking_token_budget": (-1,),
        "top_n_sigma": (-1, 0),
        "use_beam_search": (False,),
        "xtc_probability": (0,),
    }
    elsewhere: ClassVar[Mapping[str, str]] = OURS

    model: Annotated[str | None, Field(description="optional if the server has one model")] = None
    n: Annotated[int, Field(ge=1, le=INT_LIMIT), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT_LIMIT), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: StopTexts | None = None
    bad_words: Annotated[list[StopText], Field(max_length=1024, fail_fast=True)] | None = None
    allowed_token_ids: TokenIds | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT_LIMIT), WHOLE] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True), ALL_WHOLE] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    strategy: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    exactness: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    prediction: Prediction | None = None
    documents: Annotated[list[str], Field(max_length=1024, fail_fast=True)] | None = None
    cache_salt: CacheSalt | None = None
    priority: Annotated[int, Field(ge=-PRIORITY_LIMIT, le=PRIORITY_LIMIT), WHOLE] | None = None
    structured_outputs: StructuredOutputs | None = None
    store: bool | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=100)] | None = None
    negative_prompt: Annotated[str, Field(min_length=1)] | None = None

    _spelled: Paths = PrivateAttr(default_factory=Paths)

    @model_validator(mode="wrap")
    @classmethod
    def _respell(cls, data: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return read(data)
        fields, paths = respelled(data, cls.model_fields)
        body = read(fields)
        body._spelled = paths
        return body

    @property
    def spelled(self) -> Mapping[str, str]:
        return self._spelled

    def check(self) -> None:
        """Check rules that the schema can't express, once the model is known. Raises ApiError for fields that
        contradict each other."""
        if self.truncate_prompt_tokens == 0:
            raise conflict(
                "truncate_prompt_tokens must be at least 1, or -1 for the model's context, got 0",
                "truncate_prompt_tokens",
            )
        if self.structured_outputs is not None:
            self.structured_outputs.check()

    def idle(self) -> list[str]:
        unstreamed = ["stream_options"] if self.stream_options is not None and not self.stream else []
        unguided = self.negative_prompt is not None and self.guidance_scale in (None, 1)
        return [*unstreamed, *(["negative_prompt"] if unguided else [])]

    def refuses(self, name: str, value: object) -> bool:
        """Refuse a field as `Body` does, but accept repeat_last_n when there is no repetition penalty."""
        if name == "repeat_last_n" and self.repetition_penalty in (None, 1):
            return False
        return super().refuses(name, value)

    @property
    def structured(self) -> bool:
        """Whether the answer may be held to a form, which must be compiled."""
        return self.structured_outputs is not None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


logger = logging.getLogger(__name__)

HEADER = "parlay-ignored"
_MOST = 20
_LONGEST = 100  # most characters of a path


def check_extras(body: Body, request: Request, settings: Settings) -> None:
    """Note which fields have no effect, for the reply's header and the log, and how the body names the others.

    Raises ApiError for a field that would change the answer; in a strict server, for any undeclared one.
    """
    request.state.spelled = body.spelled
    ignored = body.idle()
    for path, name, owner, value in _extras(body, ""):
        if owner.refuses(name.rpartition(".")[2], value):
            where = owner.elsewhere.get(name.rpartition(".")[2])
            says = "not supported by this server: remove it" if where is None else f"for {where}: send it there"
            raise ApiError(400, f"{path} is {says}", path, "unsupported_field")
        ignored.append(path)
    note_ignored(request, settings, ignored)


def note_ignored(request: Request, settings: Settings, paths: Sequence[str]) -> None:
    """Add fields to the reply's header of ignored fields; each is logged as a warning the first time.

    Raises ApiError if the server is strict.
    """
    if not paths:
        return
    if settings.strict:
        raise ApiError(400, f"unsupported field {paths[0]!r}: remove it", paths[0], "unsupported_field")
    plain = [_plain(path) for path in dict.fromkeys(paths)]
    request.state.ignored = [*ignored_fields(request), *plain]
    known: set[str] = request.app.state.ignored_before
    new = [path for path in plain if path not in known]
    if new and len(known) < 1000:
        known.update(new)
        logger.warning("%s: fields without effect here: %s", request.url.path, ", ".join(new))


def ignored_fields(request: Request) -> list[str]:
    known: list[str] = request.scope["state"].get("ignored", [])
    return known


def ignored_header(request: Request) -> dict[str, str]:
    """The header that lists ignored fields; empty if there are none."""
    paths = ignored_fields(request)
    if not paths:
        return {}
    more = [f"and {len(paths) - _MOST} more"] if len(paths) > _MOST else []
    return {HEADER: ", ".join([*paths[:_MOST], *more])}


def _plain(path: str) -> str:
    """The path in printable ASCII, as headers require."""
    text = path.encode("ascii", "backslashreplace").decode()
    text = "".join(letter if letter.isprintable() and letter != "," else "?" for letter in text)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _extras(body: Body, path: str) -> Iterator[tuple[str, str, Body, object]]:
    """Yield path, name, owning body and value of each undeclared field; null means the same as leaving it out."""
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            yield f"{path}{name}", name, body, value
    for name, field in type(body).model_fields.items():
        yield from _inside(body.__dict__[name], f"{path}{field.alias or name}")


def _inside(value: object, path: str) -> Iterator[tuple[str, str, Body, object]]:
    if isinstance(value, Body):
        yield from _extras(value, f"{path}.")
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for place, item in enumerate(value):
            yield from _inside(item, f"{path}[{place}]")
