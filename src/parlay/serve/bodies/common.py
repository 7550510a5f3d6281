"""What both kinds of request share: strictness, the sampling fields, and fields that are refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from parlay.serve.errors import ApiError
from parlay.serve.fields import WHOLE

SEEDS = range(-(2**63), 2**64)  # no bound of the field's own: the OpenAPI document tells bounds as floats
INT_LIMIT = 2**31 - 1
PRIORITY_LIMIT = 16
"""Each level lets a request overtake some others; without a limit one client could hold up all."""
LEAST_TEMPERATURE = 1e-6  # below it, scaled logits overflow
MOST_LEVELS = 200
"""Of free-form JSON. What reads it further on, recursively, gives up at some more, each at its own."""


class Body(BaseModel):
    """A JSON object: a field that is not declared is an error, and so is one of the wrong type.

    ``unsupported`` names fields that other servers have; they get a message of their own unless they are null.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    unsupported: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not cls.unsupported & data.keys():
            return data
        for name in data:
            if name in cls.unsupported and data[name] is not None:
                raise ApiError(400, f"{name} is not supported by this server: leave it out", name, "unsupported_field")
        return {name: value for name, value in data.items() if name not in cls.unsupported}


def conflict(message: str, field: str) -> ApiError:
    """Fields that do not go together; the one to leave out is named."""
    return ApiError(400, message, field)


def _check_plain(value: dict[str, Any]) -> dict[str, Any]:
    """Free-form JSON may hold numbers and characters that can't be sent back or written down."""
    if not _is_flat(value):
        raise ValueError(f"holds more than {MOST_LEVELS} levels")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        raise ValueError("holds NaN, infinity, or text that is not Unicode") from None
    return value


def _is_flat(value: object) -> bool:
    """Whether nothing lies deeper than `MOST_LEVELS`."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [item for items in inner for item in items]
        if not level:
            return True
    return False


JsonObject = Annotated[dict[str, Any], AfterValidator(_check_plain)]


class TextPart(Body):
    """One part of a message. This server takes text only."""

    type: Literal["text"]
    text: str


def _shape(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


Content = Annotated[Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("parts")], Discriminator(_shape)]
"""A text, or a list of parts that are texts."""


def text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class Prediction(Body):
    """A text that the answer may largely repeat: drafted from, never fed to the model, without effect on the text."""

    type: Literal["content"]
    content: Content


class StreamOptions(Body):
    unsupported: ClassVar[frozenset[str]] = frozenset({"include_obfuscation", "continuous_usage_stats"})

    include_usage: bool | None = None


class StructuredOutputs(Body):
    """A form that the whole answer must have; exactly one is given."""

    unsupported: ClassVar[frozenset[str]] = frozenset(
        {"structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"}
    )

    json_: Annotated[str | JsonObject | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None

    def check(self) -> None:
        given = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in given) != 1:
            message = "structured_outputs takes exactly one of json, json_object, regex, choice, grammar"
            raise conflict(message, "structured_outputs")


TokenId = Annotated[int, Field(ge=0, le=INT_LIMIT), WHOLE]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Probability = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=0, le=INT_LIMIT), WHOLE]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class GenerationBody(Body):
    """The fields of both kinds. Null is as good as absent. ``user`` and ``metadata`` are taken and have no effect."""

    model: Annotated[str | None, Field(description="may be left out where the server has one model")] = None
    n: Annotated[int, Field(ge=1, le=INT_LIMIT), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT_LIMIT), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=4096, json_schema_extra={"additionalProperties": False}),
        ]
        | None
    ) = None
    seed: Annotated[int, WHOLE] | None = None
    stop: (
        Annotated[
            Annotated[StopText, Tag("text")] | Annotated[list[StopText], Field(max_length=16), Tag("parts")],
            Discriminator(_shape),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    strategy: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    prediction: Prediction | None = None
    documents: Annotated[list[str], Field(max_length=1024)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-PRIORITY_LIMIT, le=PRIORITY_LIMIT), WHOLE] | None = None
    structured_outputs: StructuredOutputs | None = None
    store: bool | None = None
    user: str | None = None
    metadata: JsonObject | None = None

    def check(self) -> None:
        """What no schema can say. Raises ApiError for fields that don't go together. Called once the model is known."""
        if self.temperature and self.temperature < LEAST_TEMPERATURE:
            raise conflict(f"temperature must be 0 or at least {LEAST_TEMPERATURE:g}", "temperature")
        if self.seed is not None and self.seed not in SEEDS:
            raise conflict("seed must be a number of 64 bits", "seed")
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options is for streams: set stream to true, or leave it out", "stream_options")
        if self.structured_outputs is not None:
            self.structured_outputs.check()

    @property
    def structured(self) -> bool:
        """Whether a form has to be compiled."""
        return self.structured_outputs is not None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)
