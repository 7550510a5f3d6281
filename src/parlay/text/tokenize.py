"""Turns text into token ids without blocking other threads, and refuses texts that are certainly too long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer as Backend

from parlay.models.tokenizers.plain import PlainTokenizer, raise_panic
from parlay.types import Tokenizer, UsageError

_CUT = 8
"""A text that will be cut to the context may be at most this many times longer than it."""
_MANY = 1024
"""How many pieces one call encodes."""
_MOST_BYTES = 4
"""The most bytes of a character in UTF-8."""
_COMPOSED = 4
"""The largest factor by which Unicode's NFC shortens a text, in bytes."""


class PromptTooLong(ValueError):
    """The text is longer than the model's context, whatever its exact number of tokens."""


class Encoder:
    """Encodes prompts. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prepare(self) -> None:
        """Find the longest token now, so that the first text need not wait for it."""
        _ = self._longest

    def encode(
        self, text: str | Sequence[str], most: int, *, special: bool = True, cut: bool = False
    ) -> tuple[int, ...]:
        """The ids of a text; with ``special``, also the tokens that the tokenizer adds to every text.

        Pieces of a text are encoded one by one, so that no token spans two pieces. ``most`` is the model's context.
        Raises PromptTooLong for a text that certainly has more than ``most`` tokens, or, if its ids will be ``cut``,
        more than eight times ``most``. Raises ValueError for invalid Unicode.
        """
        parts = [text] if isinstance(text, str) else text
        check_unicode("".join(parts), "the prompt is")
        whole, room = "".join(parts), most * (_CUT if cut else 1)
        # Each token stands for at least one byte, so a text of few bytes needs no look at the vocabulary.
        if len(whole) * _MOST_BYTES > room and (least := self._least_tokens(whole)) > room:
            raise PromptTooLong(f"the prompt has {least} tokens or more, and this model holds {most}: shorten it")
        return tuple(encode_pieces(self._tokenizer, parts, special=special))

    def _least_tokens(self, text: str) -> int:
        """Return the fewest tokens that the text can have, by its length alone; 0 if unknown."""
        return -(-len(text.encode(errors="replace")) // self._longest) if self._longest else 0

    @cached_property
    def _longest(self) -> int:
        """The most bytes of text that one token stands for; 0 for tokenizers that may drop or merge their input."""
        if not self._tokenizer.is_fast:
            return 0
        backend = self._tokenizer.backend_tokenizer
        kind = type(backend.normalizer).__name__
        if "ByteLevel" not in repr(backend.pre_tokenizer) or kind not in ("NoneType", "NFC"):
            return 0
        longest = max(len(token.encode()) for token in self._tokenizer.get_vocab())
        return longest * (_COMPOSED if kind == "NFC" else 1)


def check_length(ids: Sequence[int], most: int) -> None:
    """Raise PromptTooLong for a prompt of more than ``most`` tokens, and UsageError for an empty one."""
    if not ids:
        raise UsageError("the prompt is empty: give some text, or token ids", "prompt")
    if len(ids) > most:
        raise PromptTooLong(f"the prompt has {len(ids)} tokens, and this model holds {most}: shorten it")


def check_unicode(text: str, what: str) -> None:
    """Raise ValueError for a text with half of a surrogate pair, which has no tokens. Python makes such texts of bytes
    that it can't decode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} not valid Unicode text") from None


def encode(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """The ids of a text; with ``special``, also the tokens that the tokenizer adds to every text."""
    return encode_all(tokenizer, [text], special=special)[0]


def opening(tokenizer: Tokenizer) -> list[int]:
    """The beginning-of-text token, if the tokenizer puts it before every text; otherwise nothing."""
    first = tokenizer.encode("")[:1]
    return first if first == [tokenizer.bos_token_id] else []


def encode_pieces(tokenizer: Tokenizer, parts: Sequence[str], *, special: bool) -> list[int]:
    """Return the ids of a text that is encoded piece by piece. ``special`` applies to the first piece, as in
    `encode`."""
    ids = encode(tokenizer, parts[0], special=special)
    for start in range(1, len(parts), _MANY):  # other threads can run in between
        for each in encode_all(tokenizer, parts[start : start + _MANY], special=False):
            ids += each
    return ids


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Encode several texts as `encode` does. A compiled tokenizer runs in parallel with other threads, and computes ids
    only.

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
    """Return the compiled tokenizer, if ``tokenizer.encode`` does nothing but call it; else None."""
    if isinstance(tokenizer, PlainTokenizer):
        return tokenizer.backend_tokenizer
    if not tokenizer.is_fast:
        return None
    from transformers import TokenizersBackend  # imported here, because it takes half a second

    backend = tokenizer.backend_tokenizer
    if not isinstance(tokenizer, TokenizersBackend) or backend.truncation is not None or backend.padding is not None:
        return None
    if type(tokenizer)._encode_plus is not TokenizersBackend._encode_plus:
        return None
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend
