"""Public path of the forms of a prompt."""

from parlay.text.prompts import (
    Prompt,
    Prompts,
    TextPrompt,
    TokensPrompt,
    conversations,
    is_prompt,
    listed,
    one_each,
    text_or_ids,
)

__all__ = [
    "Prompt",
    "Prompts",
    "TextPrompt",
    "TokensPrompt",
    "conversations",
    "is_prompt",
    "listed",
    "one_each",
    "text_or_ids",
]
