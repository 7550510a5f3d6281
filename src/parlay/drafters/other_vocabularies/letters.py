"""Tokens as the letters (bytes) they stand for, so that texts can be compared however they are tokenised."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from parlay.types import Tokenizer

LAST_BYTE = "\xff"
"""Letters up to this one are bytes; each beyond it is a token of its own."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>$")


class TokenLetters:
    """The bytes that a tokenizer's pieces stand for.

    Pieces may have a sign for the space (▁ or Ġ), and bytes written as letters (GPT-2) or as <0xE2>.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._letters = byte_letters() if _is_byte_level(tokenizer) else {}
        self._added = {token.content for token in tokenizer.added_tokens_decoder.values()}

    def is_byte(self, piece: str) -> bool:
        """Whether the piece stands for a single byte that has no other piece."""
        return piece not in self._added and _BYTE.match(piece) is not None

    def spell(self, piece: str) -> bytes:
        if piece in self._added:
            return piece.encode()
        byte = _BYTE.match(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        if self._letters and all(letter in self._letters for letter in piece):
            return bytes(self._letters[letter] for letter in piece)
        return piece.replace("▁", " ").encode()


class Letters:
    """Converts token ids to text with one letter per byte. Results are cached.

    A special token, or an unknown id, is one letter that nothing else has. If the tokenizer has no tokenizer.json,
    every id is such a letter.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer if tokenizer is not None and tokenizer.is_fast else None
        self._speller = TokenLetters(self._tokenizer) if self._tokenizer is not None else None
        self._known: dict[int, str] = {}
        if self._tokenizer is not None:
            added = self._tokenizer.added_tokens_decoder.items()
            self._known = {token: _own(token) for token, piece in added if piece.special}

    def of(self, token: int) -> str:
        letters = self._known.get(token)
        if letters is None:
            letters = self._known[token] = self._spell(token)
        return letters

    def text(self, tokens: Iterable[int]) -> str:
        return "".join(map(self.of, tokens))

    def _spell(self, token: int) -> str:
        if self._tokenizer is None or self._speller is None:
            return _own(token)
        piece = self._tokenizer.convert_ids_to_tokens(token)
        return self._speller.spell(piece).decode("latin-1") if piece else _own(token)


def _own(token: int) -> str:
    return chr(ord(LAST_BYTE) + 1 + token)


def readable(letters: str) -> str:
    """The letters as ordinary text, up to the last whole character before the first letter that is not a byte.

    Empty if they begin inside a character.
    """
    end = next((place for place, letter in enumerate(letters) if letter > LAST_BYTE), len(letters))
    text = letters[:end].encode("latin-1").decode("utf-8", "replace")
    return "" if text.startswith("\ufffd") else text.partition("\ufffd")[0]


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's decoder says that tokens are bytes written as letters."""
    decoder = tokenizer.backend_tokenizer.decoder
    return decoder is not None and '"ByteLevel"' in json.dumps(json.loads(decoder.__getstate__()))


def byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable bytes are themselves, the others are the letters from 256 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
