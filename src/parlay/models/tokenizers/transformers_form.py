"""A tokenizer as transformers' class, with all the methods that programs written for transformers call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parlay.models.tokenizers.plain import PlainTokenizer
from parlay.types import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def in_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerBase | Tokenizer:
    """A `PlainTokenizer` as `transformers.PreTrainedTokenizerFast`, with the same ids and texts; others as they are.

    A tokenizer of transformers is of its class already, and one of a caller's own class is what the caller gave.
    """
    if not isinstance(tokenizer, PlainTokenizer):
        return tokenizer
    from transformers import PreTrainedTokenizerFast  # imports for half a second

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        **tokenizer.special_tokens_map,
    )
