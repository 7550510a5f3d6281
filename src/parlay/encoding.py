"""From text to token ids, without holding up other threads, and never for a text that is certainly too long."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from transformers import TokenizersBackend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CUT = 8
"""How many times as long as the model's context a text may be that will be cut."""
_COMPOSED = 4
"""By how much Unicode's NFC shortens a text at most, in bytes."""


class PromptTooLong(ValueError):
    """A text that the model's context can't hold, whatever its exact number of tokens."""


class Encoder:
    """Encodes prompts for a model that holds ``max_tokens`` tokens. Any thread may use it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def encode(self, text: str, *, special: bool = True, cut: bool = False) -> tuple[int, ...]:
        """The ids, with the tokens that the tokenizer puts around every text if ``special``.

        Raises PromptTooLong. A text whose ids will be ``cut`` may be longer than the context, within bounds.
        """
        least = self._least_tokens(text)
        if least > self._max_tokens * (_CUT if cut else 1):
            raise PromptTooLong(
                f"the prompt has {least} tokens or more, and this model holds {self._max_tokens}: shorten it"
            )
        return tuple(encode(self._tokenizer, text, special=special))

    def _least_tokens(self, text: str) -> int:
        """How few tokens the text can have, from its length alone; 0 where that can't be told."""
        return -(-len(text.encode(errors="replace")) // self._longest) if self._longest else 0

    @cached_property
    def _longest(self) -> int:
        """Bytes of text that one token stands for at most; 0 for tokenizers that may drop or merge what they read."""
        if not isinstance(self._tokenizer, TokenizersBackend):
            return 0
        backend = self._tokenizer.backend_tokenizer
        kind = type(backend.normalizer).__name__
        if "ByteLevel" not in repr(backend.pre_tokenizer) or kind not in ("NoneType", "NFC"):
            return 0
        longest = max(len(token.encode()) for token in self._tokenizer.get_vocab())
        return longest * (_COMPOSED if kind == "NFC" else 1)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    """What ``tokenizer.encode`` gives. A compiled tokenizer runs beside other threads, and skips what is not used."""
    if not _is_plain(tokenizer):
        return list(tokenizer.encode(text, add_special_tokens=special, verbose=False))
    backend = tokenizer.backend_tokenizer
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens
    (encoded,) = backend.encode_batch_fast([text], add_special_tokens=special)
    return list(encoded.ids)


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it does what every compiled tokenizer does, and nothing beside it."""
    if not isinstance(tokenizer, TokenizersBackend):
        return False
    backend = tokenizer.backend_tokenizer
    as_usual = type(tokenizer)._encode_plus is TokenizersBackend._encode_plus
    return as_usual and backend.truncation is None and backend.padding is None
