"""The bodies of Ollama's API."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from parlay.serve.openai.completions.body import Text
from parlay.serve.protocol.body import INT_LIMIT, OURS, Body, CacheSalt, JsonObject, Penalty, Probability, StopTexts
from parlay.serve.protocol.json_values import WHOLE, Seed, in_words
from parlay.serve.protocol.resuming import Resume
from parlay.serve.routes.embeddings import PoolingBody, Texts

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")


def seconds(value: float | str) -> float:
    """Parse a duration: a number of seconds, or a text such as ``5m`` or ``1h30m``. A negative one means forever.

    Raises ValueError for anything else.
    """
    if not isinstance(value, str):
        return math.inf if value < 0 else float(value)
    text = value.removeprefix("-")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        found = float(text)
    elif re.fullmatch(rf"(?:{_PART.pattern})+", text):
        found = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    else:
        raise ValueError("must be seconds, or a time such as '5m' or '1h30m'")
    return math.inf if value.startswith("-") else found


Time = Annotated[
    str,
    Field(pattern=r"^-?([0-9]+([.][0-9]+)?|([0-9]+([.][0-9]+)?(ns|us|ms|s|m|h))+)$", max_length=64),
    in_words("must be seconds, or a time such as 5m or 1h30m"),
]
KeepAlive = float | Time | None
Base64 = Annotated[list[str], Field(max_length=0, fail_fast=True)]
"""Always an empty list: this server reads text only."""


class OllamaOptions(Body):
    """Sampling options; those about how Ollama runs a model have no effect here."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "mirostat": (0,),
        "tfs_z": (1,),
    }

    num_predict: Annotated[int, Field(ge=-2, le=INT_LIMIT), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT_LIMIT), WHOLE] | None = None
    top_p: Probability | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Probability | None = None
    repeat_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=INT_LIMIT), WHOLE] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: StopTexts | None = None


class OllamaBody(Body):
    """``strategy``, ``exactness``, ``store``, ``cache_salt``, ``resume`` are extensions. Null means the same as leaving
    a field out."""

    elsewhere: ClassVar[Mapping[str, str]] = OURS

    model: Annotated[str | None, Field(description="optional if the server has one model")] = None
    options: OllamaOptions | None = None
    format: Annotated[Literal["", "json"] | JsonObject | None, Field(union_mode="left_to_right")] = None
    stream: bool | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    strategy: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    exactness: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    store: bool | None = None
    cache_salt: CacheSalt | None = None
    resume: Resume | None = None

    @property
    def streamed(self) -> bool:
        return self.stream is not False

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must match; None if any answer will do."""
        if self.format == "json":
            return {"type": "object"}
        return self.format if isinstance(self.format, dict) else None

    @property
    def keep_seconds(self) -> float | None:
        """How many seconds the model stays loaded after this request; None: the server's setting."""
        return None if self.keep_alive is None else seconds(self.keep_alive)


class GenerateBody(OllamaBody):
    """With ``raw`` the prompt is given to the model without a chat template. Without a prompt the model is only
    loaded."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"context": ([],), "template": ("",)}

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Base64 | None = None


class OllamaCalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    arguments: JsonObject


class OllamaCall(Body):
    id: str | None = None
    function: OllamaCalledFunction


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Base64 | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ToolFunction(Body):
    name: Annotated[
        str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$"), in_words("must have 1 to 128 letters, digits, _, . or -")
    ]
    description: str | None = None
    parameters: JsonObject | None = None


class OllamaTool(Body):
    type: Literal["function"] | None = None
    function: ToolFunction


class OllamaChatBody(OllamaBody):
    """Without messages the model is only loaded."""

    messages: Annotated[list[OllamaMessage], Field(max_length=4096, fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=128, fail_fast=True)] | None = None


class ModelBody(Body):
    """The model's name, in either of two fields."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class PullBody(Body):
    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class EmbedBody(PoolingBody):
    """``pooling`` and ``normalize`` are extensions. A text longer than the context is refused, not cut."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {**PoolingBody.unsupported, "dimensions": (None,)}

    input: Text | Texts
    normalize: bool = True


class EmbeddingsBody(PoolingBody):
    """One text, in the API's older form. An empty text only loads the model."""

    prompt: str = ""


class EmbedReply(BaseModel):
    """``total_duration`` and ``load_duration`` are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsReply(BaseModel):
    embedding: list[float]
