"""Fill-in-the-middle: prompts from a prefix and a suffix, for models that were trained on them."""

from __future__ import annotations

from parlay.serve.errors import ApiError
from parlay.types import Tokenizer

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""Per family: what stands before the prefix, between prefix and suffix, and after the suffix."""


def infill_prompt(tokenizer: Tokenizer | None, prefix: str, suffix: str) -> list[int]:
    """Ids that ask for what belongs between the two. Raises ApiError for a model that was not made for it."""
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    marks = next((marks for marks in _MARKS if all(mark in vocabulary for mark in marks)), None)
    if tokenizer is None or marks is None:
        message = (
            "suffix is not supported by this model, whose tokenizer has no fill-in-the-middle tokens: leave it out"
        )
        raise ApiError(400, message, "suffix", "unsupported_field")
    before, between, after = (vocabulary[mark] for mark in marks)
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    start = first if tokenizer.encode("")[:1] == first else []
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
    return [*start, before, *parts[0], between, *parts[1], after]
