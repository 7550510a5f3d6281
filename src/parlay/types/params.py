"""Sampling parameters: how a request chooses tokens, and the form that its text must have."""

from __future__ import annotations

import math
import numbers
import sys
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, TypeVar, get_args

from parlay.types.base import FieldError, LogitsProcessor, show_number

P = TypeVar("P", bound="SamplingParams")
LEAST_TEMPERATURE = 1e-6
"""Below this temperature, scaled logits overflow."""
LogprobsMode = Literal["raw", "processed"]
ScoreBy = Literal["cosine", "yes-no"]
"""How texts are compared: by the cosine of embeddings, or by a chat model's yes or no."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that the text must have. Field names are vLLM's; exactly one must be given.

    ``json`` is a JSON schema, ``json_object`` asks for any JSON object, ``regex`` must match the whole text, ``choice``
    lists the allowed texts, ``grammar`` is Lark or GBNF. ``disable_any_whitespace`` is for the first two: the only
    whitespace is one space after each comma and colon. Raises ValueError if none or several are given, or one that no
    text could satisfy. A schema or grammar is checked when the request reaches the model.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        kinds = {
            "json": self.json is not None,
            "json_object": bool(self.json_object),
            "regex": self.regex is not None,
            "choice": self.choice is not None,
            "grammar": self.grammar is not None,
        }
        given = [name for name, there in kinds.items() if there]
        if len(given) != 1:
            raise FieldError(
                "structured_outputs",
                f"must have exactly one of {', '.join(kinds)}, got {' and '.join(given) or 'none'}",
            )
        if not isinstance(self.json, str | Mapping | None):
            raise FieldError("structured_outputs.json", "must be a JSON schema, as a string or as an object")
        for name, value in (("regex", self.regex), ("grammar", self.grammar)):
            if value is not None and not _is_text(value):
                raise FieldError(f"structured_outputs.{name}", "must be a non-empty string")
        if self.choice is not None and (isinstance(self.choice, str) or not self.choice):
            raise FieldError("structured_outputs.choice", "must be a list of one or more strings")
        if not all(map(_is_text, self.choice or ())):
            raise FieldError("structured_outputs.choice", "must be a list of non-empty strings")
        if self.disable_any_whitespace and self.json is None and not self.json_object:
            raise FieldError(
                "structured_outputs.disable_any_whitespace", "works only with json or json_object: remove it"
            )


def _proposing(params: type[P]) -> type[P]:
    """The same class, but its error for an unknown field suggests the nearest field."""
    names, init = [field.name for field in fields(params)], params.__init__

    @wraps(init)
    def checked(self: P, **given: Any) -> None:
        for name in given:
            if name not in names:
                meant = get_close_matches(name, names, 1)
                hint = f"did you mean {meant[0]}?" if meant else f"choose one of {', '.join(names)}"
                raise TypeError(f"{params.__name__}() has no field {name}: {hint}")
        init(self, **given)

    params.__init__ = checked  # type: ignore[assignment]
    return params


@_proposing
@dataclass(slots=True, kw_only=True, repr=False)
class SamplingParams:
    """How to choose tokens. Field names and defaults are vLLM's.

    ``seed=None`` draws one seed per request and reports it. ``top_k`` 0 or -1 keeps the whole vocabulary.
    ``temperature=0`` is greedy. ``truncate_prompt_tokens`` keeps only the last tokens of a longer prompt; -1 keeps as
    many as leave room for one token of output. ``logprobs`` and ``prompt_logprobs`` are how many of the likeliest
    tokens are listed for each token; -1: all. ``guidance_scale`` and ``negative_prompt`` are those of transformers: a
    scale above 1 moves the text away from what the model would write after the negative prompt, which is a text or
    token ids. In a chat, a text replaces the system message. Without a negative prompt, the prompt's last token is
    used. ``structured_outputs`` may also be a dict of its fields. You may set fields later: a request uses the values
    at the time it is made. Raises ValueError for a value out of range, here or when the request is made.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    bad_words: Sequence[str] | None = ()
    truncate_prompt_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    guidance_scale: float = 1.0
    negative_prompt: str | Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        self._check_choices()
        self.top_k = max(0, self.top_k)  # samplers and drafters know one number for the whole vocabulary
        if "" in self.stops:
            raise FieldError(
                "stop", "contains an empty string, which would end the output before its first token: remove it"
            )
        negative = self.negative_prompt
        if negative is not None and (not isinstance(negative, Sized) or not len(negative)):
            raise FieldError("negative_prompt", "must be a non-empty string or list of token ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise FieldError(
                "min_tokens",
                f"{self.min_tokens} is more than max_tokens {self.max_tokens}: lower min_tokens",
                "max_tokens",
            )
        _ = self.form

    def _check_numbers(self) -> None:
        _check_whole("n", self.n, 1)
        _check_range("temperature", self.temperature, 0)
        _check_whole("top_k", self.top_k, -1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_optional("max_tokens", self.max_tokens, 0)
        _check_whole("min_tokens", self.min_tokens, 0)
        _check_optional("logprobs", self.logprobs, -1)
        _check_optional("prompt_logprobs", self.prompt_logprobs, -1)
        _check_range("guidance_scale", self.guidance_scale, 0, _MOST_GUIDANCE)
        for name, value in (("top_p", self.top_p), ("typical_p", self.typical_p)):
            _check_number(name, value)
            if not 0 < value <= 1:
                raise FieldError(name, f"must be above 0 and at most 1, got {show_number(value)}")
        _check_number("repetition_penalty", self.repetition_penalty)
        _check_range("repetition_penalty", self.repetition_penalty, 0)
        if self.repetition_penalty == 0:
            raise FieldError("repetition_penalty", "must be above 0, got 0")
        _check_optional("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
        if self.truncate_prompt_tokens == 0:
            raise FieldError("truncate_prompt_tokens", "must be at least 1, or -1, got 0")
        if self.seed is not None and not _is_whole(self.seed):
            raise FieldError("seed", f"must be a whole number, got {self.seed!r:.60}")

    def _check_lists(self) -> None:
        _check_list("bad_words", self.bad_words, _is_text, "non-empty strings")
        _check_list("stop", None if isinstance(self.stop, str) else self.stop, _is_string, "strings, or one string")
        _check_list("stop_token_ids", self.stop_token_ids, _is_whole, "token ids")
        _check_list("allowed_token_ids", self.allowed_token_ids, _is_whole, "token ids")
        _check_list("logits_processors", self.logits_processors, callable, "functions")
        biases = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, Mapping) or not all(map(_is_whole, biases)):
            raise FieldError("logit_bias", f"must map token ids to numbers, got {self.logit_bias!r:.60}")

    def _check_choices(self) -> None:
        for name, value in (
            ("ignore_eos", self.ignore_eos),
            ("include_stop_str_in_output", self.include_stop_str_in_output),
            ("skip_special_tokens", self.skip_special_tokens),
        ):
            if value not in (True, False):  # a text such as "no" would count as true
                raise FieldError(name, f"must be True or False, got {value!r:.60}")
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise FieldError("logprobs_mode", f"must be raw or processed, got {self.logprobs_mode!r:.60}")

    @property
    def form(self) -> StructuredOutputsParams | None:
        """The form of the text, also if it was given as a dict. Raises ValueError for a dict that is not valid."""
        given = self.structured_outputs
        if not isinstance(given, Mapping | StructuredOutputsParams | None):
            raise FieldError("structured_outputs", f"must be StructuredOutputsParams or a dict, got {given!r:.60}")
        if not isinstance(given, Mapping):
            return given
        known = {field.name for field in fields(StructuredOutputsParams)}
        unknown = [name for name in given if name not in known]
        if unknown:
            raise FieldError(
                "structured_outputs", f"has no field {unknown[0]}: choose one of {', '.join(sorted(known))}"
            )
        return StructuredOutputsParams(**given)

    def __repr__(self) -> str:
        """Show the fields that differ from their defaults."""
        usual = ((each.name, each.default, getattr(self, each.name)) for each in fields(self))
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, default, value in usual if value != default)})"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def edits_logits(self) -> bool:
        """Whether guidance, biases, masks or processors change the logits."""
        own = (self.logit_bias, self.allowed_token_ids, self.logits_processors, self.bad_words)
        return self.guidance_scale != 1 or any(own)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whatever shape they were given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


_MOST = 2**63 - 1
"""Largest whole number that a field may have."""
_MOST_GUIDANCE = 100.0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    """Whether the value is a whole number; booleans are not."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def _check_list(name: str, values: object, fits: Callable[[object], bool], what: str) -> None:
    """Raises ValueError if the value is not a collection, or an element does not fit; None passes."""
    if values is None or isinstance(values, array):  # arrays are checked elsewhere
        return
    if isinstance(values, str | bytes) or not isinstance(values, Collection) or not all(map(fits, values)):
        raise FieldError(name, f"must be a list of {what}, got {values!r:.60}")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise FieldError(name, f"must be a number, got {value!r:.60}")


def _check_optional(name: str, value: int | None, low: int) -> None:
    """Check as `_check_whole` does; None passes."""
    if value is not None:
        _check_whole(name, value, low)


def _check_whole(name: str, value: int, low: int) -> None:
    """Raises ValueError for a number below ``low``, not whole, or of more than 64 bits."""
    if not _is_whole(value):
        raise FieldError(name, f"must be a whole number, got {value!r:.60}")
    _check_range(name, value, low, _MOST)


def _check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raises ValueError for a number outside [low, high], NaN and infinity included."""
    _check_number(name, value)
    is_finite = abs(value) <= sys.float_info.max if isinstance(value, int) else math.isfinite(value)
    if low <= value <= high and is_finite:
        return
    limit = f"between {low:g} and {high:g}"
    if high in (math.inf, _MOST):
        limit = f"at least {low:g}" if value < low or high == math.inf else f"at most {_MOST}"
    if value > low and high == math.inf:
        limit = f"a finite number of {limit}"
    raise FieldError(name, f"must be {limit}, got {show_number(value)}")
