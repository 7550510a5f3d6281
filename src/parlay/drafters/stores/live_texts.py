"""The suffixes of each request's own text, which grows, and whose last tokens may be taken back."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from parlay.drafters.per_sequence import History
from parlay.drafters.state_room import StateBytes, StateRoom
from parlay.drafters.step_budget import StepBudget
from parlay.drafters.stores.suffixes import END, Suffixes
from parlay.types import SequenceView

MOST_OF_REFERENCES = 65_536
"""The most tokens of a request's references that each of its samples indexes: 10 MB, over 32 steps."""
_TOKEN_BYTES = 150  # 141 in code, 156 in random ids
_UNDONE = 256
"""The most tokens that can be taken back at once: in a cascade, tokens drafted by others come and go."""


class LiveText:
    """The suffixes of a sequence and of its references, updated with each committed token.

    ``text``: all tokens indexed so far, at the places of `Suffixes.first_copy`. If too many tokens are taken back, it
    is built again.
    """

    def __init__(self, depth: int, references: tuple[tuple[int, ...], ...]) -> None:
        self.references = references
        self._depth = depth
        self._history = History()
        self._reset()

    def _reset(self) -> None:
        self._history.cut(0)
        self.suffixes = Suffixes(self._depth, _UNDONE)
        self.text = array("i")
        self._unread = self._parts()
        self._left = min(MOST_OF_REFERENCES, sum(map(len, self.references)))
        self._reading: Sequence[int] | None = None
        """The reference that is taken in now; None: the sequence itself."""
        self._place = 0
        self._next_part()

    def _parts(self) -> Iterator[Sequence[int]]:
        left = MOST_OF_REFERENCES
        for reference in self.references:
            yield reference[:left]
            left -= len(reference[:left])

    def _next_part(self) -> None:
        self._reading, self._place = next(self._unread, None), 0
        self.suffixes.begin()
        self.text.append(END)

    def follow(self, tokens: Sequence[int], step: StepBudget | None = None) -> Suffixes | None:
        """The suffixes of references and ``tokens``; None while this step has no time to index all of them."""
        history = self._history
        if gone := history.tokens[history.agree(tokens) :]:
            self._take_back(gone)
        wanted = self._left + len(tokens) - len(history.tokens)
        most = wanted if step is None else step.take(wanted)
        while self._reading is not None:
            new = self._reading[self._place : self._place + most]
            self._take_in(new)
            most -= len(new)
            self._left -= len(new)
            if self._place < len(self._reading):
                break
            self._next_part()
        if self._reading is None:
            new = tokens[len(history.tokens) : len(history.tokens) + most]
            history.tokens.extend(new)
            self._take_in(new)
        return self.suffixes if len(history.tokens) == len(tokens) else None

    def _take_back(self, tokens: Sequence[int]) -> None:
        """Remove the sequence's last tokens."""
        if self.suffixes.take_back(tokens):
            self._history.cut(len(self._history.tokens) - len(tokens))
            del self.text[-len(tokens) :]
        else:
            self._reset()

    def _take_in(self, tokens: Sequence[int]) -> None:
        self.text.extend(tokens)
        for token in tokens:
            self.suffixes.append(token)
        self._place += len(tokens)


class LiveTexts:
    """The `LiveText` of each sequence, made on first use. Each step indexes as many tokens as `StepBudget` allows."""

    def __init__(self, depth: int, room: StateRoom) -> None:
        self._depth = depth
        self._texts: dict[int, LiveText] = {}
        self._bytes = StateBytes(room, self._texts)
        self._step = StepBudget(room, _TOKEN_BYTES)

    def begin(self, budgets: Sequence[int]) -> None:
        """Begin a step in which the sequences with a budget draft."""
        self._step.begin(budgets)

    def of(self, view: SequenceView) -> LiveText | None:
        """The text of a sequence, with all of its tokens; None while it is being indexed."""
        references = view.request.references
        text = self._texts.get(view.sequence)
        if text is None or text.references is not references:
            text = self._texts[view.sequence] = LiveText(self._depth, references)
        whole = text.follow(view.tokens, self._step) is not None
        self._bytes.set(view.sequence, len(text.text) * _TOKEN_BYTES)
        return text if whole else None

    def release(self, sequence: int) -> None:
        self._texts.pop(sequence, None)
        self._bytes.release(sequence)
