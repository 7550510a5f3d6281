"""Turns tokens into text one at a time, and finds stop strings, which may span tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from parlay.types import SamplingParams, Tokenizer


class Detokenizer(Protocol):
    def push(self, token: int) -> str:
        """Add a token, and return the text that it completes; empty while the text ends inside a character."""
        ...


_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The replacement character, which stands for bytes that are not a character."""
_INVALID_PREFIX = "Invalid prefix encountered"
"""Beginning of the library's error message if a token changes the text of earlier tokens."""


class _FastDetokenizer:
    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._pending: list[int] = []
        """The tokens since the last text."""

    def push(self, token: int) -> str:
        self._pending.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # the library raises no narrower type
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            piece = self._restart()
        if piece:
            self._pending.clear()
        return piece

    def _restart(self) -> str:
        """Start again from the tokens whose text is not released yet.

        The library decodes a run of single-byte tokens together. If some of the bytes are not a character, it makes the
        whole run replacement characters, also bytes whose text was released already. The released text stays.
        """
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return "".join([self._stream.step(self._tokenizer, token) or "" for token in self._pending])


class _SlowDetokenizer:
    """For tokenizers without a compiled backend: decodes all tokens each time, which is quadratic but correct."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._length = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        if text.endswith(_BROKEN):
            return ""
        piece = text[self._length :]
        self._length = len(text)
        return piece


def make_detokenizer(tokenizer: Tokenizer, skip_special_tokens: bool) -> Detokenizer:
    if tokenizer.is_fast:
        return _FastDetokenizer(tokenizer, skip_special_tokens)
    return _SlowDetokenizer(tokenizer, skip_special_tokens)


_READ_BEFORE = 16
"""How many of the prompt's last tokens are decoded before the text. Some tokenizers leave out the space before the very
first word, and a character may begin in the prompt and end in the text."""


class TextStream:
    """The text of one sample, which grows as tokens are committed. It is also the engine's stop checker for the sample.

    Text is held back until it can't be part of a stop string, unless the request wants stop strings in its output.
    ``before``: the tokens that the text continues. ``ends``: tokens that are skipped, special or not, if the request
    skips special tokens. ``marks`` keeps all other special tokens in the text. Stop strings are looked for after the
    first ``given`` characters.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        before: Sequence[int] = (),
        ends: frozenset[int] = frozenset(),
        *,
        marks: bool = False,
        given: int = 0,
    ) -> None:
        skips = params.skip_special_tokens
        self._skipped = ends if skips else frozenset()
        self._detokenizer = make_detokenizer(tokenizer, skips and not marks)
        self._broken_before = 0
        """How many replacement characters the text before ended with. The first piece may repeat them at its beginning,
        where they are removed."""
        self._read_before([token for token in before[-_READ_BEFORE:] if token not in self._skipped], tokenizer)
        self._stops, self._given = params.stops, given
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self.ends: list[int] = []  # length of the text after each token
        self._next = 0  # the first token whose text is not completely released
        self._released = 0
        self.text = ""
        self.stop_reason: str | None = None

    def push(self, token: int) -> bool:
        piece = "" if token in self._skipped else self._detokenizer.push(token)
        if piece and self._broken_before:
            begins = len(piece) - len(piece.lstrip(_BROKEN))
            piece, self._broken_before = piece[min(begins, self._broken_before) :], 0
        before = len(self.text)
        self.text += piece
        stopped = bool(self._stops) and len(self.ends) + 1 >= self._min_tokens and self._find_stop(before)
        self.ends.append(len(self.text))
        return stopped

    def _read_before(self, tokens: list[int], tokenizer: Tokenizer) -> None:
        pieces = [self._detokenizer.push(token) for token in tokens]
        if pieces and not pieces[-1]:
            text = tokenizer.decode(tokens)
            self._broken_before = len(text) - len(text.rstrip(_BROKEN))

    def _find_stop(self, before: int) -> bool:
        """Cut the text at the earliest stop string that the new token completed."""
        matches = [(self.text.find(stop, max(self._given, before - len(stop) + 1)), stop) for stop in self._stops]
        found = [(start, stop) for start, stop in matches if start >= 0]
        if not found:
            return False
        start, self.stop_reason = min(found)
        self.text = self.text[: start + len(self.stop_reason) if self._include_stop else start]
        return True

    def release(self, final: bool) -> list[tuple[int, str]]:
        """Release text, as pairs (index of the output token that the piece came with, piece). With ``final``, nothing
        is held back."""
        safe = len(self.text) if final else max(self._released, len(self.text) - self._hold)
        pieces: list[tuple[int, str]] = []
        while self._next < len(self.ends) and self._released < safe:
            end = min(self.ends[self._next], safe)
            if end > self._released:
                pieces.append((self._next, self.text[self._released : end]))
                self._released = end
            if self.ends[self._next] > safe:
                break
            self._next += 1
        return pieces
