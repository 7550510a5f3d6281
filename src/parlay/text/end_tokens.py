"""Finds the tokens that end a text: tokens that a model names, and tokens whose text is a known end."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.types import ParlayError, Tokenizer

KNOWN_ENDS = frozenset(
    {
        *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>"),
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>", "<REPO>"),
        *("<|file_sep|>", "<file_sep>"),
    }
)
"""Texts of control tokens that end a text, a message or the middle of a file, as in llama.cpp's vocabulary."""

_INNER_END = "<|end|>"
_OUTER_ENDS = frozenset({"<|return|>", "<|call|>"})
"""If a vocabulary has both of these tokens, `_INNER_END` ends only a part of the answer (gpt-oss)."""


def end_tokens(tokenizer: Tokenizer | None, named: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids of the tokens that end a model's texts: first the ``named`` ids, then those found in its
    tokenizer.

    In the tokenizer, only added tokens can count because of their text.
    """
    if tokenizer is None:
        return tuple(dict.fromkeys(token for token in named if 0 <= token < vocab_size))
    texts = {str(added.content): token for token, added in sorted(tokenizer.added_tokens_decoder.items())}
    ends = KNOWN_ENDS - {_INNER_END} if texts.keys() >= _OUTER_ENDS else KNOWN_ENDS
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    found = [*named, *own, *(token for text, token in texts.items() if text in ends)]
    return tuple(dict.fromkeys(token for token in found if 0 <= token < vocab_size))


def read_end_tokens(spelled: str, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of end tokens that a user names instead of the model's own. ``spelled``: ids or texts, separated
    by commas.

    Raises ParlayError for a name that is not a single token of the model.
    """
    return tuple(dict.fromkeys(_one_token(name.strip(), tokenizer, vocab_size) for name in spelled.split(",")))


def _one_token(name: str, tokenizer: Tokenizer | None, vocab_size: int) -> int:
    if name.isascii() and name.isdigit():
        token: int | None = int(name)
    else:
        token = tokenizer.get_vocab().get(name) if tokenizer is not None else None
    if token is None or token >= vocab_size:
        raise ParlayError(
            f"end tokens: {name!r:.60} is not a token of this model: give ids or texts of single tokens", "end tokens"
        )
    return token
