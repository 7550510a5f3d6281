"""Single tokens as text and as bytes: a token may hold only a part of a character."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from parlay.text.detokenizer import make_detokenizer
from parlay.types import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def _byte_alphabet() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class Speller:
    """Spells the tokens of one ``tokenizer``. Without a tokenizer a token is spelled by its number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder if tokenizer is not None else {}
        self._decoders = _decoders(tokenizer)

    def bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token]).encode()
        written = self.tokenizer.convert_ids_to_tokens(token) if self.tokenizer is not None else None
        if self.tokenizer is None or written is None:
            return b""
        if "ByteLevel" in self._decoders and all(letter in _ALPHABET for letter in written):
            return bytes(map(_ALPHABET.__getitem__, written))
        if "ByteFallback" in self._decoders:
            byte = _BYTE.fullmatch(written)
            return bytes([int(byte[1], 16)]) if byte else written.replace(_SPACE, " ").encode()
        text: str = self.tokenizer.decode([token])
        return text.encode()

    def text_of(self, token: int) -> str:
        """The token's text, or its bytes in hexadecimal if they are no whole characters."""
        if self.tokenizer is None:
            return f"token_id:{token}"
        spelled = self.bytes_of(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _decoders(tokenizer: Tokenizer | None) -> frozenset[str]:
    """The kinds of decoder that a compiled tokenizer applies."""
    if tokenizer is None or not tokenizer.is_fast or tokenizer.backend_tokenizer.decoder is None:
        return frozenset()
    state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())
    return frozenset(one["type"] for one in state.get("decoders", [state]))


def tokens_before(tokenizer: Tokenizer | None, ids: Sequence[int], length: int, *, skip_special: bool) -> int:
    """How many tokens begin within the first ``length`` characters of their text."""
    if length == 0:
        return 0
    offsets = Offsets(tokenizer, skip_special=skip_special)
    return sum(offsets.push(token) < length for token in ids)


class Offsets:
    """Where in the text each token begins, in characters; a token within a character begins where that does."""

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special: bool, start: int = 0) -> None:
        self._detokenizer = make_detokenizer(tokenizer, skip_special) if tokenizer is not None else None
        self.end = start

    def push(self, token: int) -> int:
        begin = self.end
        if self._detokenizer is not None:
            self.end += len(self._detokenizer.push(token))
        return begin
