"""The bodies of `/completion` and `/infill`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from parlay.serve.llama_server import RANDOM_SEEDS
from parlay.serve.openai.completions.body import PromptField, prompts_of
from parlay.serve.protocol.body import Body, Count, GenerationBody, LogitBias, conflict
from parlay.serve.protocol.json_values import Seed
from parlay.serve.protocol.resuming import Resume

LIKELIEST = "infill"
"""The sampler that editors ask for. llama-server's takes the likeliest token if one stands out; here it always does."""
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama-server's defaults."""
_SAMPLERS = {
    "temperature": ("temperature",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "typ_p": ("typical_p",),
    "typical_p": ("typical_p",),
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
}
"""The fields that each sampler reads; fields of samplers that a request leaves out have no effect."""


def _drawn(seed: int) -> int | None:
    return None if seed in RANDOM_SEEDS else seed


def _pairs(value: Any) -> Any:
    """Turn a list of [token, bias] pairs into the object that other APIs use; false forbids the token."""
    if not isinstance(value, list):
        return value
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) < len(value):
        raise ValueError("must be pairs of a token id and a number, or false")
    return {str(token): -100.0 if bias is False else bias for token, bias in pairs}


class LlamaBody(GenerationBody):
    """Fields of `/completion` and `/infill`. ``n_predict`` becomes max_tokens; 0 reads the prompt into the cache
    without writing."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **{name: values for name, values in GenerationBody.unsupported.items() if name != "samplers"},
        "n_cmpl": (1,),
        "n_probs": (0,),
        "post_sampling_probs": (False,),
    }

    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Count | None = None
    seed: Annotated[Seed, AfterValidator(_drawn)] | None = None
    logit_bias: Annotated[LogitBias | None, BeforeValidator(_pairs)] = None
    samplers: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    t_max_predict_ms: Annotated[float, Field(ge=0)] | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=256, fail_fast=True)] | None = None
    resume: Resume | None = None

    def check(self) -> None:
        super().check()
        if (self.n or 1) > 1:
            raise conflict("n can't be above 1 here: an answer is one text", "n")

    def sampling(self) -> dict[str, Any]:
        """The sampling fields with this API's defaults; None where no sampler reads a field."""
        names = {name for fields in _SAMPLERS.values() for name in fields}
        values = {**_DEFAULTS, **self.model_dump(include=names, exclude_none=True)}
        if self.samplers is not None:
            used = {name for sampler in self.samplers for name in _SAMPLERS.get(sampler, ())}
            used |= {"temperature"} if self.temperature == 0 else set()
            values = {name: value for name, value in values.items() if name in used}
            if LIKELIEST in self.samplers:
                values["temperature"] = 0.0
        if values.get("top_p") == 0:
            values |= {"top_p": None, "top_k": 1}
        return {**dict.fromkeys(names), **values}

    def idle(self) -> list[str]:
        unknown = [name for name in self.samplers or () if name not in {*_SAMPLERS, LIKELIEST}]
        late = ["t_max_predict_ms"] if self.t_max_predict_ms and self.stream else []
        return [*super().idle(), *(["samplers"] if unknown else []), *late]


class LlamaCompletionBody(LlamaBody):
    prompt: PromptField

    @property
    def prompts(self) -> list[str | list[int]]:
        """A list with one entry per prompt."""
        return prompts_of(self.prompt)


class OtherFile(Body):
    """An excerpt of another file."""

    filename: str | None = None
    text: str | None = None


class InfillBody(LlamaBody):
    """``prompt`` is the text of the current line before the cursor, which follows the prefix.

    ``n_cache_reuse`` is the shortest run of cached tokens to reuse at another position, if the server allows it
    (``--cache-reuse``); 0: none.
    """

    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: Annotated[list[OtherFile], Field(max_length=1024, fail_fast=True)] | None = None
    prompt: str | None = None
    n_cache_reuse: Count | None = None


class SlotBody(Body):
    """``filename`` is the name of the server's own file, or omitted."""

    filename: Annotated[str, Field(max_length=256)] | None = None
    model: Annotated[str, Field(max_length=1024)] | None = None
