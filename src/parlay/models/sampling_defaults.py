"""The sampling parameters that a model's makers recommend, from generation_config.json or a GGUF file's keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parlay.models.fetch.resolving import resolve_config
from parlay.models.gguf.file import read_parts
from parlay.types import LEAST_TEMPERATURE, FieldError, ParlayError, SamplingParams

_CONFIG = "generation_config.json"
_CONFIG_NAMES = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_GGUF_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def sampling_defaults(model: str) -> dict[str, float]:
    """The fields of `SamplingParams` that the model's files set.

    Values that are null are left out, and a temperature so low that logits overflow becomes 0. Raises ParlayError for
    an unknown model, and for values that nobody can sample with.
    """
    path = resolve_config(model)
    defaults = _of_gguf(path) if path.is_file() else _of_folder(path)
    try:
        SamplingParams(**defaults)  # type: ignore[arg-type]
    except ValueError as error:
        file = path if path.is_file() else path / _CONFIG
        raise ParlayError(f"{file} has a value that can't be used: {error}; correct it") from None
    if 0 < defaults.get("temperature", 1) < LEAST_TEMPERATURE:
        defaults["temperature"] = 0.0
    return defaults


def usual_params(model: object, wanted: str) -> SamplingParams:
    """The parameters of calls that give none.

    With ``wanted`` "auto" these are the recommendations of the model's makers, with "vllm" the defaults of
    `SamplingParams`. Raises ValueError for any other value.
    """
    if wanted not in ("auto", "vllm"):
        raise FieldError("generation_config", f"={wanted!r}: choose auto or vllm, or say it in SamplingParams")
    defaults = sampling_defaults(model) if isinstance(model, str) and wanted == "auto" else {}
    return SamplingParams(**defaults)  # type: ignore[arg-type]


def _of_folder(folder: Path) -> dict[str, float]:
    """Read generation_config.json as transformers does: without ``do_sample`` decoding is greedy, whatever else is
    set."""
    try:
        defaults = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(defaults, Mapping) or not defaults.get("do_sample"):
        return {}
    return _given({name: defaults[name] for name in _CONFIG_NAMES if name in defaults})


def _of_gguf(path: Path) -> dict[str, float]:
    keys = read_parts(path)[0].keys
    return _given({name: keys[key] for key, name in _GGUF_NAMES.items() if key in keys})


def _given(defaults: Mapping[str, Any]) -> dict[str, float]:
    """The values that are not null; a whole float becomes the integer that it stands for where one is needed."""
    return {
        name: int(value) if name == "top_k" and isinstance(value, float) and value.is_integer() else value
        for name, value in defaults.items()
        if value is not None
    }
