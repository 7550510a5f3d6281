"""`transformers` as a system under test: every plain combination, prompt lookup, and assisted generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel

from benchmarks.figures.systems import Stopwatch, System, Timed
from parlay.bench import transformers_generate
from parlay.bench.transformers_generate import PROMPT_LOOKUP, compiled, load

if TYPE_CHECKING:  # `benchmarks.peers` runs this in an environment without Parlay's dependencies
    from benchmarks.figures.prompts import Prompt

Attention = Literal["sdpa", "eager"]
Cache = Literal["dynamic", "static"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ATTENTIONS: tuple[Attention, ...] = ("sdpa", "eager")
CACHES: tuple[Cache, ...] = ("dynamic", "static")


@dataclass(frozen=True, slots=True)
class Combination:
    """How to run a model plainly. ``static`` is the static cache with the decoding forward compiled."""

    dtype: str
    attention: Attention
    cache: Cache

    def __str__(self) -> str:
        return f"transformers {self.dtype} {self.attention} {self.cache}"


COMBINATIONS = tuple(
    Combination(dtype, attention, cache) for dtype in DTYPES for attention in ATTENTIONS for cache in CACHES
)


def default_combination(directory: Path) -> Combination:
    """What `from_pretrained` and `generate` do with the checkpoint when they are told nothing."""
    model = load(directory)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == model.dtype)
    return Combination(dtype, model.config._attn_implementation, "dynamic")


class Field:
    """Loads models of one checkpoint once for all systems that share them."""

    def __init__(self, directory: Path, draft: Path, longest: int) -> None:
        """``longest`` is how many tokens, prompt and answer, a static cache must hold."""
        torch._dynamo.reset()  # else models compiled before count against the limit, and later ones run uncompiled
        self._directory = directory
        self._draft = draft
        self._longest = longest
        self._models: dict[tuple[Path, str, str], PreTrainedModel] = {}

    def plain(self, combination: Combination) -> System:
        """Token by token."""
        options = compiled(self._longest) if combination.cache == "static" else {}
        return self._system(str(combination), combination, options)

    def prompt_lookup(self, combination: Combination) -> System:
        """Its own prompt lookup."""
        return self._system("transformers prompt lookup", combination, PROMPT_LOOKUP)

    def assisted(self, combination: Combination) -> System:
        """Its assisted generation with the draft model, at its defaults."""
        draft = replace(combination, cache="dynamic")
        return self._system("transformers assisted", combination, {"assistant_model": self._model(self._draft, draft)})

    def _system(self, name: str, combination: Combination, options: dict[str, Any]) -> System:
        model = self._model(self._directory, combination)

        def decode(prompt: Prompt, most: int) -> Timed:
            return generate(model, prompt.ids, most, options, note=str(combination))

        return System(name, decode)

    def _model(self, directory: Path, combination: Combination) -> PreTrainedModel:
        key = (directory, combination.dtype, combination.attention)
        if key not in self._models:
            self._models[key] = load(
                directory, dtype=DTYPES[combination.dtype], attn_implementation=combination.attention
            )
        return self._models[key]


def generate(model: PreTrainedModel, ids: Sequence[int], most: int, options: dict[str, Any], note: str = "") -> Timed:
    """One greedy `generate` under the stopwatch."""
    watch = Stopwatch()
    transformers_generate.generate(model, ids, most, options, watch.emit)
    return watch.read(note=note, steps=watch.emissions)
