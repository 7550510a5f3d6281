"""Finds the text of each row of vLLM's batch. vLLM does not name requests, and rows move when other requests end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parlay.drafters.token_text import TokenText, open_text
from parlay.types import Observation, SamplingParams

Ids = NDArray[np.int32]

_END = 32
"""How many tokens at both ends of a text are compared to see whether its row has moved."""
_AWAY = 16
"""A text is over after this many calls in which it had no row. vLLM may leave a request out for some calls, as in
preemption."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the texts by row (None while a prompt is being read), and what the step committed to each text.

    ``ended``: texts that have no row any more. ``decoded``: the step decoded exactly these texts, and the previous call
    had all of them.
    """

    texts: Sequence[TokenText | None]
    observations: Sequence[Observation]
    ended: Sequence[TokenText]
    decoded: bool


@dataclass(eq=False)
class Rows:
    """Finds texts by row; a text whose row has moved is found by comparing all its tokens.

    ``longest``: the most tokens of a text. ``most``: the most texts kept that were not in the last call. Two rows with
    the same tokens are told apart by their places. If both move, they may be confused; that does no harm, because the
    state of either text is valid for the other.
    """

    longest: int
    most: int
    store: bool = False
    _last: list[TokenText | None] = field(default_factory=list)
    _away: dict[TokenText, int] = field(default_factory=dict)
    """Texts without a row, and for how many calls they had none."""
    _opened: int = 0

    def read(self, sampled: Sequence[Sequence[int]], lengths: Sequence[int] | Ids, ids: Ids) -> Call:
        """Read the arguments of a call of vLLM. ``sampled``: the tokens that the step committed to each row, empty
        while the row's prompt is read.

        Row i has the tokens ``ids[i, :lengths[i]]``, including committed ones.
        """
        texts = self._in_place(sampled, lengths, ids)
        waiting = [row for row, new in enumerate(sampled) if new and texts[row] is None]
        decoded = not waiting and all(sampled)
        if waiting:
            self._find_moved(waiting, texts, sampled, lengths, ids)
        decoded = decoded or (all(sampled) and all(texts[row] in self._last for row in waiting))
        observations = [text.commit(new) for text, new in zip(texts, sampled, strict=True) if text is not None]
        return Call(texts, observations, self._put_away(texts), decoded)

    def clear(self) -> list[TokenText]:
        """Forget all texts, and return them."""
        texts = [*filter(None, self._last), *self._away]
        self._last, self._away = [], {}
        return texts

    def _in_place(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int] | Ids, ids: Ids
    ) -> list[TokenText | None]:
        texts: list[TokenText | None] = [None] * len(sampled)
        for row, (text, new) in enumerate(zip(self._last, sampled, strict=False)):
            if text is not None and new:
                known = int(lengths[row]) - len(new)
                if len(text.tokens) == known and _ends_agree(text.tokens, ids[row]):
                    texts[row] = text
        return texts

    def _find_moved(
        self,
        waiting: Sequence[int],
        texts: list[TokenText | None],
        sampled: Sequence[Sequence[int]],
        lengths: Sequence[int] | Ids,
        ids: Ids,
    ) -> None:
        """Find the texts of rows that have moved or are new."""
        there = set(filter(None, texts))
        free = [text for text in (*self._last, *self._away) if text is not None and text not in there]
        for row in waiting:
            known = int(lengths[row]) - len(sampled[row])
            found = next((text for text in free if _agrees(text.tokens, ids[row], known)), None)
            if found is None:
                self._opened += 1
                params = SamplingParams(temperature=0.0, max_tokens=max(1, self.longest - known))
                found = open_text(self._opened, ids[row, :known].tolist(), params, store=self.store)
            else:
                free.remove(found)
            texts[row] = found

    def _put_away(self, texts: Sequence[TokenText | None]) -> list[TokenText]:
        """Note the texts without a row; returns the texts that are over."""
        there = set(filter(None, texts))
        absent = {text: calls + 1 for text, calls in self._away.items() if text not in there}
        absent |= {text: 1 for text in self._last if text is not None and text not in there}
        ended = [
            text
            for place, (text, calls) in enumerate(absent.items())
            if calls > _AWAY or place < len(absent) - self.most
        ]
        self._away = {text: calls for text, calls in absent.items() if text not in ended}
        self._last = list(texts)
        return ended


def _ends_agree(tokens: Sequence[int], ids: Ids) -> bool:
    """Whether a row has a text's first and last tokens at their places."""
    known = len(tokens)
    start = max(0, known - _END)
    return bool(tokens[start:] == ids[start:known].tolist() and tokens[:_END] == ids[: min(known, _END)].tolist())


def _agrees(tokens: list[int], ids: Ids, known: int) -> bool:
    return len(tokens) == known and _ends_agree(tokens, ids) and tokens == ids[:known].tolist()
