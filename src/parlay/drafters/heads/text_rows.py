"""A head's rows of the committed text: the target's features, the head's cache, and which rows run next.

The row of token p reads the features of token p and the embedding of token p + 1. So all rows before the root's can run
once the features of all tokens before the root are known. Tokens that the target had cached and the head had not, and
tokens committed while the drafter was not used, have features of zero, so that their rows know the tokens alone: the
target would have to compute their features again. Without rows of these tokens no later row would be at the place of
its token, and the next turn of a conversation would find none of them in the head's cache.
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from parlay.drafters.heads.waiting_features import WaitingFeatures, as_one
from parlay.drafters.per_sequence import History
from parlay.drafters.state_room import StateBytes, StateRoom
from parlay.types import Features, Observation, OutOfRoom, PickedRows, Runner, Segment, SequenceView, side_by_side

_CHUNK = 512  # the most rows of one sequence in one forward
_FEW = 16  # at most this many rows run together with the last one, which is faster than a forward of their own


@dataclass(slots=True)
class Ahead:
    """Features of consecutive tokens from place ``start`` on, in pieces."""

    start: int
    tokens: list[int]
    features: list[PickedRows]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True)
class HeadSequence:
    """One sequence: its first ``ran`` rows are in the head's cache, and ``waiting`` has the features of later rows.

    ``text``: the tokens that these rows and features belong to. The root's row is never kept in the cache: the next
    proposal runs it again, whether or not a token was committed in between.
    """

    name: int
    text: History = field(default_factory=History)
    ran: int = 0
    waiting: WaitingFeatures = field(default_factory=WaitingFeatures)
    ahead: Ahead | None = None
    """Features that were observed although those of some tokens before them are missing."""
    shown: int = 0
    """How many tokens, from the first, were `WaitingRows.unread` before."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    """The tokens of the last proposal's text, for the compiled decoder."""

    @property
    def known(self) -> int:
        """How many tokens, from the first, have features."""
        return self.ran + self.waiting.rows

    def lacks(self, view: SequenceView) -> bool:
        """Whether features of tokens before the root are missing."""
        return self.ran + self.waiting.rows < len(view.tokens) - 1


class HeadSequences:
    """One drafter's sequences. ``taps``: the target's layers whose states make the features, in order.

    Features wait as long as memory allows. If there is too little, the sequence drops all but its last few.
    """

    def __init__(self, runner: Runner, taps: Sequence[int], room: StateRoom) -> None:
        self._runner, self._taps = runner, tuple(taps)
        self._states: dict[int, HeadSequence] = {}  # by the target's sequence, least recently used first
        self._bytes = StateBytes(room, self._states, lambda state: runner.release(state.name))
        self._unseen_1F: Tensor | None = None  # zeros, for a token without features; made when some are seen
        self._row_bytes = 0  # of one token's features

    def take(self, view: SequenceView, start: int, taps: Mapping[int, Tensor]) -> None:
        """Take in the features of the tokens from ``start`` on. Features after a gap wait until it is filled."""
        state, features = self.aligned(view), side_by_side(taps, self._taps)
        end = start + len(features.rows)
        if self._unseen_1F is None:
            self._unseen_1F = features.all_NF.new_zeros(1, features.all_NF.shape[1])
            self._row_bytes = self._unseen_1F.nbytes
        if state.known >= end or not self._make_room(state, view, end - start):
            return
        known = state.known
        if start <= known:
            state.waiting.add(PickedRows(features.all_NF, features.rows[known - start :]))
            state.text.tokens += view.tokens[len(state.text.tokens) : end]
            self._join(state, view)
        else:
            if state.ahead is None or state.ahead.end != start:
                state.ahead = Ahead(start, [], [])
            state.ahead.tokens += view.tokens[start:end]
            state.ahead.features.append(features)
        self._count(state, view)

    def _make_room(self, state: HeadSequence, view: SequenceView, rows: int) -> bool:
        """Make room for the features of so many rows, if need be by dropping waiting ones. False if there is none.

        A few rows are taken in without asking.
        """
        if state.waiting.rows + rows <= _FEW and state.ahead is None:
            return True
        if self._bytes.room.make(rows * self._row_bytes):
            return True
        state.ahead = None
        self._forget(state, state.ran)
        self._count(state, view)
        return rows <= _FEW or self._bytes.room.make(rows * self._row_bytes)

    def _count(self, state: HeadSequence, view: SequenceView) -> None:
        """Count the bytes of the sequence's features."""
        rows = state.waiting.rows + (len(state.ahead.tokens) if state.ahead is not None else 0)
        self._bytes.set(view.sequence, rows * self._row_bytes)

    def _join(self, state: HeadSequence, view: SequenceView) -> None:
        """Append the features seen ahead, if they now follow the known ones. If they no longer fit, drop them."""
        ahead = state.ahead
        if ahead is None or state.known < ahead.start:
            return
        known, state.ahead = state.known, None
        if known == ahead.start and list(view.tokens[ahead.start : ahead.end]) == ahead.tokens:
            for features in ahead.features:
                state.waiting.add(features)
            state.text.tokens += view.tokens[len(state.text.tokens) : ahead.end]

    def lacking(self, state: HeadSequence, view: SequenceView) -> tuple[int, int]:
        """The span of missing features: it ends where features were seen ahead, or at the root."""
        ahead = state.ahead
        whole = ahead is not None and list(view.tokens[ahead.start : ahead.end]) == ahead.tokens
        return state.known, ahead.start if ahead is not None and whole else len(view.tokens) - 1

    def aligned(self, view: SequenceView) -> HeadSequence:
        """The state of the view's sequence, cut back to what is still valid, and marked as recently used.

        It stays valid until tokens change.
        """
        state = self._states.pop(view.sequence, None) or self._open(view)
        self._states[view.sequence] = state
        agreed = min(state.text.agree(view.tokens), len(view.tokens) - 1)
        del state.ids[agreed:]
        if agreed < len(state.text.tokens):
            sound = max(agreed - 1, 0)  # the row of token p reads token p + 1
            if state.ran > sound:
                self._forget(state, sound)
            else:
                state.waiting.cut(max(agreed - state.ran, 0))
            state.text.cut(agreed)
        return state

    def fill(self, state: HeadSequence, view: SequenceView) -> None:
        """Give tokens features of zero: those before seen ones, and those of the answer, except the latest."""
        while state.lacks(view) and self._fill_next(state, view):
            pass

    def _fill_next(self, state: HeadSequence, view: SequenceView) -> bool:
        """Fill the first span of missing features. False if there is none."""
        unseen_1F, (known, seen) = self._unseen_1F, self.lacking(state, view)
        end = min(seen, len(view.tokens) - 2)
        if unseen_1F is None or known >= end or (seen == len(view.tokens) - 1 and known < view.prompt_length):
            return False
        state.waiting.add(PickedRows(unseen_1F, [0] * (end - known)))
        state.text.tokens += view.tokens[len(state.text.tokens) : end]
        self._join(state, view)
        return True

    def has_room(self, state: HeadSequence, view: SequenceView) -> bool:
        """Whether there is memory for the missing features."""
        start, end = self.lacking(state, view)
        return end - start <= _FEW or (end - start) * self._row_bytes <= self._bytes.room.left

    def reserve(self, state: HeadSequence, view: SequenceView, tokens: int, busy: set[int]) -> bool:
        """Reserve cache for ``tokens`` tokens, if need be by evicting idle sequences (not ``busy``), oldest use first.

        False if there is too little, or if the target took the memory of rows that ran, so that features are missing.
        """
        try:
            while not self._runner.reserve(state.name, tokens):
                idle = next((sequence for sequence in self._states if sequence not in busy), None)
                if idle is None:
                    return False
                self.release(idle)
        except OutOfRoom:
            return False
        if self._runner.truncate(state.name, state.ran) < state.ran:
            self._forget(state, state.ran)
        return not state.lacks(view)

    def keep(self, state: HeadSequence, view: SequenceView, rows: int) -> None:
        """Keep the ``rows`` rows that the last forward ran in the cache, except the root's."""
        most = min(state.ran + rows, len(view.tokens) - 2)
        left = self._runner.keep(state.name, ())
        if left > most:
            left = self._runner.truncate(state.name, most)
        state.waiting.drop(min(left - state.ran, state.waiting.rows) if left >= state.ran else state.waiting.rows)
        state.ran = left
        state.text.cut(max(state.known, _standing_on(left)))
        self._count(state, view)

    def release(self, sequence: int) -> None:
        """Forget the sequence. Unknown names are ignored."""
        state = self._states.pop(sequence, None)
        self._bytes.release(sequence)
        if state is not None:
            self._runner.release(state.name)

    def _open(self, view: SequenceView) -> HeadSequence:
        """Open a sequence, perhaps with cached rows of an earlier one.

        Rows do not read the first token, so the salt has it.
        """
        tokens = view.tokens
        state = HeadSequence(uuid.uuid4().int >> 66)
        state.ran = self._runner.open(state.name, tokens[1:], f"{view.request.salt}/{tokens[0]}")
        state.text.tokens += tokens[: state.ran + 1] if state.ran else []
        return state

    def _forget(self, state: HeadSequence, rows: int) -> None:
        """Keep at most ``rows`` rows. The features of the others are then missing."""
        state.ran = self._runner.truncate(state.name, rows)
        state.waiting = WaitingFeatures()
        state.text.cut(_standing_on(state.ran))


def _standing_on(rows: int) -> int:
    """How many tokens, from the first, the first ``rows`` rows depend on."""
    return rows + 1 if rows else 0


Inputs = Callable[[Tensor, Sequence[int]], Tensor]
"""Makes what rows read, ``[K, H]``, from the target's features ``[K, F]`` and the token after each."""

ReadText = Callable[[Segment, Sequence[PickedRows]], None]
"""Runs rows of a text, with these features, so that they can be kept."""


@dataclass(frozen=True, slots=True)
class WaitingRows:
    """One sequence's rows that must run first, the root's last: their tokens, and the target's features.

    ``unread`` are the tokens of the text that earlier calls did not have, for LM heads that list the newest ones.
    ``text`` has all tokens, until the sequence's next proposal.
    """

    view: SequenceView
    state: HeadSequence
    pending: tuple[int, ...]
    features: Sequence[PickedRows]
    make_inputs: Inputs
    unread: Sequence[int]
    text: array[int]

    @property
    def name(self) -> int:
        """The sequence's number in the head's runner."""
        return self.state.name

    def inputs(self) -> Tensor:
        """The inputs of the rows, ``[K, H]``."""
        return self.make_inputs(as_one(self.features), self.pending)


class TextRows:
    """Runs a head's rows of committed texts. ``taps``: the target's layers whose states make the features."""

    def __init__(
        self, runner: Runner, taps: Sequence[int], inputs: Inputs, room: StateRoom, read: ReadText | None = None
    ) -> None:
        """``read`` runs rows whose output nobody reads; None: a forward of the runner does."""
        self.runner = runner
        self._taps, self._inputs, self._read = tuple(taps), inputs, read
        self._sequences = HeadSequences(runner, taps, room)

    def take(self, observation: Observation) -> None:
        """Take in the features of an observed step."""
        if observation.taps:
            self._sequences.take(observation.view, observation.start, observation.taps)

    def release(self, sequence: int) -> None:
        """Forget the sequence. Unknown names are ignored."""
        self._sequences.release(sequence)

    def waiting(self, views: Sequence[SequenceView], rows: Sequence[int | None]) -> dict[int, WaitingRows]:
        """The sequences that can run now, by index. All their rows have run except the last chunk.

        ``rows``: how many rows each needs besides those of its text; None leaves the sequence out.
        """
        states: dict[int, HeadSequence] = {}
        for place, (view, more) in enumerate(zip(views, rows, strict=True)):
            if more is not None and len(view.tokens) > view.prompt_length:  # else this step shows the prompt's features
                state = states[place] = self._sequences.aligned(view)
                self._sequences.fill(state, view)
        if lacking := [place for place, state in states.items() if state.lacks(views[place])]:
            self._catch_up([views[place] for place in lacking])
        busy, ready = {views[place].sequence for place in states}, dict[int, WaitingRows]()
        for place, state in states.items():
            view, more = views[place], rows[place] or 0
            if self._sequences.reserve(state, view, len(view.tokens) + more, busy):
                ready[place] = self._waiting(state, view)
        return ready

    def keep(self, waiting: WaitingRows) -> None:
        """Keep the rows that have run, except the root's, which the next proposal runs again."""
        self._sequences.keep(waiting.state, waiting.view, len(waiting.pending))

    def _catch_up(self, views: Sequence[SequenceView]) -> None:
        """Let the target compute the features of the views' last tokens, which were not seen.

        A prefix hit and a pause leave such tokens. Without their features a head is right a little less often, but
        computing all of them would make all requests wait.
        """
        sequences = self._sequences
        while views := [
            view for view in views
            if (state := sequences.aligned(view)).lacks(view) and sequences.has_room(state, view)
        ]:  # fmt: skip
            views = self._closed(views)

    def _closed(self, lacking: Sequence[SequenceView]) -> list[SequenceView]:
        """Fill the first missing span of each view. Returns the views that may miss more."""
        layers, sequences = lacking[0].layers, self._sequences
        assert layers is not None, "the needs name taps"
        spans = [sequences.lacking(sequences.aligned(view), view) for view in lacking]
        for view, (start, _), taps in zip(lacking, spans, layers.states(lacking, spans, self._taps), strict=True):
            if taps:
                sequences.take(view, start, taps)
        return [view for view, (_, end) in zip(lacking, spans, strict=True) if sequences.aligned(view).known >= end]

    def _waiting(self, state: HeadSequence, view: SequenceView) -> WaitingRows:
        while (waiting := state.waiting.rows) > _FEW:
            # The outputs of these rows are not read, so the last layer computes only their keys and values.
            rows = min(waiting - 1, _CHUNK)
            tokens = tuple(view.tokens[state.ran + 1 : state.ran + 1 + rows])
            text, features = Segment(state.name, tokens, logits_from=rows), state.waiting.first(rows)
            if self._read is not None:
                self._read(text, features)
            else:
                inputs_KH = self._inputs(as_one(features), tokens)
                self.runner.forward([text._replace(features=Features(inputs_KH))])
            self._sequences.keep(state, view, rows)
        pending = tuple(view.tokens[state.ran + 1 : state.ran + 1 + waiting])
        unread = view.tokens[state.shown :]
        state.shown = len(view.tokens)
        state.ids.extend(view.tokens[len(state.ids) :])
        return WaitingRows(view, state, pending, state.waiting.first(waiting), self._inputs, unread, state.ids)
