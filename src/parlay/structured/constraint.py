"""A compiled grammar's state at the committed output of one sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from parlay.structured.limits import in_one_line, limit_reached
from parlay.types import ParlayError

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")


class GrammarConstraint:
    """A `Constraint` whose matcher has read the committed tokens; it looks ahead, and is then rolled back.

    ``begin`` makes a matcher that has read nothing. ``ends``: special ids that end the sample; they are allowed
    wherever the text may end. ``barred``: ids that mean the end of a text but do not end this request, so they are
    never allowed. Some grammars count the tokens of a part; their matchers can't be rolled back, so a copy looks ahead.
    """

    def __init__(
        self,
        begin: Callable[[], LLMatcher],
        vocab_size: int,
        *,
        ends: frozenset[int],
        barred: frozenset[int],
    ) -> None:
        self._begin = begin
        self._matcher = begin()
        self.vocab_size = vocab_size
        self.ending = ends | barred
        """The ids that end a text, or would; no text contains them."""
        self._ends = ends
        self._end_ids = torch.tensor(sorted(ends), dtype=torch.int64)
        self._barred_ids = torch.tensor(sorted(barred), dtype=torch.int64)
        self._tokens: list[int] = []
        self._by_copy = False
        """Whether copies look ahead, because rolling back the matcher has failed."""
        self.failure: str | None = None
        """The last reason why the constraint could not go on. The text then ended for this reason."""

    @property
    def committed(self) -> int:
        return len(self._tokens)

    def allowed(self, start: int, path: Sequence[int]) -> Tensor | None:
        """See `Constraint`."""
        return self._after(start, path, self._mask) if self._plain(path) == len(path) else None

    def legal(self, tokens: Sequence[int]) -> int:
        """See `Constraint`. None after a failure."""
        plain = self._plain(tokens)
        reached = self._reached(list(tokens[:plain]))
        if reached < plain or plain == len(tokens):
            return reached
        following_V = self._look(tokens[:plain], self._mask)
        return plain + int(following_V is not None and bool(following_V[tokens[plain]]))

    def forced(self, limit: int) -> tuple[int, ...]:
        """See `Constraint`. None after a failure."""
        tokens: list[int] = []
        while len(tokens) < limit:
            more = self._look(tokens, self._only_tokens)
            if not more:
                break
            tokens += more
        return tuple(tokens[:limit])

    def commit(self, token: int) -> bool:
        """See `Constraint`."""
        if token in self._ends:
            return True
        if self._matcher.try_consume_tokens([token]) != 1:
            limit = limit_reached(self._matcher)
            raise self._fail(limit or f"it does not allow token {token} here, and nothing else was chosen")
        self._tokens.append(token)
        return self._matcher.is_accepting() and self._over()

    # ------------------------------------------------------------------------------------------ at the matcher's place

    def _mask(self) -> Tensor:
        mask_V = unpacked(self._matcher.compute_bitmask(), self.vocab_size)
        if self._matcher.is_accepting():
            mask_V[self._end_ids] = True
        mask_V[self._barred_ids] = False
        return mask_V

    def _only_tokens(self) -> list[int]:
        """Return the next tokens, as long as each has no alternative. Ending the text counts as an alternative."""
        tokens = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        if not tokens and not self._matcher.is_stopped():
            mask_V = self._mask()
            tokens = mask_V.nonzero()[:, 0].tolist() if int(mask_V.sum()) == 1 else []
        return tokens[: self._plain(tokens)]

    def _over(self) -> bool:
        """Whether only an end can follow the committed tokens, which may be a whole text."""
        if self._matcher.is_stopped():
            return True
        following_V = self._look((), self._mask)
        if following_V is None:
            return False
        following_V[self._end_ids] = False
        return not following_V.any()

    # --------------------------------------------------------------------------------------------- getting there, back

    def _plain(self, tokens: Sequence[int]) -> int:
        """Count the tokens before the first one that ends the text."""
        return next((n for n, token in enumerate(tokens) if token in self.ending), len(tokens))

    def _fail(self, reason: str) -> ParlayError:
        self.failure = f"structured output can't go on here: {reason}"
        return ParlayError(self.failure)

    def _look(self, path: Sequence[int], look: Callable[[], T]) -> T | None:
        """Do as `_after` the committed tokens. Returns None also after a failure, which `allowed` reports if it
        matters."""
        try:
            return self._after(len(self._tokens), path, look)
        except ParlayError:
            return None

    def _reached(self, tokens: list[int]) -> int:
        """Count how many of the tokens the grammar allows, one after another."""
        if not self._by_copy:
            reached = self._matcher.validate_tokens(tokens)
            if not self._matcher.is_error():
                return reached
            self._matcher = self._at(len(self._tokens))
        copied = self._matcher.deep_copy()
        reached = copied.try_consume_tokens(tokens)
        self._by_copy = not copied.is_error()
        return reached

    def _at(self, length: int) -> LLMatcher:
        """Make a matcher that has read the first ``length`` committed tokens."""
        matcher = self._begin()
        matcher.try_consume_tokens(self._tokens[:length])
        return matcher

    def _after(self, start: int, path: Sequence[int], look: Callable[[], T]) -> T | None:
        """Call ``look`` with the matcher after ``start`` committed tokens and ``path``. None if the grammar does not
        allow these tokens."""
        if not self._by_copy:
            matcher = self._matcher
            matcher.rollback(len(self._tokens) - start)
            taken = matcher.try_consume_tokens(list(path))
            found = look() if taken == len(path) else None
            if not matcher.is_error():
                matcher.rollback(taken)
                matcher.try_consume_tokens(self._tokens[start:])
            if not matcher.is_error():
                return found
            self._matcher = self._at(len(self._tokens))  # its error is permanent, but drafts must not change the text
        return self._in_copy(start, path, look)

    def _in_copy(self, start: int, path: Sequence[int], look: Callable[[], T]) -> T | None:
        """Do as `_after` with a copy of the matcher, so that nothing must be rolled back."""
        kept = self._matcher
        copied = self._matcher = kept.deep_copy() if start == len(self._tokens) else self._at(start)
        try:
            taken = copied.try_consume_tokens(list(path))
            found = look() if taken == len(path) else None
        finally:
            self._matcher = kept
        self._by_copy = not copied.is_error()
        if copied.is_error():
            raise self._fail(in_one_line(copied.get_error()))
        return found


def unpacked(bits: bytes, vocab_size: int) -> Tensor:
    """Unpack a mask of one bit per token, lowest bit first, to bool ``[vocab_size]``."""
    mask_V = np.unpackbits(np.frombuffer(bits, np.uint8), count=vocab_size, bitorder="little")
    return torch.from_numpy(mask_V.view(np.bool_))
