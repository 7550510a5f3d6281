"""From text to token ids, without holding up other threads, and never for a text that is certainly too long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer as Backend

from parlay.models.tokenizers.plain import PlainTokenizer, raise_panic
from parlay.types import Tokenizer

_CUT = 8
"""How many times as long as the model's context a text may be that will be cut."""
_MANY = 1024
"""Pieces that are encoded at once."""
_MOST_BYTES = 4
"""Of a character in UTF-8."""
_COMPOSED = 4
"""By how much Unicode's NFC shortens a text at most, in bytes."""


class PromptTooLong(ValueError):
    """A text that the model's context can't hold, whatever its exact number of tokens."""


class Encoder:
    """Encodes prompts. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prepare(self) -> None:
        """Look through the vocabulary now, and not when the first text comes."""
        _ = self._longest

    def encode(
        self, text: str | Sequence[str], most: int, *, special: bool = True, cut: bool = False
    ) -> tuple[int, ...]:
        """The ids, with the tokens that the tokenizer puts around every text if ``special``.

        Pieces of a text are encoded one by one, so that no token reaches from one into the next.
        Raises PromptTooLong for a text that is certainly longer than the ``most`` tokens that the model holds. One
        whose ids will be ``cut`` may be longer, within bounds. Raises ValueError for what is no Unicode.
        """
        parts = [text] if isinstance(text, str) else text
        check_unicode("".join(parts), "the prompt is")
        whole, room = "".join(parts), most * (_CUT if cut else 1)
        # A token stands for a byte at least: short texts need no look through the vocabulary.
        if len(whole) * _MOST_BYTES > room and (least := self._least_tokens(whole)) > room:
            raise PromptTooLong(f"the prompt has {least} tokens or more, and this model holds {most}: shorten it")
        return tuple(encode_pieces(self._tokenizer, parts, special=special))

    def _least_tokens(self, text: str) -> int:
        """How few tokens the text can have, from its length alone; 0 where that can't be told."""
        return -(-len(text.encode(errors="replace")) // self._longest) if self._longest else 0

    @cached_property
    def _longest(self) -> int:
        """Bytes of text that one token stands for at most; 0 for tokenizers that may drop or merge what they read."""
        if not self._tokenizer.is_fast:
            return 0
        backend = self._tokenizer.backend_tokenizer
        kind = type(backend.normalizer).__name__
        if "ByteLevel" not in repr(backend.pre_tokenizer) or kind not in ("NoneType", "NFC"):
            return 0
        longest = max(len(token.encode()) for token in self._tokenizer.get_vocab())
        return longest * (_COMPOSED if kind == "NFC" else 1)


def check_unicode(text: str, what: str) -> None:
    """Raises ValueError for a text with half of a surrogate pair, as undecodable bytes leave it: it has no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} not valid Unicode text") from None


def encode(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """The ids of a text, with the tokens that the tokenizer puts around every text if ``special``."""
    return encode_all(tokenizer, [text], special=special)[0]


def encode_pieces(tokenizer: Tokenizer, parts: Sequence[str], *, special: bool) -> list[int]:
    """The ids of a text that is encoded piece by piece. ``special``: the first piece as `encode` has it."""
    ids = encode(tokenizer, parts[0], special=special)
    for start in range(1, len(parts), _MANY):  # other threads can run in between
        for each in encode_all(tokenizer, parts[start : start + _MANY], special=False):
            ids += each
    return ids


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """`encode` for several texts. A compiled tokenizer runs beside other threads, and skips what is not used.

    Raises ValueError for a text at which the tokenizer fails.
    """
    backend = _backend(tokenizer)
    try:
        if backend is None:
            return [list(tokenizer.encode(text, add_special_tokens=special)) for text in texts]
        return [list(encoded.ids) for encoded in backend.encode_batch_fast(list(texts), add_special_tokens=special)]
    except BaseException as error:
        raise_panic(error)
        raise


def _backend(tokenizer: Tokenizer) -> Backend | None:
    """The compiled tokenizer, where encoding is all that ``tokenizer.encode`` does."""
    if isinstance(tokenizer, PlainTokenizer):
        return tokenizer.backend_tokenizer
    if not tokenizer.is_fast:
        return None
    from transformers import TokenizersBackend  # here, because it takes half a second, and this tokenizer is one

    backend = tokenizer.backend_tokenizer
    if not isinstance(tokenizer, TokenizersBackend) or backend.truncation is not None or backend.padding is not None:
        return None
    if type(tokenizer)._encode_plus is not TokenizersBackend._encode_plus:
        return None
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend
