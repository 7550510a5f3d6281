"""Strategies that copy from prompt, output and references."""

from __future__ import annotations

from parlay.drafters.entries import Entry, Parameter, budget
from parlay.types import Exactness

ENTRIES = (
    Entry(
        name="prompt-lookup",
        family="copy",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing",
        summary="Copies what followed the longest earlier match of the latest tokens, in prompt, output or references.",
        reference="Saxena 2023, prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding",
        parameters={
            "max_ngram": Parameter(int, 32, "matches longer than this count as this long", low=1, high=256),
            "min_ngram": Parameter(int, 1, "fewest tokens that must match", low=1, high=256),
            "pick": Parameter(str, "recent", "which occurrence to copy from", choices=("recent", "leftmost")),
            **budget(31),
        },
        factory="parlay.drafters.prompt_lookup:PromptLookup",
        toys=("", "min_ngram=1,max_ngram=2,pick=leftmost"),
    ),
)
