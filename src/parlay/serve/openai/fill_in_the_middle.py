"""Fill-in-the-middle: prompts from a prefix and a suffix, for models that were trained on them."""

from __future__ import annotations

from parlay.llm.vocabulary import Vocabulary
from parlay.serve.errors import ApiError
from parlay.text.tokenize import Encoder, PromptTooLong
from parlay.types import Tokenizer

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""Per family: what stands before the prefix, between prefix and suffix, and after the suffix."""


def infill_prompt(vocabulary: Vocabulary, most: int, prefix: str, suffix: str) -> list[int]:
    """Ids that ask for what belongs between the two.

    Raises ApiError for a model that was not made for it, and for more than the ``most`` tokens that it holds.
    """
    tokenizer, encoder = vocabulary.tokenizer, vocabulary.encoder
    marks = _marks(tokenizer) if tokenizer is not None else None
    if tokenizer is None or encoder is None or marks is None:
        message = (
            "suffix is not supported by this model, whose tokenizer has no fill-in-the-middle tokens: leave it out"
        )
        raise ApiError(400, message, "suffix", "unsupported_field")
    before, between, after = marks
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    start = first if tokenizer.encode("")[:1] == first else []
    parts = _encoded(encoder, most, "prompt", prefix), _encoded(encoder, most, "suffix", suffix)
    return [*start, before, *parts[0], between, *parts[1], after]


def _marks(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    """The ids of the first family's that the tokenizer has. Nothing lists its tokens, which takes long."""
    known = tokenizer.backend_tokenizer.token_to_id if tokenizer.is_fast else tokenizer.get_vocab().get
    for before, between, after in _MARKS:
        first, second, third = known(before), known(between), known(after)
        if first is not None and second is not None and third is not None:
            return first, second, third
    return None


def _encoded(encoder: Encoder, most: int, field: str, text: str) -> tuple[int, ...]:
    try:
        return encoder.encode(text, most, special=False)
    except PromptTooLong as error:
        raise ApiError(400, str(error), field, "context_length_exceeded") from None
