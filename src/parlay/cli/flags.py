"""Command-line flags made from the fields of `SamplingParams`, and those that name a model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from parlay.types import SamplingParams

SAMPLING_HELP = {
    "max_tokens": "most tokens to write",
    "temperature": "0 always takes the likeliest token; 1 samples the model's own law",
    "top_k": "sample among the K likeliest tokens only; 0 for all",
    "top_p": "sample among the likeliest tokens that hold this much probability",
    "min_p": "drop tokens less likely than this share of the likeliest one",
    "typical_p": "sample among the most typical tokens that hold this much probability",
    "repetition_penalty": "above 1 discourages tokens of prompt and output",
    "presence_penalty": "discourages tokens of the output, once each",
    "frequency_penalty": "discourages tokens of the output, for each time they occur",
    "seed": "same seed, same text; drawn and reported when not given",
    "min_tokens": "do not end before so many tokens",
    "stop": "end where this text would appear; may be given several times",
    "include_stop_str_in_output": "keep the stop text at the end",
    "ignore_eos": "go on after the model's end-of-text token",
    "skip_special_tokens": "leave special tokens out of the text",
}
PYTHON_ONLY = frozenset(
    {"n", "logit_bias", "allowed_token_ids", "logits_processors", "stop_token_ids"}
    | {"logprobs", "prompt_logprobs", "logprobs_mode", "structured_outputs"}
)
"""Fields of SamplingParams that make no flag."""
DEFAULTS: Mapping[str, object] = {"max_tokens": 256, "temperature": 0.0}
"""Where the command differs from SamplingParams: text that repeats, and is longer than vLLM's 16 tokens."""
ALIASES = {"max_tokens": "max_new_tokens"}

_READERS: Mapping[str, tuple[Callable[[str], object], str]] = {"int": (int, "N"), "float": (float, "X")}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, and how to run it: the same for every command that decodes."""
    parser.add_argument(
        "--model",
        default="parlay-mini",
        help="built-in name, local folder, or Hugging Face Hub id (default: parlay-mini)",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 or float64 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    parser.add_argument("--quantize", choices=("int8",), help="store the weights in eight bits: half of bfloat16's")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag per field. Flags that were not given stay out of the namespace."""
    group = parser.add_argument_group("sampling")
    for field in _sampling_fields():
        names = [name for name in (field.name, ALIASES.get(field.name)) if name]
        group.add_argument(
            *("--" + name.replace("_", "-") for name in names),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=SAMPLING_HELP[field.name] + _default_text(field),
            **_kind(field),
        )


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """Raises ValueError for a value out of range."""
    values = vars(options)
    given = {field.name: values[field.name] for field in _sampling_fields() if field.name in values}
    return SamplingParams(**{**DEFAULTS, **given})


def _sampling_fields() -> list[Field[Any]]:
    return [field for field in fields(SamplingParams) if field.name not in PYTHON_ONLY]


def _kind(field: Field[Any]) -> dict[str, Any]:
    """How argparse reads the field, from its annotation."""
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool":
        return {"action": argparse.BooleanOptionalAction} if field.default is True else {"action": "store_true"}
    if kind == "str | Sequence[str]":
        return {"action": "append", "metavar": "TEXT"}
    reader, metavar = _READERS[kind]
    return {"type": reader, "metavar": metavar}


def _default_text(field: Field[Any]) -> str:
    default = DEFAULTS.get(field.name, field.default)
    hidden = default is MISSING or default is None or isinstance(default, bool)
    return "" if hidden else f" (default: {default:g})"
